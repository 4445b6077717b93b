"""Conformance checks of stores for groups, draws and evaluations. They are run like those of `store_conformance`."""

from __future__ import annotations

import time
from dataclasses import replace

from rollyard.core import Batch, Draw, DrawConfig, Group, GroupState, Rollout, Run, State, Task
from rollyard.core.draw import DrawItem, DrawProgress, SourceKind, SourceSpec
from rollyard.core.failure import IdConflict, NotFound, SourceClosed
from rollyard.core.group import GroupStats
from rollyard.store.base import Decision, EvalRecord, GroupAxis, Retention, Store, Submission, eval_items
from rollyard.testing.store_conformance import (
    QUEUED,
    Check,
    Open,
    completed,
    opened,
    raises,
    trajectory,
)

GROUP_CHECKS: list[Check] = []
"""Every check, in the order of this file."""


def _check(check: Check) -> Check:
    GROUP_CHECKS.append(check)
    return check


def group(group_id: str, draw: str | None = None, **fields: object) -> Group:
    return replace(Group(group_id, "run", 2, draw=draw, started=2, updated_at=time.time()), **fields)  # type: ignore[arg-type]


def members(group_id: str, count: int = 2) -> tuple[Submission, ...]:
    return tuple(
        Submission(Rollout(f"{group_id}-{index}", "run", Task("shell"), group=group_id, index=index), {"index": index})
        for index in range(count)
    )


def draw(draw_id: str = "d", **fields: object) -> Draw:
    return replace(Draw(draw_id, "run", DrawConfig(SourceSpec(SourceKind.TASKS, size=3))), **fields)  # type: ignore[arg-type]


async def _ended(store: Store, group_id: str) -> None:
    for index in range(2):
        rollout_id = f"{group_id}-{index}"
        await store.end(rollout_id, QUEUED, completed(), trajectory(rollout_id))


@_check
async def a_group_is_stored_with_its_rollouts_once(open_store: Open) -> None:
    async with opened(open_store) as store:
        ((stored,), rollouts) = await store.put_groups([(group("g"), {"size": 2})], members("g"))
        assert stored.state is GroupState.OPEN and [one.id for one in rollouts] == ["g-0", "g-1"]
        _, again = await store.put_groups([(group("g"), {"size": 2})], members("g"))
        assert again == []
        both = [(group("other"), {}), (group("g"), {"size": 3})]
        await raises(IdConflict, store.put_groups(both, members("other")))
        await raises(NotFound, store.get_group("other"))
        await raises(NotFound, store.get("other-0"))
        stranger = Submission(Rollout("late-1", "run", Task("shell")), {"id": "late-1"})
        await store.submit([stranger])
        await raises(IdConflict, store.put_groups([(group("late"), {})], members("late")))
        await raises(NotFound, store.get_group("late"))
    async with opened(open_store) as store:
        assert [one.id for one in await store.unfinished_groups()] == ["g"]
        assert (await store.get_group("g")).size == 2


@_check
async def a_step_is_all_or_nothing(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw(), {})
        progress = DrawProgress(order=1, epoch=2, position=3, returned=[DrawItem(1, 2, 1, 1)], recent="101")
        after = draw(progress=progress)
        batch = Batch("d", 1, 4, 0, 0)
        await store.step(Decision(members("d.0.0.0"), (group("d.0.0.0", "d"),), after, (batch,)))
        stolen = Submission(Rollout("d.0.0.0-0", "run", Task("other")), {"another": "body"})
        worse = Decision((stolen,), (group("d.0.1.0", "d"),), draw(is_active=False), (replace(batch, number=2),))
        await raises(IdConflict, store.step(worse))
    async with opened(open_store) as store:
        assert (await store.get_draw("d")).progress == progress and (await store.get_draw("d")).is_active
        await raises(NotFound, store.get_group("d.0.1.0"))
        await raises(NotFound, store.get_batch("d", 2))
        assert await store.get_batch("d", 1) == batch
        assert (await store.get("d.0.0.0-1")).state is State.QUEUED
        await raises(NotFound, store.step(Decision(draw=draw("unknown"))))


@_check
async def draws_are_idempotent_and_listed(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw("d"), {"a": 1})
        ended = draw("d", is_active=False, reason="closed")
        await store.step(Decision(draw=ended))
        assert await store.put_draw(draw("d"), {"a": 1}) == ended
        await raises(IdConflict, store.put_draw(draw("d"), {"a": 2}))
        await store.put_draw(draw("e"), {})
        assert [one.id for one in await store.list_draws()] == ["d", "e"]
        assert [one.id for one in await store.list_draws(["run", "none"])] == ["d", "e"]
        assert await store.list_draws(["none"]) == ()
        await raises(NotFound, store.get_draw("unknown"))


@_check
async def groups_are_counted_over_time_and_over_versions(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw(), {})
        for number, (state, at, version, tokens) in enumerate((
            (GroupState.DELIVERED, 119.9, 3, 10),
            (GroupState.FILTERED, 120.0, 4, 20),
            (GroupState.FILTERED, 179.9, 5, 30),
            (GroupState.FAILED, 300.0, -1, 0),
            (GroupState.OPEN, 300.0, -1, None),
        )):  # fmt: skip
            stats = None if tokens is None else GroupStats(sampled_tokens=tokens)
            one = group(f"g{number}", "d", state=state, updated_at=at, newest_version=version, stats=stats)
            await store.step(Decision(groups=(one,)))

        async def counted(by: GroupAxis, width: int) -> list[tuple[object, ...]]:
            found = await store.count_groups("run", by, width)
            return [(one.place, one.state.value, one.number, one.tokens) for one in found if one.place is not None]

        delivered, open_and_failed = (1, "delivered", 1, 10), [(5, "failed", 1, 0), (5, "open", 1, 0)]
        assert await counted("time", 60) == [delivered, (2, "filtered", 2, 50), *open_and_failed]
        assert await counted("version", 2) == [delivered, (2, "filtered", 2, 50)]
        assert await counted("version", 1) == [(3, *delivered[1:]), (4, "filtered", 1, 20), (5, "filtered", 1, 30)]
        assert sum(one.number for one in await store.count_groups("run", "version", 1)) == 5
        assert await store.count_groups("none", "time", 60) == ()


@_check
async def delivered_groups_are_listed_in_order(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw(), {})
        for place in (2, 1, 3):
            one = group(f"g{place}", "d", state=GroupState.DELIVERED, place=place, batch=1 + place // 3)
            await store.step(Decision(groups=(one,)))
        assert [one.id for one in await store.delivered_groups("d", 0, 10)] == ["g1", "g2", "g3"]
        assert [one.id for one in await store.delivered_groups("d", 1, 1)] == ["g2"]
        undone = group("g3", "d", state=GroupState.COMPLETE)
        await store.step(Decision(groups=(undone,), draw=draw(), undone_after=1, batches=(Batch("d", 1, 2, 0, 0),)))
        assert [one.id for one in await store.delivered_groups("d", 0, 10)] == ["g1", "g2"]
        assert [one.id for one in await store.unfinished_groups()] == ["g3"]


@_check
async def tasks_of_a_draw_are_stored_and_pushed_once(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_items("d", 0, [{"n": 0}, {"n": 1}])
        await store.put_items("d", 1, [{"n": 9}])
        assert [await store.get_item("d", item) for item in range(2)] == [{"n": 0}, {"n": 9}]
        await raises(NotFound, store.get_item("d", 2))
        assert await store.push_items("p", [("a", {"n": 1}), (None, {"n": 2})]) == 2
        assert await store.push_items("p", [("a", {"n": 1}), ("b", {"n": 3})]) == 3
        await raises(IdConflict, store.push_items("p", [("c", {"n": 4}), ("a", {"n": 5})]))
        assert await store.count_items("p") == 3 and await store.get_item("p", 2) == {"n": 3}
        assert await store.push_items("p", [("a", {"n": 1})], closed="no more") == 3, "a repeated push added items"
        reason = await raises(SourceClosed, store.push_items("p", [("b", {"n": 3}), ("d", {"n": 6})], closed="no more"))
        assert reason == "no more" and await store.count_items("p") == 3
        await store.put_items("d", 0, [{"n": 7}])
        assert await store.count_items("d") == 1, "items from the first number on were not replaced"


@_check
async def an_opening_deletes_tasks_of_draws_that_were_never_stored(open_store: Open) -> None:
    names = ("a", "d", eval_items("d"), eval_items("e"), "z")
    async with opened(open_store) as store:
        for name in names:
            await store.put_items(name, 0, [{"n": 0}, {"n": 1}])
        await store.put_draw(draw(), {})
        await store.put_eval(EvalRecord("e", "run", "default", 0), {})
    async with opened(open_store) as store:
        assert [await store.count_items(name) for name in names] == [0, 2, 0, 2, 0]


@_check
async def unacknowledged_groups_of_a_live_draw_are_not_deleted(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw(), {})
        for place, name in enumerate(("acked", "unacked"), 1):
            one = group(name, "d", state=GroupState.DELIVERED, place=place, batch=place)
            await store.step(Decision(members(name), (one,)))
            await _ended(store, name)
        stranger = Submission(Rollout("mine", "run", Task("shell"), group="acked", index=0), {"id": "mine"})
        await store.submit([stranger])
        await store.end("mine", QUEUED, completed(), trajectory("mine"))
        assert await store.acknowledge_draw("d", 1) == 1
        assert await store.trajectory("mine") is not None, "it names the group but is not a member"
        assert await store.acknowledge_draw("d", 1) == 0
        assert await store.trajectory("acked-0") is None and await store.trajectory("unacked-0") is not None
        swept = (await store.sweep(Retention(0))).rollouts
        assert set(swept) == {"acked-0", "acked-1", "mine"}  # deleted because of its age
        assert (await store.get("unacked-1")).state is State.ENDED and (await store.get_group("unacked")).place == 2
        await raises(NotFound, store.get_group("acked"))
        await store.step(Decision(draw=draw(is_active=False)))
        await store.sweep(Retention(3600))
        assert await store.trajectory("unacked-0") is not None, "its draw ended just now"
        assert (await store.sweep(Retention(0))).draws == ("d",)
        await raises(NotFound, store.get("unacked-1"))


@_check
async def acknowledging_a_run_keeps_undelivered_groups(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_draw(draw(), {})
        await store.put_groups([(group("lone"), {})], members("lone"))
        states = {"waits": GroupState.COMPLETE, "works": GroupState.OPEN, "filtered": GroupState.FILTERED}
        for name, state in states.items():
            await store.step(Decision(members(name), (group(name, "d", state=state),)))
            await _ended(store, name)
        delivered = group("delivered", "d", state=GroupState.DELIVERED, place=1, batch=1)
        await store.step(Decision(members("delivered"), (delivered,)))
        await _ended(store, "delivered")
        await store.end("lone-0", QUEUED, completed(), trajectory("lone-0"))
        cursor = (await store.list(state=State.ENDED)).next_cursor
        assert cursor is not None
        assert await store.acknowledge("run", cursor) == 2, "only the two members of the filtered group"
        for name in ("waits-0", "works-1", "delivered-0", "lone-0"):
            assert await store.trajectory(name) is not None, name
        assert await store.acknowledge_draw("d", 1) == 1
        assert await store.trajectory("delivered-0") is None
        await store.end("lone-1", QUEUED, completed(), trajectory("lone-1"))
        await store.step(Decision(groups=(group("lone", state=GroupState.COMPLETE),)))
        cursor = (await store.list(state=State.ENDED, after=cursor)).next_cursor
        assert cursor is not None and await store.acknowledge("run", cursor) == 2, "both members of the complete group"
        assert await store.acknowledge("run", cursor) == 0


@_check
async def a_sweep_deletes_ended_draws_evaluations_and_runs(open_store: Open) -> None:
    async with opened(open_store) as store:
        for name in ("evals", "running"):
            await store.put_run(Run(name), {})
            record = EvalRecord(name, name, "default", 1, tasks=1)
            await store.put_items(eval_items(name), 0, [{"n": 0}])
            await store.put_eval(record, {})
            await store.submit([Submission(Rollout(f"{name}.0-0", name, Task("shell"), group=f"{name}.0"), {})])
            await store.end(f"{name}.0-0", QUEUED, completed())
        await store.put_eval(EvalRecord("evals", "evals", "default", 1, state="done", tasks=1))
        await store.put_draw(draw(), {})
        await store.put_items("d", 0, [{"n": 0}])
        over = group("g", "d", state=GroupState.DELIVERED, place=1, batch=1)
        progress = DrawProgress(batch=3, acked=2)
        batches = tuple(Batch("d", number, 1, 0, 0) for number in (1, 2, 3))
        await store.step(Decision(members("g"), (over,), draw(progress=progress), batches))
        await _ended(store, "g")
        swept = await store.sweep(Retention(0))
        assert (swept.rollouts, swept.draws, swept.runs) == (("evals.0-0",), (), ("evals",))
        await raises(NotFound, store.get_eval("evals"))
        assert await store.count_items(eval_items("evals")) == 0
        assert (await store.get("running.0-0")).state is State.ENDED, "its evaluation is not over"
        await raises(NotFound, store.get_batch("d", 1))
        assert await store.get_batch("d", 2), "a rewind may need it"
        await store.step(Decision(draw=draw(is_active=False, progress=progress)))
        swept = await store.sweep(Retention(0))
        assert (set(swept.rollouts) - {"evals.0-0"}, swept.draws, swept.runs) == ({"g-0", "g-1"}, ("d",), ("run",))
        assert await store.count_items("d") == 0
        await raises(NotFound, store.get_batch("d", 2))
        await raises(NotFound, store.get_group("g"))
        await raises(NotFound, store.put_draw(draw("late"), {}))
        await raises(NotFound, store.put_eval(EvalRecord("late", "run", "default", 0), {}))


@_check
async def orphaned_rollouts_are_listed(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_groups([(group("open"), {}), (group("over"), {})], (*members("open"), *members("over")))
        await store.end("over-0", QUEUED, completed())
        await store.step(Decision(groups=(group("over", state=GroupState.CANCELLED),)))
        assert await store.orphans() == ("over-1",)


@_check
async def evaluations_are_stored(open_store: Open) -> None:
    async with opened(open_store) as store:
        record = EvalRecord("e", "run", "default", 3, k=2, samples=4, tasks=5)
        assert await store.put_eval(record, {"k": 2}) == record
        finished = replace(record, state="done", result={"pass": 0.5})
        assert await store.put_eval(finished) == finished
        assert await store.put_eval(record, {"k": 2}) == finished
        await raises(IdConflict, store.put_eval(record, {"k": 3}))
    async with opened(open_store) as store:
        assert await store.get_eval("e") == finished and list(await store.list_evals()) == [finished]
        await raises(NotFound, store.get_eval("unknown"))


@_check
async def deleting_a_run_deletes_its_draws(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        await store.put_draw(draw(), {})
        await store.put_items("d", 0, [{"n": 0}])
        await store.put_eval(EvalRecord("e", "run", "default", 0), {})
        await store.step(
            Decision(groups=(group("g", "d", state=GroupState.FILTERED),), batches=(Batch("d", 1, 1, 0, 0),))
        )
        await store.put_draw(replace(draw("theirs"), run="other"), {})
        await store.delete_run("run")
        await raises(NotFound, store.get_draw("d"))
        await raises(NotFound, store.get_group("g"))
        await raises(NotFound, store.get_batch("d", 1))
        await raises(NotFound, store.get_eval("e"))
        assert await store.count_items("d") == 0 and [one.id for one in await store.list_draws()] == ["theirs"]


@_check
async def nothing_is_written_of_a_run_that_was_deleted(open_store: Open) -> None:
    async with opened(open_store) as store:
        group, record = Group("g", "run", 1), EvalRecord("e", "run", "default", 1)
        await store.put_groups([(group, {})], [])
        await store.put_eval(record, {})
        await store.begin_deletion("run")
        await raises(NotFound, store.put_eval(EvalRecord("late", "run", "default", 1), {}))
        await store.step(Decision(groups=(replace(group, state=GroupState.CANCELLED),)))
        await store.delete_run("run")
        await raises(NotFound, store.step(Decision(groups=(replace(group, state=GroupState.FAILED),))))
        await raises(NotFound, store.put_groups([(group, {})], []))
        await store.put_run(Run("run"), {})
        await raises(NotFound, store.put_eval(replace(record, state="done")))
        assert await store.list_groups() == ((), None) and list(await store.list_evals()) == []


@_check
async def groups_and_batches_are_listed_newest_first(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        await store.put_draw(draw(), {})
        batches = tuple(Batch("d", number, 4, 0, 0) for number in (1, 2, 3))
        ended = group("d.0.1.0", "d", state=GroupState.FILTERED)
        await store.step(Decision(members("d.0.0.0"), (group("d.0.0.0", "d"), ended), draw(), batches))
        await store.put_groups([(replace(group("else"), run="other"), {})], ())

        async def listed(**wanted: object) -> str:
            ids, before = list[str](), None
            while True:
                groups, before = await store.list_groups(before=before, limit=1, **wanted)  # type: ignore[arg-type]
                ids += [one.id for one in groups]
                if before is None:
                    return " ".join(ids)

        assert await listed() == "else d.0.1.0 d.0.0.0"
        assert await listed(runs=["run"]) == await listed(draw="d") == "d.0.1.0 d.0.0.0"
        assert await listed(runs=["other", "none"]) == "else" and await listed(runs=[]) == ""
        assert await listed(runs=["run"], state=GroupState.OPEN) == "d.0.0.0"
        assert [one.number for one in await store.list_batches("d", None, 2)] == [3, 2]
        assert [one.number for one in await store.list_batches("d", 2, 2)] == [1]
        assert await store.list_batches("unknown", None, 2) == ()
