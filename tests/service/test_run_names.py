"""The name of a deleted run is free for another tenant, who finds and gets nothing of the earlier run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.catalog import Catalog
from rollyard.catalog.readers import Readers
from rollyard.pipeline import pipeline as pipeline_module
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.event_log import EventLog
from rollyard.sampling.groups import Groups
from rollyard.sampling.notifier import Notifier
from rollyard.sampling.open_group import OpenGroup
from tests.service.site import OTHER, TRAINER, Site, engine_table, open_site, scripted, task

pytestmark = pytest.mark.slow


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


async def test_queries_that_waited_for_the_catalog_return_nothing_of_a_later_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go, waiting, run_query = asyncio.Event(), list[str](), Readers.run

    async def late(self: Readers, query: Any, *, caller: str = "") -> Any:
        waiting.append(caller)
        await may_go.wait()
        return await run_query(self, query, caller=caller)

    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
        monkeypatch.setattr(Readers, "run", late)
        paths = ("/v1/runs/name/series", "/v1/results?run=name", "/v1/results")
        calls = [asyncio.create_task(site.get(path, token=TRAINER)) for path in paths]
        async with asyncio.timeout(60):
            while len(waiting) < len(paths):
                await asyncio.sleep(0.02)
        await site.delete_run("name", TRAINER)
        assert (await site.post("/v1/runs", {"id": "name"}, token=OTHER)).status == 201
        body = {"id": "a", "run": "name", "task": task()}
        assert (await site.post("/v1/rollouts", body, token=OTHER)).status == 202
        await site.ended("a")
        async with asyncio.timeout(60):
            while await site.served.app_state.catalog.behind():
                await asyncio.sleep(0.02)
        may_go.set()
        series, of_run, every = await asyncio.gather(*calls)
        assert (series.status, of_run.status, every.body["rows"]) == (404, 404, [])
        assert len((await site.get("/v1/results", token=OTHER)).body["rows"]) == 1


async def test_of_two_tokens_that_create_a_run_at_once_one_has_it(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        answers = await asyncio.gather(
            *(site.post("/v1/runs", {"id": "name"}, token=token) for token in (TRAINER, OTHER))
        )
        assert sorted(answer.status for answer in answers) == [201, 403]


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


async def hold_group(site: Site, size: int) -> dict[str, Any]:
    """Submits a group `g` of the run `name`, none of whose rollouts starts. Returns its body."""
    await site.hold()
    assert (await site.post("/v1/runs", {"id": "name"}, token=TRAINER)).status == 201
    group = {"id": "g", "run": "name", "task": task(), "size": size}
    assert (await site.post("/v1/groups", group, token=TRAINER)).status == 202
    return group


async def test_a_group_of_a_deleted_run_is_not_written_into_a_later_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_look, look = asyncio.Event(), Groups._apply_ends  # pyright: ignore[reportPrivateUsage]

    async def late(self: Groups, opened: OpenGroup) -> None:
        await may_look.wait()
        await look(self, opened)

    monkeypatch.setattr(Groups, "_apply_ends", late)
    async with open_site(tmp_path) as site:
        group = await hold_group(site, 2)
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

    def reported_events(*arguments: Any) -> Any:
        waiting.append("events")
        return events(*arguments)

    def reported_next(*arguments: Any) -> Any:
        waiting.append("group")
        return following(*arguments)

    monkeypatch.setattr(EventLog, "events", reported_events)
    monkeypatch.setattr(Notifier, "next", reported_next)
    async with open_site(tmp_path) as site:
        group = await hold_group(site, 1)
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


async def test_a_call_that_waits_for_a_group_ends_with_the_deletion_of_its_run(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await hold_group(site, 1)
        waiting = asyncio.create_task(site.get("/v1/groups/g?run=name&wait_s=300", token=TRAINER))
        notifier = site.served.app_state.sampler.groups.notifier
        async with asyncio.timeout(60):
            while not notifier._next:  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(0.02)
            await site.delete_run("name", TRAINER)
            assert (await waiting).status == 404


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
