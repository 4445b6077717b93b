"""Conformance checks of stores for rollouts leased to nodes. They are run like those of `store_conformance`."""

from __future__ import annotations

import asyncio

from rollyard.core import LostAttempt, Outcome, Position, State
from rollyard.store.base import EncodedTrajectory, LeasedRow, Stale, Store
from rollyard.store.codec import CorruptRecord, encode_trajectory
from rollyard.testing.store_conformance import (
    EVAL,
    INIT,
    QUEUED,
    READY,
    RUN,
    Check,
    Open,
    advance,
    completed,
    ended_ids,
    opened,
    raises,
    submission,
    trajectory,
)

LEASE_CHECKS: list[Check] = []
"""Every check, in the order of this file."""

RETURNED = LostAttempt(1, "node_lost", "the node sent nothing", "init")


def _check(check: Check) -> Check:
    LEASE_CHECKS.append(check)
    return check


async def leased(
    store: Store,
    rollout_id: str,
    to: State = State.INIT,
    node: str = "n1",
    attempt: int = 1,
    *,
    is_reevaluable: bool = False,
) -> Position:
    """Leases a queued rollout and moves it up to a state. Saves the result of RUN before EVAL."""
    assert list(await store.lease([(rollout_id, attempt, node)])) == [rollout_id]
    at = Position(State.INIT, attempt)
    for state in (State.READY, State.RUN):
        if at.state is to:
            return at
        await store.move(rollout_id, at, at.to(state))
        at = at.to(state)
    if to is State.EVAL:
        await store.save_run(rollout_id, at, trajectory(rollout_id, attempt), {"is_reevaluable": is_reevaluable})
        at = at.to(State.EVAL)
    return at


@_check
async def a_lease_takes_queued_rollouts_with_a_matching_attempt(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission(rollout_id) for rollout_id in "abcde"])
        await store.request_cancel("b", "")
        await advance(store, "c", State.INIT)
        requests = [("e", 1, "n1"), ("b", 1, "n1"), ("c", 1, "n1"), ("d", 2, "n1"), ("x", 1, "n1"), ("a", 1, "n2")]
        assert list(await store.lease(requests)) == ["e", "a"]
        assert list(await store.lease(requests)) == []
        assert list(await store.lease([])) == []
        assert [(await store.get(rollout_id)).position for rollout_id in "ae"] == [INIT, INIT]
        assert [row.id for row in await store.queued()] == ["d"]
        assert list(await store.lease([("d", 1, "n1"), ("d", 1, "n2")])) == ["d"]  # once, however often it is requested
    async with opened(open_store, keeps_leases=True) as store:
        assert [(one.id, one.node) for one in store.recovered.leased] == [("a", "n2"), ("d", "n1"), ("e", "n1")]


@_check
async def a_rollout_is_leased_once(open_store: Open) -> None:
    async with opened(open_store) as store:
        ids = [f"r{i}" for i in range(60)]
        await store.submit([submission(rollout_id) for rollout_id in ids])
        answers = await asyncio.gather(
            *(store.lease([(rollout_id, 1, f"n{node}") for rollout_id in ids[node:]]) for node in range(8))
        )
        assert sorted(rollout_id for answer in answers for rollout_id in answer) == sorted(ids)


@_check
async def a_result_is_stored_as_encoded(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a"), submission("b")])
        await leased(store, "b")
        at = await leased(store, "a", State.EVAL)
        encoded = EncodedTrajectory(bytes(encode_trajectory(trajectory("a"))), 3)
        ended = await store.end("a", at, completed(0.5), encoded)
        assert ended.state is State.ENDED and await store.trajectory("a") == trajectory("a")
        await raises(CorruptRecord, store.end("b", INIT, completed(), EncodedTrajectory(b"no trajectory", 0)))
        assert (await store.get("b")).position == INIT


@_check
async def a_result_of_a_returned_attempt_is_stale(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a")])
        at = await leased(store, "a", State.RUN)
        await store.requeue("a", at, RETURNED)
        await leased(store, "a", State.RUN, "n2", attempt=2)
        await raises(Stale, store.end("a", at, completed(), trajectory("a")))
        await raises(Stale, store.save_run("a", at, trajectory("a"), {}))
        assert list(await store.lease([("a", 1, "n1")])) == []
        again = await store.get("a")
        assert (again.position, again.lost) == (Position(State.RUN, 2), (RETURNED,))
        assert await store.trajectory("a") is None
        await store.end("a", Position(State.RUN, 2), completed())


@_check
async def leases_survive_a_restart_of_the_head(open_store: Open) -> None:
    states = [State.INIT, State.READY, State.RUN, State.EVAL]
    async with opened(open_store) as store:
        await store.submit([submission(name) for name in (*states, "here", "queued", "back", "ended", "unwanted")])
        for state in states:
            await leased(store, state, state, f"n-{state}")
        await advance(store, "here", State.RUN)
        await store.requeue("back", await leased(store, "back"), RETURNED)
        await store.end("ended", await leased(store, "ended"), completed())
        await leased(store, "unwanted", State.RUN)
        await store.request_cancel("unwanted", "enough")
    for _ in range(2):  # opening again changes nothing
        async with opened(open_store, max_attempts=1, keeps_leases=True) as store:
            assert store.recovered.leased == tuple(LeasedRow(state, 1, f"n-{state}", state) for state in states)
            assert store.recovered.evals == ()
            assert [(await store.get(state)).position for state in states] == [INIT, READY, RUN, EVAL]
            assert (await store.get("unwanted")).state is State.ENDED
    async with opened(open_store, keeps_leases=True) as store:
        await store.end(State.EVAL, EVAL, completed(), trajectory(State.EVAL))
        await store.requeue(State.RUN, RUN, RETURNED)
    async with opened(open_store, keeps_leases=True) as store:
        assert [one.id for one in store.recovered.leased] == [State.INIT, State.READY]
        assert await ended_ids(store) == ["ended", "unwanted", "here", "eval"]


@_check
async def opening_without_leases_returns_leased_rollouts(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("run"), submission("eval")])
        await leased(store, "run", State.RUN)
        await leased(store, "eval", State.EVAL)
    async with opened(open_store) as store:
        assert (store.recovered.requeued, store.recovered.leased, store.recovered.evals) == (2, (), ())
        for rollout_id in ("run", "eval"):
            assert (await store.get(rollout_id)).position == Position(State.QUEUED, 2)
    async with opened(open_store, keeps_leases=True) as store:
        assert store.recovered.leased == ()
        await leased(store, "run", attempt=2)
        await store.request_cancel("run", "enough")
    async with opened(open_store, keeps_leases=True) as store:
        ending = (await store.get("run")).ending
        assert store.recovered.cancelled == 1 and ending is not None and ending.outcome is Outcome.CANCELLED


@_check
async def opening_without_leases_evaluates_saved_runs_locally(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission("a"), submission("b")])
        await leased(store, "a", State.EVAL, is_reevaluable=True)
        await leased(store, "b", State.EVAL, is_reevaluable=False)
    async with opened(open_store, keeps_leases=True) as store:  # still leased, whatever was saved
        assert store.recovered.leased == (LeasedRow("a", 1, "n1", State.EVAL), LeasedRow("b", 1, "n1", State.EVAL))
        assert store.recovered.evals == () and (await store.get("a")).position == EVAL
        assert await store.saved_run("a") == (trajectory("a"), {"is_reevaluable": True})
    async with opened(open_store) as store:
        assert (store.recovered.evals, store.recovered.requeued, store.recovered.leased) == (("a",), 1, ())
        assert await store.saved_run("a") == (trajectory("a"), {"is_reevaluable": True})
        assert [(await store.get(one)).position for one in "ab"] == [EVAL, Position(State.QUEUED, 2)]
    async with opened(open_store, keeps_leases=True) as store:  # it is no longer leased to a node
        assert (store.recovered.evals, store.recovered.leased) == (("a",), ())
        assert (await store.end("a", EVAL, completed())).state is State.ENDED


@_check
async def many_rollouts_are_read_in_the_requested_order(open_store: Open) -> None:
    async with opened(open_store) as store:
        await store.submit([submission(rollout_id) for rollout_id in ("a", "b", 'q"uote', "ü")])
        await store.end("b", QUEUED, completed(0.1))
        ids = ["ü", "unknown", "b", 'q"uote', "b"]
        rollouts = await store.get_many(ids)
        assert list(rollouts) == [await store.get(rollout_id) for rollout_id in ids if rollout_id != "unknown"]
        assert list(await store.get_many([])) == []
