"""Engines over HTTP, how they are stored, and the status."""

import socket
from pathlib import Path
from typing import Any

import pytest

from rollyard import __version__
from rollyard.engines import Router
from rollyard.service import build
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import TRAINER, engine_table, open_site, scripted
from tests.service.skill import skilled
from tests.worker import free_port


async def test_an_engine_is_added_listed_stored_and_removed(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with open_site(tmp_path) as site:
            added = await site.post("/v1/engines", engine_table(engine, api_key="psst", capacity=7))
            assert added.status == 201, added.body
            assert (added.body["id"], added.body["state"], added.body["capacity"]) == ("e1", "up", 7)
            assert added.body["info"]["logprobs_kind"] == "processed"
            again = await site.post("/v1/engines", engine_table(engine))
            assert (again.status, again.code) == (409, "engine_exists")
            listed = await site.get("/v1/engines", token=TRAINER)
            assert [entry["id"] for entry in listed.body["engines"]] == ["e1"]
            assert "psst" not in str(listed.body)
        async with open_site(tmp_path) as site:
            (entry,) = (await site.get("/v1/engines")).body["engines"]
            assert (entry["id"], entry["capacity"], entry["state"]) == ("e1", 7, "up")
            await site.submit("r1")
            assert (await site.ended("r1"))["outcome"] == "completed"
            assert b'engine="e1"' in (await site.get("/metrics")).body
            assert (await site.delete("/v1/engines/e1")).status == 204
            assert b'engine="e1"' not in (await site.get("/metrics")).body
        async with open_site(tmp_path) as site:
            assert (await site.get("/v1/engines")).body == {"engines": []}


async def test_an_engine_that_is_added_while_the_one_of_its_id_is_being_closed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, added = Router._close_when_idle, list[int]()  # pyright: ignore[reportPrivateUsage]
    async with scripted() as engine:
        async with open_site(tmp_path) as site:
            assert (await site.post("/v1/engines", engine_table(engine))).status == 201

            async def slowly(self: Router, *member: Any) -> None:
                added.append((await site.post("/v1/engines", engine_table(engine, capacity=9))).status)
                await close(self, *member)

            with monkeypatch.context() as patch:
                patch.setattr(Router, "_close_when_idle", slowly)
                assert (await site.delete("/v1/engines/e1")).status == 204
            assert added == [201]
        async with open_site(tmp_path) as site:
            (entry,) = (await site.get("/v1/engines")).body["engines"]
            assert (entry["id"], entry["capacity"]) == ("e1", 9)


async def test_an_engine_that_is_removed_before_it_is_stored_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, removed = Router.add, list[int]()
    async with scripted() as engine:
        async with open_site(tmp_path) as site:

            async def then_removed(self: Router, spec: Any) -> Any:
                status = await add(self, spec)
                removed.append((await site.delete("/v1/engines/e1")).status)
                return status

            with monkeypatch.context() as patch:
                patch.setattr(Router, "add", then_removed)
                answer = await site.post("/v1/engines", engine_table(engine))
            assert (answer.status, removed) == (404, [204])
        async with open_site(tmp_path) as site:
            assert (await site.get("/v1/engines")).body == {"engines": []}


async def test_all_engines_are_removed_though_another_call_removes_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, removed = Router._close_when_idle, list[int]()  # pyright: ignore[reportPrivateUsage]
    async with scripted() as engine, open_site(tmp_path) as site:
        for name in ("e1", "e2", "e3"):
            assert (await site.post("/v1/engines", engine_table(engine, id=name))).status == 201

        async def beside_another(self: Router, *member: Any) -> None:
            if not removed:
                removed.append(0)
                removed.append((await site.delete("/v1/engines/e2")).status)
            await close(self, *member)

        monkeypatch.setattr(Router, "_close_when_idle", beside_another)
        assert (await site.delete("/v1/engines")).status == 204
        assert removed == [0, 204]
        assert (await site.get("/v1/engines")).body == {"engines": []}


async def test_a_password_in_an_engines_address_is_never_shown(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path) as site:
        table = engine_table(engine) | {"url": engine.url.replace("://", "://user:hush-hush@")}
        added = await site.post("/v1/engines", table)
        assert added.status == 201, added.body
        listed = await site.get("/v1/engines", token=TRAINER)
        assert listed.body["engines"][0]["url"] == engine.url
        status = await site.get("/v1/status", token=TRAINER)
        assert "hush" not in f"{added.body}{listed.body}{status.body}"


async def test_all_engines_can_be_cleared(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/engines", engine_table(engine, id="e2"))).status == 201
        assert (await site.delete("/v1/engines")).status == 204
        assert (await site.get("/v1/engines")).body == {"engines": []}


async def test_adding_an_unreachable_engine_is_502(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        answer = await site.post("/v1/engines", {"url": "http://127.0.0.1:1"})
        assert (answer.status, answer.code) == (502, "engine_unavailable")
        assert (await site.get("/v1/engines")).body == {"engines": []}


async def test_an_engine_with_another_tokenizer_is_422_and_never_gets_a_session(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:  # its tokens are bytes, not those of the test tokenizer
        async with open_site(tmp_path) as site:
            answer = await site.post("/v1/engines", engine_table(engine))
            assert (answer.status, answer.code) == (422, "tokenizer_mismatch")
            missing = await site.post("/v1/engines", engine_table(engine, tokenizer="/nowhere"))
            assert (missing.status, missing.code) == (422, "tokenizer_mismatch")
            assert "/nowhere" in missing.body["detail"]
            assert (await site.get("/v1/engines")).body == {"engines": []}
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            status = (await site.get("/v1/status")).body
            assert status["engines"] == []
            assert "disagree" in status["refused_engines"]["e1"]


async def test_an_engine_that_is_down_at_start_is_added_and_comes_up_later(tmp_path: Path) -> None:
    engine = skilled(lambda _: True, port=free_port())
    await engine.start()
    await engine.stop()
    async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
        (entry,) = (await site.get("/v1/engines")).body["engines"]
        assert (entry["state"], entry["info"]) == ("down", None)
        assert entry["last_error"]
        await site.submit("r1")
        async with engine:
            assert (await site.ended("r1"))["outcome"] == "completed"


async def test_only_operators_read_an_engines_reply_to_a_call(tmp_path: Path) -> None:
    """An engine's 400 quotes the request that it refuses: the prompt of some tenant."""
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        engine.fail_next(100, 400)
        await site.submit("r1")
        assert (await site.ended("r1"))["failure"]["code"] == "engine_refused"

        async def errors(token: str | None) -> list[str]:
            bodies = [(await site.get(f"/v1/{name}", token=token)).body for name in ("engines", "status", "overview")]
            return [body["engines"][0]["last_error"] for body in bodies]

        assert await errors(TRAINER) == ["it answered 400 to a call"] * 3
        assert all("a fault of status 400" in error for error in await errors(None))


async def test_a_configured_engine_overrides_a_stored_one(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with open_site(tmp_path) as site:
            await site.post("/v1/engines", engine_table(engine, capacity=7))
        async with open_site(tmp_path, engines=[engine_table(engine, capacity=9)]) as site:
            assert [entry["capacity"] for entry in (await site.get("/v1/engines")).body["engines"]] == [9]


async def test_the_status_describes_the_whole_service(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.submit("r1", "r2")
        status = (await site.get("/v1/status", token=TRAINER)).body
        assert status["version"] == __version__
        assert (status["epoch"], status["is_draining"]) == (1, False)
        assert status["states"]["queued"] == 2
        assert status["pools"]["queue"]["active"] == 2
        local = status["runtimes"]["local"]
        assert (local["is_default"], local["is_isolated"], local["features"]) == (True, False, {"start": "ok"})
        assert (local["breakers"], local["layers"]["kept"], local["layers"]["max_bytes"]) == ([], 0, 20 << 30)
        assert {"shell", "math"} <= set(status["environments"])
        assert "native" in status["agents"]
        assert status["uptime_s"] > 0
    async with open_site(tmp_path) as site:
        status = (await site.get("/v1/status")).body
        assert (status["epoch"], status["recovered"]["queued"]) == (2, 2)


async def test_pools_are_resized_live(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.hold()
        await site.submit("r1")
        pools = (
            await site.call("PATCH", "/v1/pools", json={"init": 3, "run": 4, "eval": 5, "ready": 6, "live": 7})
        ).body
        assert {name: pools[name]["size"] for name in ("init", "run", "eval", "ready", "live")} == {
            "init": 3,
            "run": 4,
            "eval": 5,
            "ready": 6,
            "live": 7,
        }
        assert (await site.ended("r1"))["outcome"] == "completed"


async def test_metrics_are_for_admins_and_readers_of_all_runs(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("r1")
        await site.ended("r1")
        assert (await site.get("/metrics", token=TRAINER)).code == "forbidden"
        answer = await site.get("/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain")
        text = answer.body.decode()
        assert 'rollyard_rollouts_ended_total{blame="",code="",environment="shell",outcome="completed"} 1.0' in text
        assert 'rollyard_http_requests_total{method="POST",route="/v1/rollouts",status="202"} 1.0' in text
        assert 'rollyard_engine_up{engine="e1"} 1.0' in text
        assert 'rollyard_rollouts{state="queued"} 0.0' in text


async def test_an_unresponsive_engine_does_not_delay_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:  # accepts connections and never responds
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        engine = {"id": "hole", "url": url, "tokenizer": str(tokenizer_dir())}
        async with open_site(tmp_path, engines_s=build.ENGINES_S, engines=[engine]) as site:
            assert (await site.get("/readyz")).status == 200
