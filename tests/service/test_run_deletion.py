"""Deleting a run or a group with a long queue: the response is immediate, the deletion continues without the caller."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.catalog import Catalog
from rollyard.pipeline import pipeline as pipeline_module
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.event_log import EventLog
from rollyard.pipeline.pipeline import Pipeline
from rollyard.sampling.groups import Groups
from rollyard.sampling.notifier import Notifier
from rollyard.sampling.open_group import OpenGroup
from rollyard.service.routes import runs
from rollyard.store import SqliteStore
from rollyard.store.base import Stale
from tests.service.site import OTHER, TRAINER, Site, engine_table, open_site, scripted, task

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


async def test_a_new_run_has_no_figures_of_another_tenants_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "_check_some", _nothing)  # the rows stay in the catalog's file
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        body = {"id": "a", "run": "name", "task": task("xylophone")}
        assert (await site.post("/v1/rollouts", body, token=TRAINER)).status == 202
        await site.ended("a")
        async with asyncio.timeout(60):
            while (await site.get("/v1/results")).body["behind"]:
                await asyncio.sleep(0.02)
        series = "/v1/runs/name/series"
        assert (await site.get(series, token=TRAINER)).body["totals"]["count"] == 1
        await site.delete_run("name", TRAINER)
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        found = (await site.get(series, token=OTHER)).body
        assert (found["totals"]["count"], found["environments"], found["x"]) == (0, [], [])
        page = (await site.get("/v1/results?run=name&search=xylophone", token=OTHER)).body
        assert (page["rows"], page["total"]) == ([], 0)


async def test_artifacts_of_an_id_that_is_used_again_during_a_sweep_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "LEAVINGS", 1)
    delete, deleted = ArtifactFolder.delete, list[str]()
    async with open_site(tmp_path) as site:

        async def submit() -> None:
            assert (await site.post("/v1/runs", {"id": "name"})).status == 201
            rollouts = [{"id": name, "task": task()} for name in ("a", "b")]
            assert (await site.post("/v1/rollouts", {"run": "name", "rollouts": rollouts})).status == 202

        async def delete_late(self: ArtifactFolder, rollout_id: str) -> None:
            if not deleted:
                await submit()
            deleted.append(rollout_id)
            await delete(self, rollout_id)

        await site.hold()
        await submit()
        await site.delete_run("name")
        monkeypatch.setattr(ArtifactFolder, "delete", delete_late)
        await site.served.app_state.pipeline.sweep()
    assert deleted == ["name~a"]


async def test_a_new_run_has_no_figures_of_another_tenants_swept_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "_check_some", _nothing)  # the rows stay in the catalog's file
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)], retain_s=0.001) as site:
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        body = {"id": "a", "run": "name", "task": task()}
        assert (await site.post("/v1/rollouts", body, token=TRAINER)).status == 202
        await site.ended("a")
        async with asyncio.timeout(60):
            while (await site.get("/v1/results")).body["behind"]:
                await asyncio.sleep(0.02)
            while (await site.get("/v1/runs/name")).status != 404:
                await site.served.app_state.pipeline.sweep()
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        found = (await site.get("/v1/runs/name/series", token=OTHER)).body
        assert (found["totals"]["count"], found["environments"]) == (0, [])


async def _nothing(_: Catalog) -> None: ...


async def test_the_events_of_a_deleted_run_are_not_those_of_a_later_run_of_that_name(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        event_log = site.served.app_state.pipeline.event_log
        start = event_log.last_id
        for token in (TRAINER, OTHER):
            assert (await site.post("/v1/runs", {"id": "name"}, token=token)).status == 201
            body = {"id": "theirs" if token == TRAINER else "mine", "run": "name", "task": task()}
            assert (await site.post("/v1/rollouts", body, token=token)).status == 202
            if token == TRAINER:
                await site.delete_run("name", TRAINER)
        assert (await first_event(site, f"/v1/events?after={start}", OTHER))["rollout"] == "mine"


async def test_a_group_of_a_deleted_run_is_not_written_into_a_later_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look, look = asyncio.Event(), Groups._look  # pyright: ignore[reportPrivateUsage]

    async def late(self: Groups, opened: OpenGroup) -> None:
        await may_look.wait()
        await look(self, opened)

    monkeypatch.setattr(Groups, "_look", late)
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        group = {"id": "g", "run": "name", "task": task(), "size": 2}
        assert (await site.post("/v1/groups", group, token=TRAINER)).status == 202
        await site.delete_run("name", TRAINER)
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        may_look.set()
        assert (await site.post("/v1/groups", {**group, "size": 1}, token=OTHER)).status == 202
        assert (await site.delete("/v1/rollouts/g-0?run=name", token=OTHER)).status == 202
        ended = (await site.get("/v1/groups/g?run=name&wait_s=60", token=OTHER)).body  # groups still end
        assert (ended["state"], ended["size"], len(ended["members"])) == ("failed", 1, 1)


async def test_a_call_that_waits_gets_nothing_of_a_later_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[str] = []
    events, following = EventLog.events, Notifier.next

    def reported_events(self: EventLog, after: str | None = None) -> Any:
        waiting.append("events")
        return events(self, after)

    def reported_next(self: Notifier) -> Any:
        waiting.append("group")
        return following(self)

    monkeypatch.setattr(EventLog, "events", reported_events)
    monkeypatch.setattr(Notifier, "next", reported_next)
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        group = {"id": "g", "run": "name", "task": task(), "size": 1}
        assert (await site.post("/v1/groups", group, token=TRAINER)).status == 202
        listing = "/v1/rollouts?run=name&state=ended&group=x&wait_s=60"
        calls = [
            asyncio.create_task(site.get(path, token=TRAINER)) for path in (listing, "/v1/groups/g?run=name&wait_s=60")
        ]
        async with asyncio.timeout(60):
            while {*waiting} != {"events", "group"}:
                await asyncio.sleep(0.02)
        await site.delete_run("name", TRAINER)
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        assert (await site.post("/v1/groups", group, token=OTHER)).status == 202
        body = {"id": "x-0", "group": "x", "run": "name", "task": task()}
        assert (await site.post("/v1/rollouts", body, token=OTHER)).status == 202
        for name in ("x-0", "g-0"):
            assert (await site.delete(f"/v1/rollouts/{name}?run=name", token=OTHER)).status == 202
        assert [answer.status for answer in await asyncio.gather(*calls)] == [404, 404]


async def test_a_late_score_is_not_appended_to_a_rollout_of_a_later_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_scored, may_end, evaluate = asyncio.Event(), asyncio.Event(), StageRunner.evaluate

    async def late(self: StageRunner, *values: Any, **options: Any) -> Any:
        score = await evaluate(self, *values, **options)
        is_scored.set()
        await may_end.wait()
        return score

    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:

        async def end(token: str) -> None:
            assert (await site.post("/v1/runs", {"id": "name"}, token=token)).status == 201
            body = {"id": "a", "run": "name", "task": task()}
            assert (await site.post("/v1/rollouts", body, token=token)).status == 202
            await site.ended("a")

        await end(TRAINER)
        with monkeypatch.context() as patched:
            patched.setattr(StageRunner, "evaluate", late)
            rescoring = asyncio.create_task(site.post("/v1/rollouts/a/rescore?run=name", token=TRAINER))
            await asyncio.wait_for(is_scored.wait(), 60)
        await site.delete_run("name", TRAINER)
        await end(OTHER)
        may_end.set()
        assert (await rescoring).status == 404
        assert (await site.get("/v1/rollouts/a?run=name", token=OTHER)).body["scores"] == []


async def first_event(site: Site, path: str, token: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with site.http.get(site.url + path, headers=headers) as reply:
        async for line in reply.content:
            if line.startswith(b"data:"):
                return json.loads(line.removeprefix(b"data:"))
    raise AssertionError("the stream has ended")


async def test_a_run_that_its_owner_creates_again_at_once_exists(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        again: list[int] = []

        async def create_again(_: str) -> None:
            again.append((await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status)

        site.served.app_state.pipeline.on_deleted.append(create_again)
        assert (await site.delete("/v1/runs/name", token=TRAINER)).status in (202, 204)
        async with asyncio.timeout(60):
            while not again or "name" in site.served.app_state.pipeline.cancelling.deleting:
                await asyncio.sleep(0.02)
        assert (await site.get("/v1/runs/name", token=TRAINER)).body["state"] == "active"
        sent = await site.post("/v1/rollouts", {"run": "name", "task": task()}, token=TRAINER)
        assert sent.status == 202


async def test_a_cancel_in_a_deleted_run_does_not_end_a_rollout_of_a_later_run_of_that_name(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        early = await site.delete("/v1/rollouts/a?run=name", token=TRAINER)
        assert (early.status, early.body["state"]) == (202, "cancelled_before_submit")
        await site.delete_run("name", TRAINER)
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        sent = await site.post("/v1/rollouts", {"id": "a", "run": "name", "task": task()}, token=OTHER)
        assert sent.body["rollouts"][0]["state"] == "queued"


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
