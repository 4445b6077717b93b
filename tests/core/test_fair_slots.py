"""Slots that waiting owners get in turn."""

import asyncio

import pytest

from rollyard.core.fair_slots import FairSlots


async def all_wait() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_owners_take_turns_and_each_is_served_in_order():
    slots, order = FairSlots(1), list[str]()

    async def work(name: str) -> None:
        await slots.acquire(name[0])
        order.append(name)
        await asyncio.sleep(0)
        slots.release()

    await asyncio.gather(*map(work, ("a1", "a2", "a3", "b1", "c1", "b2")))
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_no_more_than_the_slots_are_taken_and_none_stays_free():
    slots, taken, most = FairSlots(3), 0, 0

    async def work(number: int) -> None:
        nonlocal taken, most
        await slots.acquire(str(number % 4))
        taken += 1
        most = max(most, taken)
        await asyncio.sleep(0)
        taken -= 1
        slots.release()

    await asyncio.gather(*map(work, range(50)))
    assert (taken, most) == (0, 3)


async def test_a_waiter_that_gave_up_costs_its_owner_no_turn():
    slots, order = FairSlots(1), list[str]()
    await slots.acquire("z")

    async def work(name: str) -> None:
        await slots.acquire(name[0])
        order.append(name)
        slots.release()

    gone, *others = [asyncio.create_task(work(name)) for name in ("a0", "a1", "b1", "b2")]
    await all_wait()
    gone.cancel()
    await asyncio.wait([gone])
    slots.release()
    await asyncio.gather(*others)
    assert order == ["a1", "b1", "b2"]


@pytest.mark.parametrize("is_granted", [False, True], ids=["waiting", "just granted"])
async def test_a_cancelled_waiter_leaves_its_slot_to_the_next(is_granted: bool):
    slots = FairSlots(1)
    await slots.acquire("a")
    first, second = (asyncio.create_task(slots.acquire("b")) for _ in range(2))
    await all_wait()
    if is_granted:
        slots.release()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    if not is_granted:
        slots.release()
    await asyncio.wait_for(second, 60)
    slots.release()
    await asyncio.wait_for(slots.acquire("c"), 60)
