"""Session caps in the engine list, the status and the metrics, and how to set them."""

import asyncio
from pathlib import Path

from rollyard.engines.pool.admission import CapRules
from tests.service.site import engine_table, open_site, scripted

FIELDS = ("admission", "cap", "kv_use", "waiting")


async def test_the_cap_and_the_cache_of_an_engine_are_shown_everywhere(tmp_path: Path) -> None:
    async with scripted() as engine, scripted() as silent, open_site(tmp_path) as site:
        engine.kv_use = 0.25
        added = await site.post("/v1/engines", engine_table(engine, capacity=100))
        expected = {"admission": "adaptive", "cap": CapRules().start, "kv_use": 0.25, "waiting": 0}
        assert {name: added.body[name] for name in FIELDS} == expected
        await site.post("/v1/engines", engine_table(silent, id="silent"))
        for path in ("/v1/engines", "/v1/status"):
            first, second = (await site.get(path)).body["engines"]
            assert {name: first[name] for name in FIELDS} == expected
            assert {name: second[name] for name in FIELDS[1:]} == {"cap": None, "kv_use": None, "waiting": None}
        text = (await site.get("/metrics")).body.decode()
        assert f'rollyard_engine_session_cap{{engine="e1"}} {float(CapRules().start)}' in text
        assert 'rollyard_engine_kv_use{engine="e1"} 0.25' in text
        assert 'rollyard_seats_waiting{policy="default"} 0.0' in text
        assert 'rollyard_engine_session_cap{engine="silent"}' not in text


async def test_an_engine_that_reports_its_tokens_has_a_rate_with_those_of_running_calls(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path) as site:
        engine.kv_use, engine.sampled_tokens = 0.25, 0
        added = await site.post("/v1/engines", engine_table(engine))
        assert added.body["tokens_per_s"] is None, "one report is no rate"
        async with asyncio.timeout(60):
            while not (entry := (await site.get("/v1/engines")).body["engines"][0])["tokens_per_s"]:
                engine.sampled_tokens += 1000
                await asyncio.sleep(0.02)
        assert entry["tokens"] == 0 and entry["tokens_per_s"] > 0, "no call has ended"
        async with asyncio.timeout(60):
            while entry["tokens_per_s"] != 0:
                await asyncio.sleep(0.02)
                (entry,) = (await site.get("/v1/status")).body["engines"]
        engine.sampled_tokens = None
        async with asyncio.timeout(60):
            while entry["tokens_per_s"] is not None:
                await asyncio.sleep(0.02)
                (entry,) = (await site.get("/v1/status")).body["engines"]


async def test_a_cap_can_be_fixed_and_stays_so_after_a_restart(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with open_site(tmp_path) as site:
            added = await site.post("/v1/engines", engine_table(engine, capacity=7, admission="fixed"))
            assert (added.status, added.body["cap"]) == (201, 7)
            bad = await site.post("/v1/engines", engine_table(engine, id="e2", admission="sometimes"))
            assert bad.status == 422 and "admission" in str(bad.body)
        async with open_site(tmp_path) as site:
            (entry,) = (await site.get("/v1/engines")).body["engines"]
            assert (entry["admission"], entry["cap"]) == ("fixed", 7)
        tables = [engine_table(engine, capacity=9, admission="fixed")]
        async with open_site(tmp_path, engines=tables) as site:
            assert (await site.get("/v1/engines")).body["engines"][0]["cap"] == 9
