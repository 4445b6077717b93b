"""Conformance checks for stores, which a test runs one by one. They are public, for authors of other stores.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_store(check, tmp_path):
        await check(Opener(tmp_path))

An `Open` opens the same store each time it is called, like a server that restarts. With `is_forced` it does so
although another process holds the store, as when a lock was lost. A check closes the stores that it opens. The file is
long because it is one list of short checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from rollyard.core import (
    Draw,
    DrawConfig,
    Ending,
    EngineSpec,
    LostAttempt,
    Outcome,
    Position,
    Rollout,
    Run,
    Score,
    State,
    Task,
    Timings,
    Trace,
    Trajectory,
    ids_array,
    logprobs_array,
)
from rollyard.core.draw import SourceKind, SourceSpec
from rollyard.core.engine import Kind
from rollyard.core.failure import IdConflict, InvalidRequest, NotFound
from rollyard.core.task import Sampling
from rollyard.core.trace import Span
from rollyard.store.base import Retention, Stale, Store, StoreLocked, StoreUnusable, Submission, SweepResult
from rollyard.store.codec import decode_trajectory


class Open(Protocol):
    def __call__(
        self, *, max_attempts: int = 3, is_forced: bool = False, keeps_leases: bool = False
    ) -> Awaitable[Store]: ...


Check = Callable[[Open], Awaitable[None]]

CHECKS: list[Check] = []
"""Every check, in the order of this file."""

QUEUED = Position()
INIT, READY = QUEUED.to(State.INIT), QUEUED.to(State.INIT).to(State.READY)
RUN = READY.to(State.RUN)
EVAL = RUN.to(State.EVAL)


def _check(check: Check) -> Check:
    CHECKS.append(check)
    return check


def submission(rollout_id: str, run: str = "run", group: str | None = None, note: str = "") -> Submission:
    task = Task("shell", {"instruction": f"do {rollout_id}", "note": note})
    return Submission(Rollout(rollout_id, run, task, group=group), {"id": rollout_id, "note": note})


def trajectory(rollout_id: str, attempt: int = 1) -> Trajectory:
    """Two prompt tokens, three sampled ones."""
    trace = Trace(
        token_ids=ids_array([1, 2, 7, 8, 9]),
        mask=bytearray([0, 0, 1, 1, 1]),
        logprobs=logprobs_array([0, 0, -0.5, -1, -0.25]),
        versions=ids_array([-1, -1, 4, 4, 4]),
        spans=(Span(2, 5, 1, "stop", "digest"),),
        sampling=Sampling(),
        policy="default",
        model="m",
    )
    return Trajectory(rollout_id, attempt, (trace,), ({"role": "user", "content": "go"},), turns=1, ended_by="stop")


def completed(reward: float = 1.0) -> Ending:
    return Ending(Outcome.COMPLETED, Score(reward), is_trainable=True)


@asynccontextmanager
async def opened(
    open_store: Open, *, max_attempts: int = 3, is_forced: bool = False, keeps_leases: bool = False
) -> AsyncGenerator[Store, None]:
    """Opens the store and creates the run "run"."""
    store = await open_store(max_attempts=max_attempts, is_forced=is_forced, keeps_leases=keeps_leases)
    try:
        await store.put_run(Run("run"), {})
        yield store
    finally:
        await store.close()


async def advance(store: Store, rollout_id: str, to: State, attempt: int = 1) -> Position:
    """Moves a queued rollout up to a state. Awaits only the last write."""
    at = Position(State.QUEUED, attempt)
    for state in (State.INIT, State.READY, State.RUN):
        if at.state is to:
            return at
        moved = store.move(rollout_id, at, at.to(state))
        at = at.to(state)
        if state is to:
            await moved
    if to is State.EVAL:
        await store.save_run(rollout_id, at, trajectory(rollout_id, attempt), {"is_reevaluable": True})
        at = at.to(State.EVAL)
    return at


async def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Awaitable[object]) -> str:
    """Awaits a call that must raise `kind`, and returns the message."""
    try:
        await call
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was not raised")


async def ended_ids(store: Store, limit: int = 100, run: str | None = None) -> list[str]:
    """Returns the ids of all ended rollouts, read page by page."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = await store.list(state=State.ENDED, after=cursor, limit=limit, runs=None if run is None else [run])
        ids += [rollout.id for rollout in page.rollouts]
        if page.next_cursor is None:
            return ids
        cursor = page.next_cursor


# --- runs and submit ----------------------------------------------------------------------------------


@_check
async def runs_are_idempotent(open_store: Open) -> None:
    async with opened(open_store) as store:
        created = await store.put_run(Run("a", seed=7, priority=2), {"seed": 7})
        assert created == await store.put_run(Run("a", seed=7, priority=2, created_at=9.0), {"seed": 7})
        await raises(IdConflict, store.put_run(Run("a", seed=8), {"seed": 8}))
        assert await store.get_run("a") == created
        assert [run.id for run in await store.list_runs()] == ["run", "a"]
        await raises(NotFound, store.get_run("b"))
    async with opened(open_store) as store:
        assert await store.get_run("a") == created


@_check
async def a_submitted_rollout_survives_a_restart(open_store: Open) -> None:
    async with opened(open_store) as store:
        (new,) = await store.submit([submission("a", group="g")])
        assert (new.position, new.group, new.task.data["instruction"]) == (QUEUED, "g", "do a")
        assert await store.get("a") == new
    async with opened(open_store) as store:
        assert await store.get("a") == new
        assert [(row.id, row.attempt) for row in await store.queued()] == [("a", 1)]
        assert store.recovered.queued == 1
        await raises(NotFound, store.get("b"))


@_check
async def a_repeated_submit_is_the_same_rollout(open_store: Open) -> None:
    async with opened(open_store) as store:
        first = await store.submit([submission("a"), submission("b")])
        again = await store.submit([submission("b"), submission("c"), submission("a")])
        assert [again[2], again[0]] == list(first)
        assert [row.id for row in await store.queued()] == ["a", "b", "c"]
        at = await advance(store, "a", State.RUN)
        ended = await store.end("a", at, completed())
        assert list(await store.submit([submission("a")])) == [ended]


@_check
async def a_conflicting_submit_stores_nothing(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        await store.submit([submission("a")])
        await raises(IdConflict, store.submit([submission("b"), submission("a", note="other body")]))
        await raises(IdConflict, store.submit([submission("b"), submission("a", run="other")]))
        await raises(IdConflict, store.submit([submission("b"), submission("b")]))
        await raises(NotFound, store.submit([submission("b"), submission("c", run="unknown")]))
        assert [row.id for row in await store.queued()] == ["a"]


@_check
async def one_failing_call_does_not_fail_others_in_its_commit(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        good = asyncio.gather(*(store.submit([submission(f"n{i}")]) for i in range(20)))
        bad = asyncio.gather(
            *(store.submit([submission(f"x{i}"), submission("a", note="!")]) for i in range(20)), return_exceptions=True
        )
        more = asyncio.gather(*(store.submit([submission(f"m{i}")]) for i in range(20)))
        assert len(await good) == len(await more) == 20
        assert all(isinstance(result, IdConflict) for result in await bad)
        assert {row.id for row in await store.queued()} == {"a", *(f"{c}{i}" for c in "nm" for i in range(20))}


# --- moves and endings --------------------------------------------------------------------------------


@_check
async def a_rollout_moves_through_all_states(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        at = await advance(store, "a", State.EVAL)
        assert (await store.get("a")).position == EVAL
        saved = await store.saved_run("a")
        assert saved is not None and saved == (trajectory("a"), {"is_reevaluable": True})
        ended = await store.end("a", at, completed(0.5))
        assert ended == await store.get("a")
        assert ended.ending is not None and ended.ending.score == Score(0.5) and ended.ended_seq is not None
        assert await store.trajectory("a") == trajectory("a")
        assert await store.saved_run("a") == saved  # kept for rescoring
        await store.submit([submission("f")])
        final = replace(trajectory("f"), ended_by="later")
        await store.end("f", await advance(store, "f", State.EVAL), completed(), final)
        assert await store.saved_run("f") == (final, {"is_reevaluable": True})
        await store.submit([submission("b"), submission("c")])
        await store.end("b", QUEUED, completed(), trajectory("b"))
        assert await store.trajectory("b") == trajectory("b") and await store.saved_run("b") is None
        assert await store.trajectory("c") is None
        await raises(NotFound, store.trajectory("d"))


@_check
async def evidence_is_stored_with_the_end_and_deleted_with_the_trajectory(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a"), submission("b")])
        at = await advance(store, "a", State.EVAL)
        ended = await store.end("a", at, completed(), evidence=b'[{"kind": "check"}]')
        await store.end("b", QUEUED, completed(), trajectory("b"))
        assert await store.evidence("a") == b'[{"kind": "check"}]'
        assert await store.evidence("b") == b"" and await store.evidence("unknown") == b""
        await raises(Stale, store.end("a", at, completed(), evidence=b"[]"))
        assert await store.evidence("a") == b'[{"kind": "check"}]'
    async with opened(open_store) as store:
        assert await store.evidence("a") == b'[{"kind": "check"}]'
        assert await store.acknowledge(ended.run, f"e:{ended.ended_seq}") == 1
        assert await store.evidence("a") == b"" and (await store.get("a")).ending == ended.ending


@_check
async def a_move_from_another_state_is_stale(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        await raises(Stale, store.move("a", INIT, READY))
        await raises(Stale, store.move("unknown", QUEUED, INIT))
        await store.move("a", QUEUED, INIT)
        message = await raises(Stale, store.move("a", QUEUED, INIT))
        assert "init" in message
        await store.requeue("a", INIT, LostAttempt(1, "engine_unavailable", "", "init"))
        await raises(Stale, store.end("a", INIT, completed()))
        await raises(Stale, store.end("a", QUEUED, completed()))  # the right state, but the previous attempt
        assert (await store.get("a")).position == Position(State.QUEUED, 2)


@_check
async def a_lost_attempt_is_recorded(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        timings = Timings(queued_s=0.25, run_s=2.0)
        lost = [
            LostAttempt(1, "sandbox_lost", "gone", "eval", 3, timings=timings),
            LostAttempt(2, "drained", "", "run"),
        ]
        at = await advance(store, "a", State.EVAL)
        await store.requeue("a", at, lost[0])
        assert await store.trajectory("a") is None  # it belonged to the lost attempt
        at = await advance(store, "a", State.RUN, attempt=2)
        await store.requeue("a", at, lost[1], is_excused=True)
        rollout = await store.get("a")
        assert (rollout.position, rollout.lost, rollout.excused) == (Position(State.QUEUED, 3), tuple(lost), 1)


@_check
async def only_one_of_several_ends_is_stored(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        at = await advance(store, "a", State.RUN)
        results = await asyncio.gather(
            *(store.end("a", at, completed(i)) for i in range(10)),
            store.request_cancel("a", "?"),
            return_exceptions=True,
        )
        won = [result for result in results[:10] if isinstance(result, Rollout)]
        assert len(won) == 1 and sum(isinstance(result, Stale) for result in results) == 9
        assert (await store.get("a")).ending == won[0].ending
        assert await ended_ids(store) == ["a"]


@_check
async def later_scores_are_appended(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        await raises(Stale, store.add_score("a", {"reward": 0}))
        ended = await store.end("a", QUEUED, completed())
        await store.add_score("a", {"reward": 0.25, "at": {"nested": [1, None]}})
        again = await store.add_score("a", {"reward": 0.75})
        assert again.ending == ended.ending and again.ended_seq == ended.ended_seq
        assert again.scores == ({"reward": 0.25, "at": {"nested": [1, None]}}, {"reward": 0.75})
        await raises(NotFound, store.add_score("b", {}))


# --- cancelling ---------------------------------------------------------------------------------------


@_check
async def what_is_kept_of_rollouts_is_told(open_store: Open) -> None:
    async with opened(open_store) as store:
        assert await store.last_ended() == 0
        await store.submit([submission("a"), submission("b"), submission("c")])
        await store.end("a", await advance(store, "a", State.RUN), completed(), trajectory("a"))
        await store.end("b", await advance(store, "b", State.INIT), completed())
        kept = await store.kept(["c", "b", "a", "unknown"])
        assert {key: (one.ended_seq, one.has_trajectory) for key, one in kept.items()} == {
            "a": (1, True),
            "b": (2, False),
            "c": (None, False),
        }
        data = await store.encoded_trajectory("a", 1 << 20)
        assert data is not None and decode_trajectory(data) == trajectory("a")
        assert await store.encoded_trajectory("a", len(data)) == data
        assert await store.encoded_trajectory("a", len(data) - 1) is None, "it is larger"
        assert await store.encoded_trajectory("b", 1 << 20) is None
        assert await store.encoded_trajectory("unknown", 1 << 20) is None
        assert await store.last_ended() == 2
        await store.acknowledge("run", "e:2")
        assert not (await store.kept(["a"]))["a"].has_trajectory


def _is_cancelled(rollout: Rollout | None) -> bool:
    return rollout is not None and rollout.ending is not None and rollout.ending.outcome is Outcome.CANCELLED


@_check
async def a_cancel_before_its_submit_wins(open_store: Open) -> None:
    async with opened(open_store) as store:
        assert await store.request_cancel("a", "too late", run="run") is None
        assert await store.request_cancel("a", "again", run="run") is None
        assert await store.request_cancel("b", "of no run") is None
    async with opened(open_store) as store:
        (rollout, other) = await store.submit([submission("a"), submission("b")])
        assert _is_cancelled(rollout) and not _is_cancelled(other)
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert rollout.ending.failure.detail == "too late"
        assert list(await store.submit([submission("a")])) == [rollout]
        assert await ended_ids(store) == ["a"]


@_check
async def tombstones_are_deleted_with_their_run(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("swept"), {})
        assert await store.request_cancel("a", "too late", run="run") is None
        assert await store.request_cancel("b", "too late", run="swept") is None
        await store.delete_run("run")
        assert await store.request_cancel("c", "too late", run="run") is None
        assert (await store.sweep(Retention(0))).runs == ("swept",)
        await store.put_run(Run("run"), {})
        await store.put_run(Run("swept"), {})
        came = await store.submit([submission("a"), submission("b", run="swept"), submission("c")])
        assert not any(_is_cancelled(rollout) for rollout in came)


@_check
async def a_cancel_ends_queued_rollouts_and_marks_live_ones(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("q"), submission("l")])
        cancelled = await store.request_cancel("q", "no need")
        assert _is_cancelled(cancelled) and await store.request_cancel("q", "again") == cancelled
        await raises(Stale, store.move("q", QUEUED, INIT))
        at = await advance(store, "l", State.RUN)
        marked = await store.request_cancel("l", "no need")
        assert marked is not None and marked.is_cancel_requested and marked.position == at
        ended = await store.end("l", at, completed())  # it ended before the cancel; the pipeline decides
        assert await store.request_cancel("l", "again") == ended


@_check
async def many_rollouts_are_cancelled_in_one_call(open_store: Open) -> None:
    async with opened(open_store) as store:
        ids = [f"r{i:03}" for i in range(150)]
        await store.submit([submission(one) for one in ids])
        at = await advance(store, "r000", State.RUN)
        position = await advance(store, "r001", State.RUN)
        before = await store.end("r001", position, completed())
        assert set(await store.cancel_many([*ids, "unknown"], "no need")) == set(ids[2:])
        assert await store.cancel_many(ids, "again") == []
        marked = await store.get("r000")
        assert marked.is_cancel_requested and marked.position == at
        assert await store.get("r001") == before
        assert all(_is_cancelled(one) for one in await store.get_many(ids[2:]))
        (came,) = await store.submit([submission("unknown")])
        assert not _is_cancelled(came), "an unknown id must leave no tombstone"


@_check
async def tasks_are_stored_once_and_read_in_pages(open_store: Open) -> None:
    async with opened(open_store) as store:
        large = Task("shell", {"instruction": "x" * 6_000_000})
        await store.submit([Submission(Rollout(f"g-{i}", "run", large, group="g", index=i), {}) for i in range(7)])
        listed: list[str] = []
        after: str | None = None
        while True:
            page = await store.list(group="g", after=after, limit=1000)
            assert 0 < len(page.rollouts) < 7 and all(one.task == large for one in page.rollouts)
            listed += [one.id for one in page.rollouts]
            after = page.next_cursor
            if after is None:
                break
        assert listed == [f"g-{i}" for i in range(7)]
        assert [one.id for one in await store.get_many(listed)] == listed


@_check
async def a_run_being_deleted_accepts_and_starts_nothing(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("old"), {})
        await store.submit([submission("a", run="old"), submission("b", run="old"), submission("other")])
        await raises(NotFound, store.begin_deletion("unknown"))
        await store.begin_deletion("old")
        await raises(NotFound, store.submit([submission("c", run="old")]))
        draw = Draw("d", "old", DrawConfig(SourceSpec(SourceKind.TASKS, size=1)))
        await raises(NotFound, store.put_draw(draw, {}))
        await raises(IdConflict, store.put_run(Run("old"), {}))
    async with opened(open_store) as store:
        assert list(await store.deleting_runs()) == ["old"]
        assert [row.id for row in await store.queued()] == ["other"]
        assert sorted(await store.queued_of("old", 10)) == ["a", "b"] and await store.count_of_run("old") == 2
        await store.cancel_many(["a", "b"], "")
        await store.delete_run("old")
        assert list(await store.deleting_runs()) == []
        await store.put_run(Run("old"), {})
        await store.submit([submission("a", run="old")])


@_check
async def a_cancel_racing_with_a_start_yields_one_end(open_store: Open) -> None:
    async with opened(open_store) as store:
        ids = [f"r{i}" for i in range(40)]
        await store.submit([submission(rollout_id) for rollout_id in ids])

        async def start(rollout_id: str) -> bool:
            try:
                await store.move(rollout_id, QUEUED, INIT)
            except Stale:
                return False
            return True

        calls: list[Awaitable[object]] = []
        for number, rollout_id in enumerate(ids):
            pair = [start(rollout_id), store.request_cancel(rollout_id, "")]
            calls += pair if number % 2 else reversed(pair)
        await asyncio.gather(*calls)
        for rollout_id in ids:
            rollout = await store.get(rollout_id)
            assert rollout.is_cancel_requested
            assert _is_cancelled(rollout) or rollout.position == INIT


# --- restarts -----------------------------------------------------------------------------------------


@_check
async def a_restart_requeues_live_rollouts(open_store: Open) -> None:
    states = [State.INIT, State.READY, State.RUN]
    async with opened(open_store) as store:
        await store.submit([submission(state) for state in (*states, State.QUEUED)])
        for state in states:
            await advance(store, state, state)
        epoch = store.epoch
    async with opened(open_store) as store:
        assert store.epoch == epoch + 1
        assert (store.recovered.requeued, store.recovered.queued, store.recovered.failed) == (3, 1, 0)
        for state in states:
            rollout = await store.get(state)
            assert rollout.position == Position(State.QUEUED, 2)
            assert [(lost.attempt, lost.code, lost.stage) for lost in rollout.lost] == [(1, "server_restarted", state)]
        assert len(await store.queued()) == 4


@_check
async def a_restart_fails_rollouts_without_attempts_left(open_store: Open) -> None:
    async with opened(open_store, max_attempts=2) as store:
        await store.submit([submission("a"), submission("excused")])
        await advance(store, "a", State.RUN)
        at = await advance(store, "excused", State.RUN)
        await store.requeue("excused", at, LostAttempt(1, "drained", ""), is_excused=True)
        await advance(store, "excused", State.RUN, attempt=2)
    async with opened(open_store, max_attempts=2) as store:
        assert (store.recovered.requeued, store.recovered.failed) == (2, 0)
        await advance(store, "a", State.INIT, attempt=2)
        await advance(store, "excused", State.INIT, attempt=3)
    async with opened(open_store, max_attempts=2) as store:
        assert (store.recovered.requeued, store.recovered.failed) == (0, 2)
        for rollout_id, attempt in (("a", 2), ("excused", 3)):
            rollout = await store.get(rollout_id)
            assert rollout.position == Position(State.ENDED, attempt)
            assert rollout.ending is not None and rollout.ending.failure is not None
            assert rollout.ending.failure.code == "lost_to_restarts" and rollout.ending.failure.blame == "infra"
            assert rollout.ending.score is None and not rollout.ending.is_trainable
        assert await ended_ids(store) == ["a", "excused"]


@_check
async def a_restart_repeats_an_interrupted_evaluation(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("fresh"), submission("same")])
        await advance(store, "fresh", State.EVAL)
        await store.save_run("same", await advance(store, "same", State.RUN), trajectory("same"), {})
    async with opened(open_store) as store:
        assert store.recovered.evals == ("fresh",) and store.recovered.requeued == 1
        assert (await store.get("fresh")).position == EVAL
        assert await store.saved_run("fresh") == (trajectory("fresh"), {"is_reevaluable": True})
        same = await store.get("same")
        assert same.position == Position(State.QUEUED, 2) and same.lost[0].tokens_lost == 3
        assert await store.saved_run("same") is None
        await store.end("fresh", EVAL, completed())


@_check
async def an_evaluation_that_repeatedly_kills_the_service_fails(open_store: Open) -> None:
    async with opened(open_store, max_attempts=2) as store:
        await store.submit([submission("a")])
        await advance(store, "a", State.EVAL)
    for _ in range(2):
        async with opened(open_store, max_attempts=2) as store:
            assert store.recovered.evals == ("a",)
    async with opened(open_store, max_attempts=2) as store:
        assert store.recovered.evals == () and store.recovered.failed == 1
        rollout = await store.get("a")
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert rollout.ending.failure.code == "lost_to_restarts"


@_check
async def a_restart_completes_pending_cancels(open_store: Open) -> None:
    states = [State.INIT, State.READY, State.RUN, State.EVAL]
    async with opened(open_store) as store:
        await store.submit([submission(state) for state in states])
        for state in states:
            await advance(store, state, state)
            await store.request_cancel(state, "enough")
            await store.request_cancel(state, "again")
    async with opened(open_store) as store:
        assert (store.recovered.cancelled, store.recovered.requeued, store.recovered.evals) == (4, 0, ())
        for state in states:
            rollout = await store.get(state)
            assert _is_cancelled(rollout) and rollout.ending is not None and rollout.ending.failure is not None
            assert (rollout.ending.failure.detail, rollout.ending.failure.stage) == ("enough", state)


@_check
async def only_one_process_can_open_a_store(open_store: Open) -> None:
    async with opened(open_store):
        await raises(StoreLocked, open_store())
    async with opened(open_store):
        pass


@_check
async def a_server_that_lost_its_lock_writes_nothing(open_store: Open) -> None:
    async with opened(open_store) as old:
        await old.submit([submission("a")])
        await advance(old, "a", State.RUN)
        async with opened(open_store, is_forced=True) as new:
            assert new.epoch == old.epoch + 1
            await raises((Stale, StoreUnusable), old.end("a", RUN, completed()))
            await raises(StoreUnusable, old.submit([submission("b")]))
            await raises(StoreUnusable, old.get("a"))
            assert (await new.get("a")).position == Position(State.QUEUED, 2)
            assert await ended_ids(new) == []


# --- listing ------------------------------------------------------------------------------------------


@_check
async def the_terminal_order_is_the_order_of_commits(open_store: Open) -> None:
    ids = [f"r{i:03}" for i in range(120)]
    async with opened(open_store) as store:
        await store.submit([submission(rollout_id) for rollout_id in ids])
        listed: list[str] = []
        cursor: str | None = None

        async def watch() -> None:
            nonlocal cursor
            while len(listed) < len(ids):
                page = await store.list(state=State.ENDED, after=cursor, limit=7)
                listed.extend(rollout.id for rollout in page.rollouts)
                cursor = page.next_cursor or cursor
                await asyncio.sleep(0)

        async def finish(rollout_id: str) -> int:
            ended = await store.end(rollout_id, await advance(store, rollout_id, State.INIT), completed())
            assert ended.ended_seq is not None
            return ended.ended_seq

        _, *numbers = await asyncio.gather(watch(), *(finish(rollout_id) for rollout_id in ids))
        # Read while rollouts ended: none was missed or duplicated, and a later listing is the same.
        by_number = [rollout_id for _, rollout_id in sorted(zip(numbers, ids, strict=True))]
        assert len(set(numbers)) == len(ids) and listed == by_number == await ended_ids(store)
        assert (await store.list(state=State.ENDED, after=cursor)).next_cursor is None


@_check
async def listings_are_filtered_and_paged(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        await store.submit([submission(f"a{i}", group=f"g{i % 2}") for i in range(5)])
        await store.submit([submission(f"b{i}", run="other") for i in range(3)])
        await store.end("a3", QUEUED, completed())
        await store.end("b0", QUEUED, completed())
        await advance(store, "a2", State.RUN)
        await store.end("a1", QUEUED, completed())

        async def ids(**filters: object) -> list[str]:
            listed: list[str] = []
            cursor = None
            while True:
                page = await store.list(after=cursor, limit=2, **filters)  # type: ignore[arg-type]
                listed += [rollout.id for rollout in page.rollouts]
                if (cursor := page.next_cursor) is None:
                    return listed

        assert await ids() == ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2"]
        assert await ids(state=State.QUEUED) == ["a0", "a4", "b1", "b2"]
        assert await ids(state=State.QUEUED, runs=["other"]) == ["b1", "b2"]
        assert await ids(group="g1") == ["a1", "a3"]
        assert await ids(state=State.ENDED) == ["a3", "b0", "a1"]
        assert await ids(state=State.ENDED, runs=["other"]) == ["b0"]
        assert await ids(state=State.ENDED, group="g0") == []
        assert await ids(state=State.ENDED, group="g1") == ["a3", "a1"]
        assert await ids(is_newest_first=True) == ["b2", "b1", "b0", "a4", "a3", "a2", "a1", "a0"]
        assert await ids(is_newest_first=True, state=State.ENDED) == ["a1", "b0", "a3"]
        assert await ids(is_newest_first=True, state=State.QUEUED, runs=["other"]) == ["b2", "b1"]
        counts = dict(await store.counts())
        assert counts == {"queued": 4, "init": 0, "ready": 0, "run": 1, "eval": 0, "ended": 3}


@_check
async def an_invalid_cursor_or_limit_is_refused(open_store: Open) -> None:
    async with opened(open_store) as store:
        for state, cursor in ((State.ENDED, "s:1"), (None, "e:1"), (State.ENDED, "e:-1"), (None, "s:x"), (None, "")):
            await raises(InvalidRequest, store.list(state=state, after=cursor))
        for limit in (0, -1, 1_000_000):
            await raises(InvalidRequest, store.list(limit=limit))
        for cursor in ("s:0", "nonsense", "e:1"):  # the last is beyond every ended rollout
            await raises(InvalidRequest, store.acknowledge("run", cursor))


# --- retention ----------------------------------------------------------------------------------------


async def _end_all(store: Store, ids: Sequence[str], run: str = "run") -> list[Rollout]:
    await store.submit([submission(rollout_id, run=run) for rollout_id in ids])
    return [await store.end(rollout_id, QUEUED, completed(), trajectory(rollout_id)) for rollout_id in ids]


@_check
async def acknowledged_rollouts_lose_their_trajectories(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        ended = await _end_all(store, [f"r{i:03}" for i in range(130)])
        await _end_all(store, ["theirs"], run="other")
        cursor = f"e:{ended[119].ended_seq}"
        assert await store.acknowledge("run", cursor) == 120
        assert await store.acknowledge("run", cursor) == 0
        assert await store.trajectory("r119") is None and await store.get("r119") == ended[119]
        assert await store.trajectory("r120") is not None and await store.trajectory("theirs") is not None
        assert set((await store.sweep(Retention(3600))).rollouts) == {f"r{i:03}" for i in range(120)}
        assert await store.sweep(Retention(3600)) == SweepResult()
        await raises(NotFound, store.acknowledge("unknown", cursor))


@_check
async def a_sweep_deletes_expired_rollouts(open_store: Open) -> None:
    async with opened(open_store) as store:
        await _end_all(store, [f"r{i:03}" for i in range(130)])
        await store.submit([submission("queued")])
        await store.request_cancel("never came", "", run="run")
        before = (await store.list(state=State.ENDED, limit=1000)).next_cursor
        assert await store.sweep(Retention(3600)) == SweepResult()
        assert len((await store.sweep(Retention(0))).rollouts) == 130
    async with opened(open_store) as store:
        assert len((await store.sweep(Retention(0))).rollouts) == 130  # their deletion was not confirmed: listed again
        assert await store.sweep(Retention(0)) == SweepResult()
        assert (await store.counts())["ended"] == 0 and (await store.get("queued")).position == QUEUED
        (came,) = await store.submit([submission("never came")])
        assert not _is_cancelled(came)  # its tombstone had expired
        ended = await store.end("queued", QUEUED, completed())
        assert before is not None and ended.ended_seq is not None and ended.ended_seq > int(before[2:])


@_check
async def deleting_a_run_deletes_its_rollouts(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.put_run(Run("other"), {})
        await _end_all(store, [f"r{i:03}" for i in range(130)])
        await store.submit([submission("live"), submission("theirs", run="other")])
        await raises(Stale, store.delete_run("run"))
        await raises(NotFound, store.delete_run("unknown"))
        assert (await store.counts())["ended"] == 130
        await store.request_cancel("live", "")
        await store.delete_run("run")
        await raises(NotFound, store.get_run("run"))
        assert [rollout.id for rollout in (await store.list()).rollouts] == ["theirs"]
        await store.put_run(Run("run"), {})
        (again,) = await store.submit([submission("r000")])
        assert again.position == QUEUED
        leavings = (await store.sweep(Retention(3600))).rollouts
        assert len(leavings) == 130 and "r000" not in leavings  # the id is in use again: its files stay
        await store.submit([submission("r001")])
        assert list(await store.leavings_among(["r001", "r002", "unknown"])) == ["r002"]
        await store.forget_leavings(leavings)
        await store.submit([submission("r002")])
        for name in ("r000", "r001", "r002"):  # with other files, and deleted again before the next sweep
            await store.request_cancel(name, "")
        await store.delete_run("run")
        assert set((await store.sweep(Retention(3600))).rollouts) == {"r000", "r001", "r002"}


@_check
async def engines_are_stored(open_store: Open) -> None:
    first = EngineSpec("e1", "http://127.0.0.1:1", Kind.VLLM, policy="actor", api_key="secret")
    async with opened(open_store) as store:
        await store.put_engine(first)
        await store.put_engine(replace(first, id="e2"))
        await store.put_engine(replace(first, capacity=7))
        await store.delete_engine("e2")
        await store.delete_engine("never there")
    async with opened(open_store) as store:
        assert list(await store.engines()) == [replace(first, capacity=7)]
