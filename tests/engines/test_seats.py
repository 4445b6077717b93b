"""The seats of a policy: never more than the bound, granted by rank, and always released."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.core import Sampling
from rollyard.core.engine import Admission
from rollyard.engines import GenerateRequest, Health, Router
from rollyard.engines.clients.load import EngineLoad
from rollyard.engines.pool.admission import CapRules
from rollyard.engines.pool.seats import Seat, Seats
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import QUICK, routed, spec_of

MOVES = st.lists(
    st.tuples(st.sampled_from(["take", "leave", "cancel", "bound", "open"]), st.integers(0, 4)), max_size=80
)


@given(MOVES)
@settings(max_examples=60)
async def test_no_rollout_waits_while_a_seat_is_free_or_enters_without_one(moves: list[tuple[str, int]]) -> None:
    seats = Seats()
    seats.set_bound(2)
    acquired: list[Seat] = []
    waiting: list[asyncio.Task[None]] = []

    async def take(rank: int) -> None:
        seat = await seats.acquire((rank, 0))
        acquired.append(seat)

    for move, number in moves:
        taken = seats.taken
        if move == "take":
            waiting.append(asyncio.create_task(take(number)))
        elif move == "leave" and acquired:
            seat = acquired.pop(0)
            seat.close()
            seat.close()
        elif move == "cancel" and waiting:
            waiting[number % len(waiting)].cancel()
        elif move == "bound":
            seats.set_bound(number)
        elif move == "open":
            seats.set_bound(None)
        await _quiet()
        waiting = [task for task in waiting if not task.done()]
        assert seats.taken == len(acquired) and seats.waiting == len(waiting)
        assert seats.bound is None or seats.taken <= max(taken, seats.bound)
        assert not (seats.waiting and seats.free != 0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for seat in acquired:
        seat.close()
    assert (seats.taken, seats.waiting) == (0, 0)


async def _quiet() -> None:
    for _ in range(4):  # loop iterations for a task to start, to wait and to be woken
        await asyncio.sleep(0)


async def test_the_lowest_rank_goes_first() -> None:
    seats = Seats()
    seats.set_bound(1)
    seat = await seats.acquire()
    order: list[int] = []

    async def take(rank: tuple[int, int]) -> None:
        mine = await seats.acquire(rank)
        order.append(rank[1])
        mine.close()

    async with asyncio.TaskGroup() as group:
        for rank in ((0, 1), (0, 2), (-5, 3), (0, 0)):
            group.create_task(take(rank))
        await _quiet()
        seat.close()
    assert order == [3, 0, 1, 2]


async def test_a_seat_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    seats = Seats()
    seats.set_bound(1)
    seat = await seats.acquire()
    first, second = (asyncio.create_task(seats.acquire((number, 0))) for number in (1, 2))
    await _quiet()
    seat.close()
    first.cancel()
    assert (await second) is not None and first.cancelled()
    assert (seats.taken, seats.waiting) == (1, 0)


# --- of a pool ------------------------------------------------------------------------------------------


async def test_the_seats_are_the_sum_of_the_caps_of_the_engines_that_are_up() -> None:
    async with ScriptedEngine() as server, routed() as router:
        seats = router.seats("default")
        assert seats.free is None  # no engine: sessions wait for one later
        for name, capacity in (("e1", 3), ("e2", 5)):
            await router.add(spec_of(server, name, capacity=capacity, admission=Admission.FIXED))
        assert seats.bound == 8
        pool = router.pool("default")
        pool.members["e1"].set_health(Health.DOWN)
        assert seats.bound == 5
        pool.members["e2"].set_health(Health.DOWN)
        assert seats.bound == 8  # no engine is up: all count
        await router.add(spec_of(server, "e3"))
        assert seats.bound is None  # it reports no load
        await router.clear()
        assert seats.bound is None


async def test_an_engine_below_its_cap_is_preferred_to_a_full_one() -> None:
    async with ScriptedEngine() as server, routed() as router:
        await router.add(spec_of(server, "small", capacity=1, admission=Admission.FIXED))
        await router.add(spec_of(server, "large", capacity=256))  # no cap
        sessions = [await router.open_session("default", f"s{number}") for number in range(300)]
        engines = [session.engine.spec.id for session in sessions]
        assert engines.count("small") == 1  # although its share of the sessions would be larger
        for session in sessions:
            await session.close()


async def test_the_watch_adjusts_the_cap_to_the_reported_load() -> None:
    rules = CapRules(start=4, settle_s=0.0)
    server = ScriptedEngine()
    server.kv_use = 0.1
    async with server, routed(server, settings=replace(QUICK, cap_rules=rules)) as router:
        seats = router.seats("default")
        assert seats.bound == 4  # before its first session
        server.latency_s = 60.0
        acquired = [await seats.acquire() for _ in range(4)]
        waiter = asyncio.create_task(seats.acquire())
        member = router.pool("default").members["e1"]
        for _ in range(4):
            member.seat()
        call = asyncio.create_task(_call(router))  # so that a request runs
        await server.busy()
        acquired.append(await asyncio.wait_for(waiter, 10))
        assert seats.bound is not None and seats.bound > 4
        server.preemptions += 1
        while seats.bound > 4:
            await asyncio.sleep(0.01)
            server.preemptions += 1
        (status,) = router.list()
        assert status.cap == seats.bound and status.load is not None and isinstance(status.load, EngineLoad)
        assert seats.taken == 5  # no holder is evicted
        call.cancel()
        await asyncio.wait({call})
        for seat in acquired:
            seat.close()
        for _ in range(4):
            member.unseat()


async def _call(router: Router) -> None:
    await router.engine("e1").generate(GenerateRequest("r", (1, 2, 3), Sampling(), max_tokens=5, session_id="s"))
