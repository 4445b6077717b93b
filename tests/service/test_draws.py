"""/v1/draws with the real pipeline: what is delivered, in which order, and how a draw ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.service.schemas import group_pages
from rollyard.testing.script import Reply
from tests.service.site import OTHER, Site, engine_table, finish, open_site, scripted, task
from tests.service.skill import CHECK, chance, member_of, skilled

pytestmark = pytest.mark.slow

ARROW = {"Accept": "application/vnd.apache.arrow.stream"}


def tasks(count: int) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        body = task(f"do it, number {number}")
        body["data"]["checks"] = CHECK
        bodies.append(body)
    return bodies


def mixed(rollout_id: str) -> bool:
    """Every group has passing and failing members."""
    return member_of(rollout_id)[1] % 2 == 0


def some(rollout_id: str) -> bool:
    """Groups of even items have passing and failing members; in the others all fail."""
    group, index = member_of(rollout_id)
    return index == 0 and int(group.split(".")[-2]) % 2 == 0


async def draw(site: Site, count: int = 12, **fields: Any) -> dict[str, Any]:
    body = {"id": "d", "source": {"tasks": tasks(count)}, "group_size": 2, **fields}
    answer = await site.post("/v1/draws", body)
    assert answer.status == 201, answer.body
    return answer.body


async def closed(site: Site, number: int, name: str = "d") -> dict[str, Any]:
    async with asyncio.timeout(90):
        while True:
            answer = await site.get(f"/v1/draws/{name}/batches/{number}?wait_s=20")
            assert answer.status == 200, answer.body
            if answer.body["state"] == "closed":
                return answer.body


async def take(site: Site, count: int, number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answer = await site.post("/v1/draws/d/batches", {"want": count, "number": number})
    assert answer.status == 200, answer.body
    batch = answer.body if answer.body["state"] == "closed" else await closed(site, number)
    page = await site.get(f"/v1/draws/d/groups?batch={number}&limit=200&include=records")
    return batch, page.body["groups"] if page.status == 200 else []


def site_with(folder: Path, engine: Any, **values: Any) -> Any:
    return open_site(folder, engines=[engine_table(engine)], **values)


async def test_batches_have_only_groups_with_signal_and_count_filtered_ones(tmp_path: Path) -> None:
    async with skilled(some) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 12, epochs=1, max_staleness=0)
        batch, groups = await take(site, 4, 1)
        assert batch["delivered"] == 4 and batch["reason"] is None
        assert [group["batch"] for group in groups] == [1] * 4
        for group in groups:
            assert sorted(one["reward"] for one in group["rollouts"]) == [0, 1] and group["item"] % 2 == 0
            assert group["stats"]["spread"] == 0.5
        last, more = await take(site, 4, 2)
        assert (last["delivered"], last["reason"], last["is_last"]) == (2, "exhausted", True)
        assert len({group["id"] for group in groups + more}) == 6
        figures = (await site.get("/v1/draws/d")).body["figures"]
        assert (figures["admitted"], figures["delivered"], figures["filtered"]) == (12, 6, 6)
        assert figures["judged"] == 12 and figures["reward_before"] == pytest.approx(6 / 24)
        assert figures["all_zero"] == 6 and figures["open"] == figures["complete"] == 0
        assert batch["figures"]["judged"] + last["figures"]["judged"] == 12


async def test_a_batch_requested_again_is_the_same(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site)
        first, groups = await take(site, 3, 1)
        again, same = await take(site, 3, 1)
        assert first == again and groups == same
        other = await site.post("/v1/draws/d/batches", {"want": 4, "number": 1})
        assert (other.status, other.code) == (409, "batch_conflict")
        assert (await site.post("/v1/draws/d/batches", {"want": 4, "number": 3})).code == "batch_conflict"
        unnumbered = await site.post("/v1/draws/d/batches", {"want": 2})
        assert unnumbered.body["number"] == 2


async def test_unfinished_groups_are_kept_for_the_next_batch(tmp_path: Path) -> None:
    release = asyncio.Event()

    def slow(rollout_id: str) -> float:
        return 0.0 if release.is_set() or member_of(rollout_id)[1] else 2.0 * (chance(rollout_id) < 0.3)

    async with skilled(mixed, slow) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 8, epochs=1, max_staleness=3)
        _, first = await take(site, 2, 1)
        release.set()
        _, second = await take(site, 6, 2)
        assert len(first) == 2 and len(second) == 6
        figures = (await site.get("/v1/draws/d")).body["figures"]
        assert figures["admitted"] == figures["delivered"] == 8 and figures["cancelled"] == 0


async def test_groups_are_delivered_when_ready_by_long_poll_events_and_arrow(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site)
        await site.post("/v1/draws/d/batches", {"want": 3, "number": 1})
        group_ids: list[str] = []
        after = None
        async with asyncio.timeout(90):
            while len(group_ids) < 3:
                query = f"batch=1&limit=1&wait_s=20{'' if after is None else f'&after={after}'}"
                page = (await site.get(f"/v1/draws/d/groups?{query}")).body
                group_ids += [group["id"] for group in page["groups"]]
                after = page["next"]
        whole = (await site.get("/v1/draws/d/groups?batch=1")).body
        assert [group["id"] for group in whole["groups"]] == group_ids
        reply = await site.get("/v1/draws/d/groups?batch=1", headers=ARROW)
        table = pa.ipc.open_stream(reply.body)
        page = json.loads(table.schema.metadata[b"page"])
        assert [group["id"] for group in page["groups"]] == group_ids and page["batch"]["state"] == "closed"
        rows = table.read_all().to_pylist()
        as_json = [trace for group in whole["groups"] for one in group["rollouts"] for trace in one["traces"]]
        assert [row["token_ids"] for row in rows] == [trace["token_ids"] for trace in as_json]
        assert {row["group"] for row in rows} == set(group_ids) and {row["rollout_index"] for row in rows} == {0, 1}
        headers = {"Authorization": f"Bearer {site.token}", "Accept": "text/event-stream"}
        events: list[str] = []
        async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/draws/d/groups?batch=1", headers=headers) as sse:
            async for line in sse.content:
                if line.startswith(b"event: "):
                    events.append(line[7:].decode().strip())
        assert events == ["group"] * 3 + ["batch"]


async def test_the_order_is_seeded_and_no_task_repeats_within_an_epoch(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        orders: list[list[int]] = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            body = {"id": name, "source": {"tasks": tasks(5)}, "group_size": 2, "epochs": 2, "seed": seed}
            assert (await site.post("/v1/draws", body)).status == 201
            assert (await site.post(f"/v1/draws/{name}/batches", {"want": 10, "number": 1})).status == 200
            assert (await closed(site, 1, name))["delivered"] == 10
            page = (await site.get(f"/v1/draws/{name}/groups?include=records")).body["groups"]
            first = [group for group in page if group["epoch"] == 0]
            assert sorted(group["item"] for group in first) == list(range(5))
            orders.append([group["item"] for group in sorted(page, key=lambda one: one["created_at"])])
        assert sorted(orders[0]) == sorted(orders[1])
        rollouts = (await site.get("/v1/rollouts?limit=1000")).body["rollouts"]
        admitted = {
            name: [one["group"].split(".")[1:3] for one in rollouts if one["id"].startswith(f"{name}.")]
            for name in "abc"
        }
        assert admitted["a"] == admitted["b"] != admitted["c"]


async def test_a_filter_that_rejects_all_ends_the_draw_with_figures(tmp_path: Path) -> None:
    async with skilled(lambda _: True) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 4, patience=4)
        batch, groups = await take(site, 2, 1)
        assert (batch["reason"], batch["delivered"], groups) == ("nothing_kept", 0, [])
        body = (await site.get("/v1/draws/d")).body
        assert (body["state"], body["reason"]) == ("ended", "nothing_kept")
        assert body["figures"]["filtered"] >= 4 and body["figures"]["pass_rate_before"] == 1.0
        after = await site.post("/v1/draws/d/batches", {"want": 2, "number": 2})
        assert (after.body["state"], after.body["reason"], after.body["is_last"]) == ("closed", "nothing_kept", True)


@pytest.mark.parametrize("budget", [{"groups": 3}, {"batches": 1}, {"rollouts": 8}, {"tokens": 1}])
async def test_a_budget_ends_the_draw(tmp_path: Path, budget: dict[str, int]) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 20, budget=budget, max_groups_in_flight=2)
        number = 0
        async with asyncio.timeout(90):
            while (await site.get("/v1/draws/d")).body["state"] == "active":
                number += 1
                await take(site, 2, number)
        body = (await site.get("/v1/draws/d")).body
        assert body["reason"] == "budget" and next(iter(budget)) in body["detail"]
        figures = body["figures"]
        assert figures["open"] == figures["complete"] == 0
        if "groups" in budget:
            assert figures["delivered"] == 3


async def test_pushed_tasks_are_drawn_once_and_closing_ends_the_draw(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, source={"push": True})
        await site.post("/v1/draws/d/batches", {"want": 3, "number": 1})
        for _ in range(2):
            pushed = await site.post("/v1/draws/d/tasks", {"tasks": tasks(2), "ids": ["t0", "t1"]})
            assert (pushed.status, pushed.body["total"]) == (202, 2)
        bad = await site.post("/v1/draws/d/tasks", {"tasks": [{"environment": "none"}]})
        assert bad.status == 422 and "tasks.0" in bad.body["detail"]
        closing = await site.post("/v1/draws/d/tasks", {"close": True})
        assert closing.body["total"] == 2
        batch = await closed(site, 1)
        assert (batch["delivered"], batch["reason"]) == (2, "exhausted")
        late = await site.post("/v1/draws/d/tasks", {"tasks": tasks(1)})
        assert late.code == "source_closed"


async def test_a_file_is_read_only_below_the_allowed_folders(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    inside, outside = folder / "some.jsonl", tmp_path / "other.jsonl"
    for path in (inside, outside):
        path.write_text("".join(json.dumps(one) + "\n" for one in tasks(3)))
    (folder / "link.jsonl").symlink_to(outside)
    (folder / "bad.jsonl").write_text(json.dumps(tasks(1)[0]) + '\n{"environment": "none"}\n')
    async with skilled(mixed) as engine, site_with(tmp_path, engine, task_folders=[str(folder)]) as site:
        for path in (outside, folder / "link.jsonl", folder / ".." / "other.jsonl"):
            refused = await site.post("/v1/draws", {"source": {"file": str(path)}})
            assert refused.code == "forbidden", refused.body
        assert (await site.post("/v1/draws", {"source": {"file": str(folder / "none.jsonl")}})).status == 422
        bad = await site.post("/v1/draws", {"source": {"file": str(folder / "bad.jsonl")}})
        assert bad.status == 422 and "bad.jsonl:2" in bad.body["detail"]
        await draw(site, source={"file": str(inside)}, epochs=1)
        inside.unlink()  # it was copied
        batch, groups = await take(site, 3, 1)
        assert batch["delivered"] == 3 and sorted(group["item"] for group in groups) == [0, 1, 2]


async def test_an_environment_generates_tasks_or_imports_the_rows_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "gsm8k.parquet")
    async with skilled(mixed) as engine, site_with(tmp_path, engine, task_folders=[str(folder)]) as site:
        generated = {"environment": "reasoning_gym", "options": {"family": "gcd", "count": "5", "seed": "7"}}
        assert (await draw(site, id="made", source=generated))["config"]["source"]["size"] == 5
        imported = {"file": str(folder / "gsm8k.parquet"), "environment": "math"}
        assert (await draw(site, id="read", source=imported))["config"]["source"]["size"] == 4
        for name, environment in (("made", "reasoning_gym"), ("read", "math")):
            await site.post(f"/v1/draws/{name}/batches", {"want": 1, "number": 1})
            async with asyncio.timeout(90):
                while not (rollouts := (await site.get("/v1/rollouts")).body["rollouts"]) or not any(
                    one["id"].startswith(name) for one in rollouts
                ):
                    await asyncio.sleep(0.02)
            assert {one["task"]["environment"] for one in rollouts if one["id"].startswith(name)} == {environment}
        wrong = await site.post(
            "/v1/draws", {"source": {"environment": "reasoning_gym", "options": {"family": "none"}}}
        )
        assert 400 <= wrong.status < 500 and "none" in wrong.body["detail"]
        none = await site.post("/v1/draws", {"source": {"environment": "shell"}})
        assert 400 <= none.status < 500 and "shell" in none.body["detail"]


async def test_a_draw_continues_after_a_restart_and_delivers_each_group_once(tmp_path: Path) -> None:
    async with skilled(mixed, lambda rollout: 0.3 * chance(rollout)) as engine:
        group_ids: list[str] = []
        async with site_with(tmp_path, engine, drain_s=0) as site:
            await draw(site, 10, epochs=1)
            _, groups = await take(site, 3, 1)
            group_ids += [group["id"] for group in groups]
            await site.post("/v1/draws/d/batches", {"want": 4, "number": 2})
        async with site_with(tmp_path, engine) as site:
            again = (await site.get("/v1/draws/d/groups?batch=1&include=records")).body["groups"]
            assert [group["id"] for group in again] == group_ids
            batch = await closed(site, 2)
            assert batch["delivered"] == 4
            _, remaining = await take(site, 5, 3)
            groups = (await site.get("/v1/draws/d/groups?include=records")).body["groups"]
            assert len({group["id"] for group in groups}) == len(groups) == 10 and len(remaining) == 3
            assert sorted(group["item"] for group in groups) == list(range(10))


async def test_acknowledging_a_batch_deletes_only_its_traces(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site)
        await take(site, 2, 1)
        await take(site, 2, 2)
        assert (await site.post("/v1/draws/d/ack", {"batch": 3})).status == 422
        assert (await site.post("/v1/draws/d/ack", {"batch": 1})).body == {"acked": 1, "deleted": 2}
        groups = (await site.get("/v1/draws/d/groups?limit=4")).body["groups"]
        has = [all("traces" in one for one in group["rollouts"]) for group in groups]
        assert has == [False, False, True, True]


async def test_a_rewind_before_an_acknowledged_batch_samples_its_tasks_again(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 12, epochs=1)
        _, first = await take(site, 2, 1)
        _, second = await take(site, 2, 2)
        await site.post("/v1/draws/d/ack", {"batch": 1})
        body = (await site.post("/v1/draws/d/rewind", {"batch": 0, "version": 0})).body
        assert (body["batch"], body["acked"]) == (0, 0) and body["figures"]["void"] >= 2
        _, again = await take(site, 12, 1)  # all of them: fewer would be those that ended first
        assert {group["item"] for group in first} <= {group["item"] for group in again}
        assert {group["id"] for group in first}.isdisjoint(group["id"] for group in again), "their traces are gone"
        assert {group["id"] for group in second} <= {group["id"] for group in again}, "these still have their traces"


async def test_a_page_has_as_many_groups_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_pages, "MOST_TOKENS", 1)
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site)
        batch, _ = await take(site, 3, 1)
        found, after = list[str](), ""
        for _ in range(3):
            page = (await site.get(f"/v1/draws/d/groups?batch=1{after}")).body
            (group,) = page["groups"]
            assert page["next"] == group["cursor"] and all("traces" in one for one in group["rollouts"])
            found, after = [*found, group["id"]], f"&after={page['next']}"
        assert len(set(found)) == 3 and after == f"&after={batch['last']}"
        assert (await site.get(f"/v1/draws/d/groups?batch=1{after}")).body["groups"] == []


async def test_a_rewind_waits_for_an_acknowledgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on to delete the traces of the next batch with that number."""
    events: list[str] = []
    has_begun = asyncio.Event()
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        store = site.served.app_state.store
        acknowledge, delivered = store.acknowledge_draw, store.delivered_groups

        async def slowly(draw_id: str, batch: int) -> int:
            has_begun.set()
            for _ in range(50):  # a rewind has two reads before those of groups
                await store.get_draw(draw_id)
            released = await acknowledge(draw_id, batch)
            events.append(f"released {released}")
            return released

        async def groups(draw_id: str, after: int, limit: int) -> Any:
            events.append("rewind")
            return await delivered(draw_id, after, limit)

        await draw(site)
        await take(site, 2, 1)
        await take(site, 2, 2)
        monkeypatch.setattr(store, "acknowledge_draw", slowly)
        ack = asyncio.create_task(site.post("/v1/draws/d/ack", {"batch": 2}))
        await has_begun.wait()
        monkeypatch.setattr(store, "delivered_groups", groups)
        assert (await site.post("/v1/draws/d/rewind", {"batch": 1, "version": 0})).status == 200
        assert (await ack).body["deleted"] == 4 and events == ["released 4", "rewind"]
        _, again = await take(site, 2, 2)
        rollouts = [one["id"] for group in again for one in group["rollouts"]]
        assert [(await site.get(f"/v1/rollouts/{one}/traces")).status for one in rollouts] == [200] * 4


async def test_a_rewind_waits_until_an_ended_draw_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the state that another call reads would replace the rewound one."""
    async with skilled(mixed) as engine:
        async with site_with(tmp_path, engine) as site:
            await draw(site, budget={"batches": 1})
            await take(site, 2, 1)
        async with site_with(tmp_path, engine) as site:
            store, is_reading = site.served.app_state.store, asyncio.Event()
            get_batch = store.get_batch

            async def slowly(draw_id: str, number: int) -> Any:
                found = await get_batch(draw_id, number)
                if not is_reading.is_set():
                    is_reading.set()
                    for _ in range(50):  # a rewind has fewer reads and writes
                        await store.get_draw(draw_id)
                return found

            monkeypatch.setattr(store, "get_batch", slowly)
            reading = asyncio.create_task(site.get("/v1/draws/d"))
            await is_reading.wait()
            assert (await site.post("/v1/draws/d/rewind", {"batch": 0, "version": 0})).status == 200
            await reading
            found = (await site.get("/v1/draws/d")).body
            assert (found["state"], found["batch"]) == ("active", 0)
            assert (await take(site, 2, 1))[0]["delivered"] == 2


async def test_a_rewind_accepts_the_checkpoints_weights_under_a_new_version(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 30, max_staleness=0, on_stale="wait")
        await take(site, 2, 1)
        site.served.app_state.router.resume("default", 2)
        _, second = await take(site, 2, 2)
        site.served.app_state.router.resume("default", 1)
        back = {"batch": 1, "version": 0, "policy_version": 2}
        assert (await site.post("/v1/draws/d/rewind", back)).code == "version_conflict", "the policy is at version 1"
        assert (await site.post("/v1/draws/d/rewind", {**back, "policy_version": 1})).status == 200
        _, again = await take(site, 2, 2)
        assert {group["newest_version"] for group in again} == {1}
        assert {group["item"] for group in again} == {group["item"] for group in second}


async def test_acknowledging_a_run_keeps_the_groups_of_a_draw(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site)
        await take(site, 2, 1)
        listed = (await site.get("/v1/rollouts?state=ended&limit=1000")).body
        answer = await site.post("/v1/runs/default/ack", {"cursor": listed["rollouts"][-1]["cursor"]})
        assert answer.body == {"acknowledged": 0}
        groups = (await site.get("/v1/draws/d/groups?limit=4")).body["groups"]
        assert all("traces" in one for group in groups for one in group["rollouts"])


async def test_an_ended_draw_is_deleted_with_its_run_after_retention(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine, retain_s=0.001) as site:
        await draw(site)
        await take(site, 2, 1)
        app_state = site.served.app_state
        await app_state.pipeline.sweep()
        assert (await site.get("/v1/draws/d")).status == 200, "the draw is active"
        await site.delete("/v1/draws/d")
        async with asyncio.timeout(60):
            while (await site.get("/v1/draws/d")).status != 404:
                await app_state.pipeline.sweep()
        await app_state.pipeline.sweep()
        assert [run.id for run in app_state.pipeline.runs] == [] and await app_state.store.list_runs() == ()
        assert (await site.get("/v1/draws/d/groups")).status == 404
        await draw(site)
        await take(site, 2, 1)


async def test_a_rewind_voids_groups_of_newer_weights_and_returns_their_tasks(tmp_path: Path) -> None:
    async with skilled(mixed) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 30, max_staleness=0, on_stale="wait")  # so that nothing is started beyond the batch
        _, first = await take(site, 2, 1)
        site.served.app_state.router.resume("default", 1)
        _, second = await take(site, 2, 2)
        assert {group["newest_version"] for group in second} == {1}
        early = await site.post("/v1/draws/d/rewind", {"batch": 1, "version": 0})
        assert early.code == "version_conflict"
        await site.hold()  # what starts now must not be complete before the rewind
        site.served.app_state.router.resume("default", 0)
        body = (await site.post("/v1/draws/d/rewind", {"batch": 1, "version": 0})).body
        assert body["batch"] == 1 and body["figures"]["void"] >= 2 and body["figures"]["delivered"] == 2
        assert (await site.call("PATCH", "/v1/pools", json={"init": 4})).status == 200
        _, again = await take(site, 2, 2)
        assert {group["newest_version"] for group in again} == {0}
        assert {group["id"] for group in again}.isdisjoint(group["id"] for group in second)
        assert {group["item"] for group in again} == {group["item"] for group in second}, "their tasks are drawn first"
        assert {group["id"] for group in first}.isdisjoint(group["id"] for group in again)


async def test_surplus_cancel_ends_running_groups_and_returns_their_tasks(tmp_path: Path) -> None:
    def slow(rollout_id: str) -> float:
        return 0.0 if int(rollout_id.split(".")[2]) < 2 else 30.0

    async with skilled(mixed, slow) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 6, shuffle=False, surplus="cancel", max_staleness=2)
        batch, groups = await take(site, 2, 1)
        assert sorted(group["item"] for group in groups) == [0, 1]
        async with asyncio.timeout(90):
            await engine.idle()
        figures = (await site.get("/v1/draws/d")).body["figures"]
        assert figures["open"] == 0 and figures["cancelled"] == figures["admitted"] - 2
        assert batch["delivered"] == 2


async def test_a_group_is_abandoned_early_only_if_it_cannot_be_kept(tmp_path: Path) -> None:
    """Pass rate at most 0.5 of 4: with three passes it is known to be rejected."""

    def slow(rollout_id: str) -> float:
        return 30.0 if member_of(rollout_id)[1] == 3 else 0.0

    async with skilled(lambda _: True, slow) as engine, site_with(tmp_path, engine) as site:
        await draw(site, 1, group_size=4, keep={"pass_rate": [0.1, 0.5]}, epochs=1)
        batch, _ = await take(site, 1, 1)
        assert batch["reason"] == "exhausted"
        figures = (await site.get("/v1/draws/d")).body["figures"]
        assert figures["rejected_early"] == figures["filtered"] == 1
        assert (await site.ended("d.0.0.0-3"))["outcome"] == "cancelled"


async def test_a_task_lost_to_infrastructure_is_drawn_again_at_most_twice(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rollyard.sampling.draw_runner.HOLD_OFF_S", (0.01, 0.01))

    def scripted_turn(turn: Any) -> Reply:
        if "<|im_start|>" in turn.text and "number 0" in turn.text:
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with site_with(tmp_path, engine, max_attempts=1, engine_wait_s=60) as site:
            await draw(site, 2, epochs=1, spares=0, keep="all")
            batch, groups = await take(site, 2, 1)
            assert batch["delivered"] == 1 and [group["item"] for group in groups] == [1]
            figures = (await site.get("/v1/draws/d")).body["figures"]
            assert (figures["failed"], figures["returned"], figures["admitted"]) == (3, 2, 4)
            assert figures["infra_rollouts"] == 6


async def test_closing_a_draw_or_deleting_its_run_leaves_nothing_running(tmp_path: Path) -> None:
    async with skilled(mixed, lambda _: 30.0) as engine, site_with(tmp_path, engine) as site:
        await site.post("/v1/runs", {"id": "mine"})
        await draw(site, run="mine")
        await site.post("/v1/draws/d/batches", {"want": 2, "number": 1})
        await engine.busy()
        assert (await site.delete("/v1/draws/d", token=OTHER)).code == "not_found"
        deleted = await site.delete("/v1/draws/d")
        assert (deleted.status, deleted.body["reason"]) == (202, "closed")
        assert (await closed(site, 1))["reason"] == "closed"
        async with asyncio.timeout(90):
            await engine.idle()
        await site.delete_run("mine")
        assert (await site.get("/v1/draws/d")).code == "not_found"


async def test_an_invalid_draw_is_refused_with_the_reason(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"source": {}}, "exactly one of"),
        ({"source": {"tasks": tasks(1), "push": True}}, "exactly one of"),
        ({"source": {"tasks": []}}, "no tasks"),
        ({"source": {"tasks": [{"environment": "none"}]}}, "task 0"),
        ({"source": {"tasks": tasks(1)}, "keep": {"filter": "none"}}, "no filter"),
        ({"source": {"tasks": tasks(1)}, "keep": {"pass_rate": [0.9, 0.1]}}, "pass_rate"),
        ({"source": {"tasks": tasks(1)}, "group_size": 2, "min_members": 3}, "min_members"),
        ({"source": {"tasks": tasks(1)}, "id": "x" * 90}, "80"),
        ({"source": {"tasks": tasks(1)}, "budget": {"groups": 0}}, "groups"),
    ]
    async with open_site(tmp_path) as site:
        for body, part in refused:
            answer = await site.post("/v1/draws", body)
            assert 400 <= answer.status < 500 and part in answer.body["detail"], (body, answer.body)
        assert (await site.get("/v1/draws")).body == {"draws": []}
        assert (await site.get("/v1/draws/none")).code == "not_found"
        assert (await site.get("/v1/draws/none/groups")).code == "not_found"
        await draw(site)
        assert (await site.get("/v1/draws/d/groups?after=x")).status == 422
        assert (await site.get("/v1/draws/d/batches/1")).code == "not_found"
        assert (await site.post("/v1/draws/d/batches", {"want": 0})).status == 422
        other = await site.post("/v1/draws", {"id": "d", "source": {"tasks": tasks(1)}})
        assert other.code == "id_conflict"
