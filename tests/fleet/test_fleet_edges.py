"""Edge cases of a head: numbers of any size, a recreated run, an agent that is not installed any more."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollyard.core import Rollout
from rollyard.store import SqliteStore
from rollyard.testing.script import Reply
from tests.fleet.fleet_site import loop_node, open_head
from tests.service.site import OTHER, TRAINER, engine_table, finish, scripted, task


async def test_a_recreated_run_uses_its_new_settings(tmp_path: Path) -> None:
    async with (
        scripted(finish()) as old,
        scripted(finish()) as new,
        open_head(
            tmp_path, engines=[engine_table(old, id="old", policy="p1"), engine_table(new, id="new", policy="p2")]
        ) as site,
        loop_node(site, tmp_path, "n1"),
    ):
        for policy, rollout_id, engine in (("p1", "r1", "old"), ("p2", "r2", "new")):
            assert (await site.post("/v1/runs", {"id": "again", "policy": policy})).status == 201
            body = {"id": rollout_id, "run": "again", "task": task()}
            assert (await site.post("/v1/rollouts", body)).status == 202
            assert (await site.ended(rollout_id))["summary"]["engine"] == engine
            await site.delete_run("again")


async def test_a_queued_rollout_whose_agent_is_gone_fails_alone(tmp_path: Path) -> None:
    async with scripted(Reply(finish())) as engine, open_head(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("r1", "r2")
        resources = site.served.app_state.resources
        get_agent = resources.agents.get

        def lost(name: str) -> object:
            if asyncio.current_task() is not None and name == "native" and not has_failed.is_set():
                has_failed.set()
                raise RuntimeError("its plugin was uninstalled")
            return get_agent(name)

        has_failed = asyncio.Event()
        resources.agents.get = lost  # type: ignore[method-assign,assignment]
        async with loop_node(site, tmp_path, "n1"):
            for one in ("r1", "r2"):
                assert (await site.ended(one))["state"] == "ended"
        assert has_failed.is_set() and (await site.get("/healthz")).status == 200


async def test_sessions_that_wait_take_no_seat_from_another_owners_rollouts(tmp_path: Path) -> None:
    async with (
        scripted(finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine, capacity=1, admission="fixed")]) as site,
        loop_node(site, tmp_path, "n1"),
    ):
        await site.submit("first")
        assert (await site.ended("first"))["summary"]["node"] == "n1", "the node reaches the engine"
        opened = await site.post("/v1/sessions?wait_s=40", {"id": "s0"}, token=TRAINER)
        assert opened.body["is_open"], opened.body
        for number in range(1, 4):
            assert (await site.post("/v1/sessions?wait_s=0", {"id": f"s{number}"}, token=TRAINER)).status == 201
        run = {"id": "other"}
        assert (await site.post("/v1/runs", run, token=OTHER)).status == 201
        body = {"run": "other", "id": "r1", "task": task()}
        assert (await site.post("/v1/rollouts", body, token=OTHER)).status == 202
        assert (await site.post("/v1/sessions/s0/reward", {"reward": 1.0}, token=TRAINER)).status in (200, 202)
        assert (await site.ended("r1"))["outcome"] == "completed"
        for number in range(1, 4):
            await site.delete(f"/v1/sessions/s{number}", token=TRAINER)
            await site.ended(f"s{number}")


async def test_sessions_run_at_the_head_with_or_without_nodes_and_within_its_slots(tmp_path: Path) -> None:
    async with (
        scripted("one") as engine,
        open_head(tmp_path, engines=[engine_table(engine)], init_slots=2, run_slots=2, ready_slots=0) as site,
    ):
        opened = await asyncio.gather(
            *(site.post("/v1/sessions?wait_s=1", {"id": f"s{number}"}) for number in range(6))
        )
        assert [answer.status for answer in opened] == [201] * 6, [answer.body for answer in opened]
        async with asyncio.timeout(90):
            while not (status := (await site.get("/v1/status")).body)["states"]["run"]:
                await asyncio.sleep(0.02)
        assert status["states"]["run"] <= 2 and status["states"]["queued"] >= 1, status["states"]
        await site.submit("r1")
        async with loop_node(site, tmp_path, "n1"):
            assert (await site.ended("r1"))["summary"]["node"] == "n1"
        for number in range(6):
            await site.delete(f"/v1/sessions/s{number}")
        async with asyncio.timeout(90):
            while (await site.get("/v1/status")).body["states"]["ended"] < 7:
                await asyncio.sleep(0.05)


async def test_a_rollout_that_cannot_be_leased_fails_and_the_others_are_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_many = SqliteStore.get_many

    async def broken(self: SqliteStore, ids: Sequence[str]) -> Sequence[Rollout]:
        if "bad" in ids:
            raise ValueError("its row cannot be decoded")
        return await get_many(self, ids)

    monkeypatch.setattr(SqliteStore, "get_many", broken)
    async with (
        scripted(finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=60) as site,
    ):
        await site.submit("good-1", "bad", "good-2", "good-3")
        async with loop_node(site, tmp_path, "n1"):
            bad = await site.ended("bad")
            assert (bad["failure"]["code"], bad["reward"]) == ("internal_error", None)
            for number in (1, 2, 3):
                record = await site.ended(f"good-{number}")
                assert (record["reward"], record["attempt"]) == (1.0, 1)


async def test_a_node_deletes_the_artifacts_of_its_earlier_process(tmp_path: Path) -> None:
    leftover = tmp_path / "n1" / "artifacts" / "ab" / "abcd" / "1" / "file"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"of a rollout that the head has given to another node")
    async with open_head(tmp_path) as site, loop_node(site, tmp_path, "n1"):
        assert not leftover.exists()
