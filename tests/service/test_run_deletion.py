"""Deleting a run or a group with a long queue: the response is immediate, the deletion continues without the caller."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Run, key_of
from rollyard.core.failure import NotFound, SandboxLost
from rollyard.pipeline.pipeline import Pipeline
from rollyard.service.routes import draws, runs
from rollyard.store import SqliteStore
from rollyard.store.base import Stale
from rollyard.testing.script import Reply
from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, task

pytestmark = pytest.mark.slow

MANY = 3000


async def fill(site: Site, run: str = "long") -> None:
    await site.hold()
    assert (await site.post("/v1/runs", {"id": run})).status == 201
    for first in range(0, MANY, 1000):
        rollouts = [{"id": f"{run}-{n}", "task": task()} for n in range(first, first + 1000)]
        answer = await site.post("/v1/rollouts", {"rollouts": rollouts, "run": run})
        assert answer.status == 202, answer.body


async def wait_deleted(site: Site, run: str = "long") -> None:
    async with asyncio.timeout(90):
        while (await site.get(f"/v1/runs/{run}")).status != 404:
            await asyncio.sleep(0.02)


async def test_a_run_with_a_long_queue_is_deleted_after_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, delete = asyncio.Event(), Pipeline.delete_run

    async def delayed(self: Pipeline, run_id: str) -> None:
        await may_go.wait()
        await delete(self, run_id)

    monkeypatch.setattr(Pipeline, "delete_run", delayed)
    async with open_site(tmp_path) as site:
        await fill(site)
        for _ in range(2):  # a second call has the same response
            answer = await site.delete("/v1/runs/long")
            assert (answer.status, answer.body["state"], answer.body["left"]) == (202, "deleting", MANY)
        assert (await site.get("/v1/runs/long")).body["state"] == "deleting"
        late = await site.post("/v1/rollouts", {"id": "late", "run": "long", "task": task()})
        assert late.status == 404 and "is being deleted" in late.body["detail"]
        again = await site.post("/v1/runs", {"id": "long"})
        assert again.status == 409 and "is being deleted" in again.body["detail"]
        may_go.set()
        await wait_deleted(site)
        assert (await site.get("/v1/status")).body["states"]["queued"] == 0
        assert (await site.post("/v1/runs", {"id": "long"})).status == 201


async def test_a_run_that_its_owner_creates_again_at_once_exists(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        again: list[int] = []

        async def create_again(_: Run) -> None:
            again.append((await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status)

        site.served.app_state.pipeline.on_deleted.append(create_again)
        assert (await site.delete("/v1/runs/name", token=TRAINER)).status in (202, 204)
        async with asyncio.timeout(60):
            while not again or "name" in site.served.app_state.pipeline.cancelling.deleting:
                await asyncio.sleep(0.02)
        assert (await site.get("/v1/runs/name", token=TRAINER)).body["state"] == "active"
        sent = await site.post("/v1/rollouts", {"run": "name", "task": task()}, token=TRAINER)
        assert sent.status == 202


async def test_a_policy_that_only_deleted_runs_named_is_dropped(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        router = site.served.app_state.router
        for name, policy in (("one", "unserved"), ("two", "unserved"), ("three", "default")):
            assert (await site.post("/v1/runs", {"id": name, "policy": policy})).status == 201
            group = {"run": name, "task": task(), "size": 1}
            assert (await site.post("/v1/groups", group)).status == 202
        kept, dropped = router.pool("default"), router.pool("unserved")
        for name in ("one", "three"):
            await site.delete_run(name)
        assert router.pool("unserved") is dropped, "the run two still needs it"
        await site.delete_run("two")
        assert router.pool("unserved") is not dropped and router.pool("default") is kept


async def test_a_deletion_continues_after_a_restart(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        await site.served.app_state.pipeline.cancelling.begin_deletion("long")  # the service is killed here
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("mine")
        assert (await site.ended("mine"))["reward"] == 1.0
        await wait_deleted(site)
        assert (await site.get("/v1/rollouts/long-0")).status == 404


async def test_a_rollout_that_comes_back_during_the_deletion_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, calls = SqliteStore.delete_run, 0

    async def stale_at_first(self: SqliteStore, run_id: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Stale("it was requeued")
        return await delete(self, run_id)

    monkeypatch.setattr(SqliteStore, "delete_run", stale_at_first)
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "long"})).status == 201
        assert (await site.delete("/v1/runs/long")).status == 202
        await wait_deleted(site)


async def test_an_attempt_that_is_lost_during_the_deletion_leaves_nothing_in_the_queue(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60.0)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], max_queued=1) as site,
    ):
        pipeline, key = site.served.app_state.pipeline, key_of("again", "a")
        body = {"id": "a", "run": "again", "task": task()}
        assert (await site.post("/v1/runs", {"id": "again"})).status == 201
        assert (await site.post("/v1/rollouts", body)).status == 202
        async with asyncio.timeout(60):
            while key not in pipeline.live:
                await asyncio.sleep(0.01)
            await pipeline.cancelling.begin_deletion("again")
            pipeline.live[key].stop(SandboxLost("it was killed"))  # it is repeated: it returns to the queue
            while key in pipeline.live:
                await asyncio.sleep(0.01)
        assert len(pipeline.scheduler) == 0
        await pipeline.delete_run("again")
        assert pipeline.room == 1
        assert (await site.post("/v1/runs", {"id": "again"})).status == 201
        assert (await site.post("/v1/rollouts", body)).status == 202
        async with asyncio.timeout(60):
            while key not in pipeline.live:
                await asyncio.sleep(0.01)
        await site.delete_run("again")


async def test_two_deletions_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, delete, deletions = SqliteStore.begin_deletion, Pipeline.delete_run, 0
    both = asyncio.Barrier(2)

    async def together(self: SqliteStore, run_id: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):  # the second call comes this far only if nothing serializes them
                await both.wait()
        await begin(self, run_id)

    async def counted(self: Pipeline, run_id: str) -> None:
        nonlocal deletions
        deletions += 1
        await delete(self, run_id)

    monkeypatch.setattr(SqliteStore, "begin_deletion", together)
    monkeypatch.setattr(Pipeline, "delete_run", counted)
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "twice"})).status == 201
        answers = await asyncio.gather(site.delete("/v1/runs/twice"), site.delete("/v1/runs/twice"))
        assert {answer.status for answer in answers} <= {202, 204}
        await wait_deleted(site, "twice")
    assert deletions == 1


async def test_a_repeated_deletion_does_not_delete_another_tenants_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for other deletions. Meanwhile the first one is done, and another tenant takes the name."""
    begin, may_go = SqliteStore.begin_deletion, {name: asyncio.Event() for name in ("one", "two")}

    async def held(self: SqliteStore, run_id: str) -> None:
        if run_id in may_go:
            await may_go[run_id].wait()
        await begin(self, run_id)

    monkeypatch.setattr(SqliteStore, "begin_deletion", held)
    async with open_site(tmp_path) as site:
        for name in ("one", "two", "shared"):
            assert (await site.post("/v1/runs", {"id": name}, token=TRAINER)).status == 201
        sampler = site.served.app_state.sampler
        calls = [asyncio.create_task(sampler.delete_run(name, 0.05)) for name in ("one", "shared", "two", "shared")]
        may_go["one"].set()
        await wait_deleted(site, "shared")
        assert (await site.post("/v1/runs", {"id": "shared"}, token=OTHER)).status == 201
        may_go["two"].set()
        *_, late = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(late, NotFound)
        assert (await site.get("/v1/runs/shared", token=OTHER)).body["state"] == "active"


async def test_a_draw_of_a_new_run_is_kept_when_an_old_run_of_its_name_is_forgotten(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        app_state = site.served.app_state
        assert (await site.post("/v1/runs", {"id": "name"})).status == 201
        old = app_state.pipeline.run_of("name")
        assert old is not None
        await site.delete_run("name")
        assert (await site.post("/v1/runs", {"id": "name"})).status == 201
        draw = {"id": "d", "run": "name", "source": {"tasks": [task()]}, "group_size": 2}
        assert (await site.post("/v1/draws", draw)).status == 201
        for forget in app_state.pipeline.on_deleted:  # a sweep that deleted the old run has come this far
            await forget(old)
        assert app_state.sampler.loaded(key_of("name", "d")) is not None


async def test_a_deletion_that_fails_is_not_reported_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Pipeline, run_id: str) -> None:
        raise ValueError("it cannot be deleted")

    monkeypatch.setattr(Pipeline, "delete_run", broken)
    monkeypatch.setattr(runs, "DELETE_S", 60.0)
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "long"})).status == 201
        assert (await site.delete("/v1/runs/long")).status == 202
        assert (await site.get("/healthz")).status == 200


async def test_a_small_run_is_deleted_before_the_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DELETE_S", 60.0)
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "small"})).status == 201
        assert (await site.get("/v1/runs/small")).body["state"] == "active"
        assert (await site.delete("/v1/runs/small")).status == 204
        assert (await site.get("/v1/runs/small")).status == 404


async def test_the_rollouts_of_a_cancelled_group_end_in_the_background(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2000})).status == 202
        assert (await site.delete("/v1/groups/g")).body["state"] == "cancelled"
        async with asyncio.timeout(90):
            while (await site.get("/v1/status")).body["states"]["queued"]:
                await asyncio.sleep(0.02)
        assert (await site.get("/v1/rollouts/g-1999")).body["outcome"] == "cancelled"


async def test_a_cancel_in_the_background_that_fails_does_not_end_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: SqliteStore, ids: Any, detail: str) -> Any:
        raise ValueError("a row cannot be read")

    monkeypatch.setattr(SqliteStore, "cancel_many", broken)
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2})).status == 202
        assert (await site.delete("/v1/groups/g")).status == 202
        async with asyncio.timeout(30):
            while "a task of the pipeline failed" not in caplog.text:
                await asyncio.sleep(0.02)
        assert (await site.get("/readyz")).status == 200


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/groups", "/v1/draws", "/v1/sessions?wait_s=0"])
async def test_what_a_call_creates_is_never_stored_in_another_tenants_run_of_that_name(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant deletes its run while a call of its own creates something in it, and another tenant takes the name."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/rollouts": {"rollouts": [{"task": task()}]},
        "/v1/groups": {"task": task(), "size": 1},
        "/v1/draws": {"source": {"tasks": [task()]}},
    }
    async with open_site(tmp_path) as site:
        await site.hold()
        store = site.served.app_state.store
        entered, may_go = asyncio.Event(), asyncio.Event()
        for name in ("submit", "put_groups", "put_draw"):
            monkeypatch.setattr(store, name, _held(getattr(store, name), entered, may_go))
        assert (await site.post("/v1/runs", {"id": "shared"}, token=TRAINER)).status == 201
        body = {**bodies.get(path, {}), "run": "shared"}
        creating = asyncio.create_task(site.post(path, body, token=TRAINER))
        await entered.wait()
        assert (await site.delete("/v1/runs/shared", token=TRAINER)).status in (202, 204)
        taken = await site.post("/v1/runs", {"id": "shared"}, token=OTHER)
        may_go.set()
        answer = await creating
        assert (answer.status, answer.code) == (404, "not_found"), answer.body
        if taken.status != 201:
            await wait_deleted(site, "shared")
            assert (await site.post("/v1/runs", {"id": "shared"}, token=OTHER)).status == 201
        for listing in ("/v1/rollouts", "/v1/groups", "/v1/draws"):
            found = (await site.get(listing, token=OTHER)).body[listing.removeprefix("/v1/")]
            assert found == [], listing


@pytest.mark.parametrize(
    ("path", "body"),
    [("batches", {"want": 1}), ("ack", {"batch": 0}), ("rewind", {"batch": 0, "version": 0})],
)
async def test_a_call_whose_body_comes_late_does_not_change_another_tenants_draw(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant deletes its run while the body of a call for its draw arrives, and another tenant takes both names."""
    entered, may_go = asyncio.Event(), asyncio.Event()
    async with open_site(tmp_path) as site:
        await site.hold()

        async def create(token: str) -> None:
            assert (await site.post("/v1/runs", {"id": "shared"}, token=token)).status == 201
            made = {"id": "d", "run": "shared", "source": {"tasks": [task()]}}
            assert (await site.post("/v1/draws", made, token=token)).status == 201

        await create(TRAINER)
        with monkeypatch.context() as patch:
            patch.setattr(draws, "read_body", _held(draws.read_body, entered, may_go))
            late = asyncio.create_task(site.post(f"/v1/draws/d/{path}?run=shared", body, token=TRAINER))
            await entered.wait()
        await site.delete_run("shared", token=TRAINER)
        await create(OTHER)
        may_go.set()
        answer = await late
        assert (answer.status, answer.code) == (404, "not_found"), answer.body


def _held(write: Any, entered: asyncio.Event, may_go: asyncio.Event) -> Any:
    async def held(*args: Any) -> Any:
        entered.set()
        await may_go.wait()
        return await write(*args)

    return held
