"""A head that leases and nodes that run: over real HTTP, with real processes in the rollouts and a scripted engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollyard.testing.script import Reply
from tests.fleet.fleet_site import loop_node, node_token, nodes_of, open_head, until
from tests.service.site import TRAINER, Site, engine_table, finish, scripted, shell, task

pytestmark = pytest.mark.slow


async def all_ended(site: Site, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(90):
        while True:
            page = (await site.get("/v1/rollouts?state=ended&limit=1000")).body["rollouts"]
            if len(page) >= count:
                return page
            await asyncio.sleep(0.05)


async def test_nodes_run_leased_rollouts_and_the_head_has_all_results(tmp_path: Path) -> None:
    async with scripted(shell("echo hello > out.txt"), finish()) as engine:
        async with (
            open_head(tmp_path, engines=[engine_table(engine)]) as site,
            loop_node(site, tmp_path, "n1"),
            loop_node(site, tmp_path, "n2"),
        ):
            ids = [f"r{number}" for number in range(16)]
            body = task()
            body["data"]["checks"] = ["grep -q hello out.txt"]
            answer = await site.post("/v1/rollouts", {"rollouts": [{"id": one, "task": body} for one in ids]})
            assert answer.status == 202, answer.body
            records = await all_ended(site, 16)
            assert {record["id"] for record in records} == set(ids)
            assert {record["reward"] for record in records} == {1.0}
            assert {record["summary"]["node"] for record in records} == {"n1", "n2"}, "both had work"
            assert all(record["attempt"] == 1 for record in records)
            (trace,) = (await site.get("/v1/rollouts/r3/traces")).body["traces"]
            assert sum(trace["mask"]) == records[0]["summary"]["sampled_tokens"] and any(trace["logprobs"])
            nodes = await nodes_of(site)
            assert sum(node["ended"] for node in nodes.values()) == 16
            refused = await site.call("PATCH", "/v1/pools", json={"run": 9})
            assert refused.code == "invalid_request" and "belong to its nodes" in refused.body["detail"]
            assert {node["live"] for node in nodes.values()} == {0}
            again = await site.post("/v1/rollouts/r3/rescore")
            assert again.status == 200 and again.body["scores"][-1]["reward"] == 1.0, again.body
            (attempt,) = (await site.get("/v1/rollouts/r3/timeline")).body["attempts"]
            kinds = [part["kind"] for part in attempt["parts"]]
            assert kinds.count("model") == 2 and kinds.count("tool") == 2 and {"run", "eval"} <= {*kinds}, kinds
            info = (await site.get("/v1/rollouts/r3?include=trajectory")).body["trajectory"]["info"]
            (check,) = info["evidence"]
            assert (check["name"], check["passed"], len(info["calls"])) == ("check_0", True, 4)
            archive = await site.get("/v1/rollouts/r3/artifacts/workspace")
            assert archive.status == 200 and b"hello" in archive.body
        await engine.idle()


async def test_a_cancel_reaches_leased_rollouts(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=60.0)) as engine:
        async with (
            open_head(tmp_path, engines=[engine_table(engine)]) as site,
            loop_node(site, tmp_path, "n1", init_slots=1, run_slots=1, ready_slots=0),
        ):
            await site.submit("r1", "r2", "r3")
            async with asyncio.timeout(90):
                while (await site.get("/v1/rollouts/r1")).body["state"] != "run":
                    await asyncio.sleep(0.02)
            running = (await site.get("/v1/rollouts/r1/timeline")).body
            parts = [part["kind"] for part in running["attempts"][0]["parts"] if part["end_s"] is None]
            assert (running["state"], parts[:1]) == ("run", ["run"])  # the model's call may have started
            for one in ("r1", "r2", "r3"):
                assert (await site.delete(f"/v1/rollouts/{one}")).status in (200, 202)
            for one in ("r1", "r2", "r3"):
                record = await site.ended(one)
                assert record["outcome"] == "cancelled", record
            async with asyncio.timeout(90):
                while (await nodes_of(site))["n1"]["live"]:
                    await asyncio.sleep(0.02)
        await engine.idle()


async def test_a_lost_nodes_rollouts_run_elsewhere_and_the_node_is_refused_when_it_returns(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=4.0)) as engine:
        async with (
            open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=5) as site,
            loop_node(site, tmp_path, "n1") as first,
        ):
            await site.submit("r1")
            async with asyncio.timeout(90):
                while (await site.get("/v1/rollouts/r1")).body["state"] != "run":
                    await asyncio.sleep(0.02)
            first.is_cut = True
            await until(site)
            async with loop_node(site, tmp_path, "n2"):
                first.is_cut = False
                record = await site.ended("r1")
                assert record["attempt"] == 2 and record["summary"]["node"] == "n2", record
                assert [lost["code"] for lost in record["lost"]] == ["node_lost"]
                await until(site, "n1", "n2")
                async with asyncio.timeout(90):
                    while sum(node["live"] for node in (await nodes_of(site)).values()):
                        await asyncio.sleep(0.02)
                assert (await nodes_of(site))["n1"]["ended"] == 0
        await engine.idle()


async def test_nodes_outlive_their_head_and_hand_over_to_the_next(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=5.0)) as engine:
        table = engine_table(engine)
        async with open_head(tmp_path, engines=[table], node_lease_s=20) as site:
            starting = loop_node(site, tmp_path, "n1")
            node = await starting.__aenter__()
            try:
                await site.submit("r1", "r2", "r3")
                async with asyncio.timeout(90):
                    while (await site.get("/v1/status")).body["states"]["run"] < 3:
                        await asyncio.sleep(0.02)
            except BaseException:
                await starting.__aexit__(None, None, None)
                raise
        try:
            await engine.idle()  # its rollouts have ended meanwhile, and it holds the results
            async with open_head(tmp_path, engines=[table], node_lease_s=20) as site:
                node.goes_to(site)
                for one in ("r1", "r2", "r3"):
                    record = await site.ended(one)
                    assert record["attempt"] == 1 and record["lost"] == [], record
                    assert record["summary"]["node"] == "n1" and record["reward"] == 1.0
                node.stop.set()
        finally:
            await starting.__aexit__(None, None, None)


async def test_rollouts_that_no_node_claims_after_a_restart_run_again(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=30.0), finish()) as engine:
        table = engine_table(engine)
        async with open_head(tmp_path, engines=[table]) as site:
            starting = loop_node(site, tmp_path, "n1")
            node = await starting.__aenter__()
            await site.submit("r1")
            async with asyncio.timeout(90):
                while (await site.get("/v1/rollouts/r1")).body["state"] != "run":
                    await asyncio.sleep(0.02)
            node.is_cut = True
        try:
            async with (
                scripted(finish()) as other,
                open_head(tmp_path, engines=[engine_table(other)]) as site,
                loop_node(site, tmp_path, "n2"),
            ):
                record = await site.ended("r1")
                assert record["attempt"] == 2 and record["lost"][0]["code"] == "node_lost", record
                assert record["summary"]["node"] == "n2"
                node.goes_to(site)
                node.is_cut = False
                await until(site, "n1", "n2")
                node.stop.set()
                await until(site, "n2")
        finally:
            await starting.__aexit__(None, None, None)


async def test_a_node_without_a_head_ends_what_it_has_after_a_bound(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=600.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=0.6, node_hold_s=1.5) as site,
        loop_node(site, tmp_path, "n1") as node,
    ):
        await site.submit("r1")
        async with asyncio.timeout(90):
            await engine.busy()
        node.is_cut = True
        async with asyncio.timeout(90):
            await engine.idle()
        await site.delete("/v1/rollouts/r1")


async def test_a_drained_node_gives_back_what_has_not_started_and_takes_nothing(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=1.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)]) as site,
        loop_node(site, tmp_path, "n1", init_slots=1, run_slots=1, ready_slots=1) as node,
    ):
        await site.submit("r1", "r2", "r3")
        async with asyncio.timeout(90):
            while (await nodes_of(site))["n1"]["live"] < 2:
                await asyncio.sleep(0.02)
        assert (await site.post("/v1/nodes/n1/drain", token=TRAINER)).status == 403
        assert (await site.post("/v1/nodes/n9/drain")).status == 404
        assert (await site.post("/v1/nodes/n1/drain")).body["state"] in ("draining", "drained")
        async with asyncio.timeout(90):
            while (drained := (await nodes_of(site))["n1"])["live"]:
                await asyncio.sleep(0.02)
        assert drained["state"] == "drained" and drained["wants"] == 0
        states = (await site.get("/v1/status")).body["states"]
        assert states["queued"] >= 1 and states["queued"] + states["ended"] == 3
        assert (await site.post("/v1/nodes/n1/resume")).status == 200
        records = await all_ended(site, 3)
        assert {record["reward"] for record in records} == {1.0}
        assert {lost["code"] for record in records for lost in record["lost"]} <= {"drained"}
        assert node.name in {record["summary"]["node"] for record in records}


async def test_a_leaving_node_gives_back_its_rollouts_at_once(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=1.0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=60) as site,
    ):
        async with loop_node(site, tmp_path, "n1", init_slots=1, run_slots=1, ready_slots=1):
            await site.submit("r1", "r2", "r3")
            async with asyncio.timeout(90):
                while (await nodes_of(site))["n1"]["live"] < 2:
                    await asyncio.sleep(0.02)
        await until(site)
        async with loop_node(site, tmp_path, "n2"):
            records = await all_ended(site, 3)
            assert {record["reward"] for record in records} == {1.0}


async def test_a_nodes_token_gives_access_to_the_fleet_routes_only(tmp_path: Path) -> None:
    async with open_head(tmp_path, max_body_bytes=1024) as site:
        token = node_token(site)
        assert (await site.get("/v1/fleet/settings", token=token)).status == 200
        for path in ("/v1/rollouts", "/v1/status", "/v1/nodes", "/v1/engines"):
            assert (await site.get(path, token=token)).code == "forbidden", path
        assert (await site.get("/v1/fleet/settings", token=TRAINER)).code == "forbidden"
        assert (await site.call("POST", "/v1/fleet/join", data=b"nonsense")).code == "invalid_request"
        large = b"\xc1" * 2000
        assert (await site.call("POST", "/v1/fleet/report", data=large)).code == "invalid_request", "no 413 for nodes"
        assert (await site.call("POST", "/v1/rollouts", data=large)).status == 413
        assert (await site.call("POST", "/v1/fleet/poll", data=b"\x80")).code == "invalid_request"


async def test_a_service_without_a_fleet_reports_that_it_has_none(tmp_path: Path) -> None:
    from tests.service.site import open_site

    async with open_site(tmp_path) as site:
        for path in ("/v1/nodes", "/v1/fleet/settings"):
            answer = await site.get(path)
            assert answer.code == "not_found" and "--fleet" in answer.body["detail"]
        assert (await site.get("/v1/status")).body["nodes"] == []
