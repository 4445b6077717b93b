"""/v1/draws with interference, failures and idle time: no reward is invented, and no draw hangs."""

import asyncio
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import DrawConfig, Run
from rollyard.core.draw import SourceKind, SourceSpec
from rollyard.core.failure import NotFound
from rollyard.sampling.filters import FilterInput
from rollyard.store.base import eval_items
from tests.service.site import Site, engine_table, open_site, scripted, task
from tests.service.skill import skilled
from tests.service.test_draws import closed, draw, mixed, site_with, take, tasks

pytestmark = pytest.mark.slow


def first_is_slow(rollout_id: str) -> float:
    return 30.0 if rollout_id == "d.0.0.0-0" else 0.0


async def ended(site: Site, draw_id: str = "d") -> dict[str, Any]:
    async with asyncio.timeout(90):
        while True:
            body = (await site.get(f"/v1/draws/{draw_id}")).body
            if body["state"] == "ended":
                return body
            await asyncio.sleep(0.05)


def watched() -> list[str]:
    """Names of draws that have a task in this service."""
    return [name for one in asyncio.all_tasks() if (name := one.get_name()).startswith("draw ")]


def broken(judged: FilterInput) -> bool:
    raise ValueError(f"no {judged.rewards}")


def install(monkeypatch: Any, *names: str) -> None:
    entry_points = [EntryPoint(name, f"{__name__}:{name}", "rollyard.filters") for name in names]
    monkeypatch.setattr("rollyard.sampling.filters.plugins", lambda group: entry_points)


async def test_a_clients_rollout_with_a_members_group_and_index_is_not_the_member(tmp_path: Path) -> None:
    async with skilled(lambda _: True, first_is_slow) as engine, site_with(tmp_path, engine) as site:
        await site.post("/v1/runs", {"id": "mine"})
        await draw(site, 1, run="mine", keep="all", epochs=1, shuffle=False)
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        assert (await site.ended("d.0.0.0-1"))["reward"] == 1
        stranger = {"run": "mine", "id": "x-0", "group": "d.0.0.0", "index": 0, "task": task("fake")}
        assert (await site.post("/v1/rollouts", stranger)).status == 202
        await site.ended("x-0")
        assert (await site.get("/v1/draws/d/batches/1?wait_s=0.5")).body["state"] == "open"
        group = (await site.get("/v1/groups/d.0.0.0")).body
        assert [one["rollout"] for one in group["members"]] == ["d.0.0.0-0", "d.0.0.0-1"]
        assert "number 0" in group["task"]["data"]["instruction"]


async def test_a_clients_group_with_the_id_of_a_draws_group_is_never_used_for_it(tmp_path: Path) -> None:
    async with (
        skilled(mixed, lambda rollout: 30.0 * rollout.endswith("-1")) as engine,
        site_with(tmp_path, engine) as site,
    ):
        client_group = {"id": "d.0.0.0", "task": task("another task"), "size": 2}
        assert (await site.post("/v1/groups", client_group)).status == 202
        await site.ended("d.0.0.0-0")
        await draw(site, 1, epochs=1, shuffle=False, keep="all")
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        body = await ended(site)
        assert body["reason"] == "internal_error" and "d.0.0.0" in body["detail"]
        assert (await closed(site, 1))["delivered"] == 0
        group = (await site.get("/v1/groups/d.0.0.0")).body
        assert (group["state"], group["draw"]) == ("open", None), "the client's group is not changed"
        assert group["members"][1]["state"] != "ended"


async def test_a_filter_that_raises_ends_the_draw_and_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, "broken")
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 4, keep={"filter": "broken"})
        runner = await site.served.app_state.sampler.runner("d")
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        batch = await closed(site, 1)
        assert (batch["reason"], batch["is_last"]) == ("internal_error", True)
        assert "'broken'" in (await ended(site))["detail"]
        assert not runner.draw_state.in_flight


async def test_a_filter_that_raises_during_a_request_ends_the_draw_too(tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, "broken")
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True}, keep={"filter": "broken"})
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        runner = await site.served.app_state.sampler.runner("d")
        monkeypatch.setattr(runner, "wake", lambda: None)  # only requests advance it
        await site.post("/v1/draws/d/tasks", {"tasks": tasks(1)})
        await site.ended("d.0.0.0-0")
        await site.ended("d.0.0.0-1")
        pushed = await site.post("/v1/draws/d/tasks", {"tasks": tasks(1)})
        assert pushed.status < 500, pushed.body
        assert (await ended(site))["reason"] == "internal_error"
        assert (await closed(site, 1))["is_last"]


async def test_a_draw_without_its_filter_ends_at_restart_and_can_still_be_read(
    tmp_path: Path, monkeypatch: Any
) -> None:
    install(monkeypatch, "broken")
    async with skilled(mixed, lambda _: 30.0) as engine:
        async with site_with(tmp_path, engine, drain_s=0) as site:
            await draw(site, 4, keep={"filter": "broken"})
            await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        install(monkeypatch)
        async with site_with(tmp_path, engine) as site:
            body = (await site.get("/v1/draws/d")).body
            assert (body["state"], body["reason"]) == ("ended", "unusable") and "broken" in body["detail"]
            assert body["figures"]["open"] == body["figures"]["complete"] == 0
            batch = (await site.get("/v1/draws/d/batches/1")).body
            assert (batch["state"], batch["reason"], batch["is_last"]) == ("closed", "unusable", True)
            assert [one["id"] for one in (await site.get("/v1/draws")).body["draws"]] == ["d"]
            assert (await site.get("/v1/draws/d/groups")).body["groups"] == []
            refused = await site.post("/v1/draws/d/rewind", {"batch": 0, "version": 0})
            assert refused.status == 422 and "no filter" in refused.body["detail"]
        async with site_with(tmp_path, engine) as site:
            [listed] = (await site.get("/v1/draws")).body["draws"]
            assert (listed["state"], listed["figures"]["open"], listed["figures"]["keep_rate"]) == ("ended", 0, None)
            assert site.served.app_state.sampler.loaded("d") is None, "listing loads no draw that has ended"


async def test_a_budget_of_seconds_ends_an_idle_draw(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True}, budget={"seconds": 1})
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        async with asyncio.timeout(90):
            batch = await closed(site, 1)
        assert (batch["reason"], batch["is_last"]) == ("budget", True)


async def test_a_draw_cannot_be_rewound_to_an_open_batch(tmp_path: Path) -> None:
    def slow(rollout_id: str) -> float:
        return 30.0 * (int(rollout_id.split(".")[2]) > 2)

    async with skilled(mixed, slow) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 6, shuffle=False)
        await take(site, 2, 1)
        await site.post("/v1/draws/d/batches", {"want": 3, "number": 2})
        refused = await site.post("/v1/draws/d/rewind", {"batch": 2, "version": 0})
        assert refused.status == 422 and "the last closed batch is 1" in refused.body["detail"], refused.body
        assert (await site.post("/v1/draws/d/rewind", {"batch": 1, "version": 0})).body["batch"] == 1


async def test_tasks_of_a_refused_source_are_not_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    good, bad = folder / "good.jsonl", folder / "bad.jsonl"
    good.write_text("".join(json.dumps(one) + "\n" for one in tasks(600)))
    bad.write_text(good.read_text() + '{"environment": "none"}\n')
    async with skilled(mixed) as engine, site_with(tmp_path, engine, task_folders=[str(folder)]) as site:
        refused = await site.post("/v1/draws", {"id": "d", "source": {"file": str(bad)}})
        assert refused.status == 422 and "bad.jsonl:601" in refused.body["detail"]
        assert await site.served.app_state.store.count_items("d") == 0
        refused = await site.post("/v1/evals", {"id": "e", "source": {"file": str(bad)}})
        assert refused.status == 422 and "bad.jsonl:601" in refused.body["detail"]
        assert await site.served.app_state.store.count_items(eval_items("e~e")) == 0
        await draw(site, source={"push": True})
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        pushed = await site.post("/v1/draws/d/tasks", {"tasks": tasks(1), "close": True})
        assert pushed.body["total"] == 1
        assert (await closed(site, 1))["delivered"] == 1


async def test_the_tasks_of_a_draw_whose_run_was_deleted_meanwhile_are_deleted(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        app_state, config = site.served.app_state, DrawConfig(SourceSpec(SourceKind.TASKS))
        with pytest.raises(NotFound):
            await app_state.sampler.create("gone~d", Run("gone"), config, tasks(3), {})
        assert await app_state.store.count_items("gone~d") == 0


async def test_two_draws_created_at_once_with_one_id_do_not_mix(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("one", "other"):
        lines = [json.dumps(task(f"of {name}, {number}")) + "\n" for number in range(1500)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    async with open_site(tmp_path, task_folders=[str(folder)]) as site:
        bodies = [{"id": "d", "source": {"file": str(folder / f"{name}.jsonl")}} for name in ("one", "other", "one")]
        answers = await asyncio.gather(*(site.post("/v1/draws", body) for body in bodies))
        assert sorted(answer.status for answer in answers) in ([201, 201, 409], [201, 409, 409])
        file = next(answer.body["config"]["source"]["file"] for answer in answers if answer.status == 201)
        store = site.served.app_state.store
        for number in (0, 499, 700, 1499):
            assert f"of {Path(file).stem}," in json.dumps(await store.get_item("d", number))


async def test_a_group_larger_than_the_queue_is_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_queued=4) as site:
        refused = await site.post("/v1/draws", {"source": {"tasks": tasks(1)}, "group_size": 5})
        assert refused.status == 422 and "max_queued" in refused.body["detail"]


async def test_a_full_queue_is_polled_by_one_timer(tmp_path: Path, monkeypatch: Any) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine, max_queued=2) as site:
        await site.hold()
        await site.submit("a", "b")
        await draw(site)
        await site.post("/v1/draws/d/batches", {"want": 1, "number": 1})
        runner = await site.served.app_state.sampler.runner("d")
        loop, timers = asyncio.get_running_loop(), list[Any]()
        call_later = loop.call_later

        def counted(delay: float, callback: Any, *arguments: Any, **options: Any) -> Any:
            handle = call_later(delay, callback, *arguments, **options)
            if getattr(callback, "__self__", None) is runner:
                timers.append(handle)
            return handle

        monkeypatch.setattr(loop, "call_later", counted)
        for _ in range(20):
            runner.wake()
            await site.get("/v1/draws/d")
        assert sum(not one.cancelled() and one.when() > loop.time() for one in timers) <= 1
        assert (await site.call("PATCH", "/v1/pools", json={"init": 2})).status == 200
        assert (await closed(site, 1))["delivered"] == 1, "one timer is enough"


async def test_deleting_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    async with skilled(mixed, lambda _: 30.0) as engine, site_with(tmp_path, engine) as site:
        await site.post("/v1/runs", {"id": "mine"})
        await draw(site, run="mine")
        await site.post("/v1/draws/d/batches", {"want": 2, "number": 1})
        await engine.busy()
        assert watched() == ["draw mine~d"]
        assert (await site.delete("/v1/runs/mine")).status in (202, 204)
        async with asyncio.timeout(90):
            while watched() or (await site.get("/v1/runs/mine")).status != 404:
                await asyncio.sleep(0.05)


async def test_a_draw_that_continues_after_a_rewind_has_one_runner(tmp_path: Path) -> None:
    def slow(rollout_id: str) -> float:
        return 0.0 if int(rollout_id.split(".")[2]) < 2 else 30.0

    async with skilled(mixed, slow) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 6, shuffle=False)
        await take(site, 2, 1)
        await engine.busy()
        await site.delete("/v1/draws/d")
        back = [site.post("/v1/draws/d/rewind", {"batch": 0, "version": 0}) for _ in range(3)]
        assert {answer.status for answer in await asyncio.gather(*back)} == {200}
        assert watched() == ["draw d"]


async def test_a_closing_push_can_be_sent_again(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True})
        body = {"tasks": tasks(2), "ids": ["t0", "t1"], "close": True}
        for _ in range(2):
            pushed = await site.post("/v1/draws/d/tasks", body)
            assert (pushed.status, pushed.body.get("total")) == (202, 2), pushed.body
        late = await site.post("/v1/draws/d/tasks", {"tasks": tasks(1), "ids": ["t2"]})
        assert late.code == "source_closed"
        batch, groups = await take(site, 4, 1)
        assert (batch["delivered"], len(groups)) == (2, 2)
        assert (await site.post("/v1/draws/d/tasks", body)).status == 202


async def test_a_push_to_an_ended_draw_is_refused(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True})
        await site.delete("/v1/draws/d")
        late = await site.post("/v1/draws/d/tasks", {"tasks": tasks(1)})
        assert late.code == "source_closed" and "closed" in late.body["detail"]


async def test_the_last_batch_is_sent_to_event_streams(tmp_path: Path) -> None:
    """It closes short, after its last group was sent."""

    def passes(rollout_id: str) -> bool:
        return mixed(rollout_id) and ".1.0-" not in rollout_id

    async with (
        skilled(passes, lambda rollout: 2.0 * (".1.0-" in rollout)) as engine,
        site_with(tmp_path, engine) as site,
    ):
        await draw(site, 2, epochs=1, shuffle=False)
        await site.post("/v1/draws/d/batches", {"want": 2, "number": 1})
        headers = {"Authorization": f"Bearer {site.token}", "Accept": "text/event-stream"}
        events: list[str] = []
        async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/draws/d/groups", headers=headers) as sse:
            async for line in sse.content:
                if line.startswith(b"event: "):
                    events.append(line[7:].decode().strip())
        assert events == ["group", "batch", "end"]


@pytest.mark.parametrize("path", ["batches/99999999999999999999", "groups?batch=99999999999999999999"])
async def test_a_number_too_large_for_the_store_is_refused(tmp_path: Path, path: str) -> None:
    async with open_site(tmp_path) as site:
        await draw(site)
        assert (await site.get(f"/v1/draws/d/{path}")).status in (404, 422)


async def test_the_last_batch_of_an_ended_draw_can_be_read_again(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        body = {"id": "d", "group_size": 2, "source": {"tasks": [task()]}, "keep": "all", "epochs": 1}
        answer = await site.post("/v1/draws", body)
        assert answer.status == 201, answer.body
        number = 0
        while True:
            number += 1
            opened = await site.post("/v1/draws/d/batches", {"want": 1, "number": number})
            assert opened.status == 200, opened.body
            got = await site.get(f"/v1/draws/d/batches/{number}?wait_s=60")
            assert got.status == 200, (number, opened.body, got.body)
            if got.body["is_last"]:
                break
        assert got.body["state"] == "closed" and (await site.get(f"/v1/draws/d/batches/{number + 1}")).status == 404


async def test_only_some_ended_draws_stay_in_memory_and_all_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.sampling.sampler.MOST_ENDED", 1)
    async with open_site(tmp_path) as site:
        sampler, names = site.served.app_state.sampler, ("a", "b", "c")
        for name in names:
            body = {"id": name, "group_size": 2, "source": {"push": True}}
            assert (await site.post("/v1/draws", body)).status == 201
            assert (await site.delete(f"/v1/draws/{name}")).status == 202
            async with asyncio.timeout(60):
                while watched():  # the task of a draw ends with it, even if it never had a rollout
                    await asyncio.sleep(0.01)
        loaded = [name for name in names if sampler.loaded(name) is not None]
        assert loaded == ["b", "c"], "the one that ended before the last was created, and the last"
        assert [one["state"] for one in (await site.get("/v1/draws")).body["draws"]] == ["ended"] * 3
        held = await sampler.runner("b")
        assert (await site.get("/v1/draws/a")).body["state"] == "ended"
        assert sampler.loaded("b") is None and await sampler.runner("b") is held, "a call still has it"
        assert (await site.post("/v1/draws/a/rewind", {"batch": 0, "version": 0})).status == 200


async def test_a_draw_takes_only_so_many_pushed_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.sampling.draw_runner.MOST_TASKS", 3)
    async with open_site(tmp_path) as site:
        await site.hold()
        body = {"id": "d", "group_size": 2, "source": {"push": True}}
        assert (await site.post("/v1/draws", body)).status == 201
        assert (await site.post("/v1/draws/d/tasks", {"tasks": tasks(2)})).body["total"] == 2
        refused = await site.post("/v1/draws/d/tasks", {"tasks": tasks(2)})
        assert (refused.status, refused.code) == (422, "invalid_request")
        assert (await site.post("/v1/draws/d/tasks", {"tasks": tasks(1), "close": True})).body["total"] == 3
