"""Slots: bounded, ranked, resizable while in use."""

import asyncio

import pytest

from rollyard.pipeline.worker_pool import WorkerPool


async def hold(pool: WorkerPool, rank: tuple[int, int], order: list[tuple[int, int]], gate: asyncio.Event) -> None:
    async with pool.slot(rank):
        order.append(rank)
        await gate.wait()


async def test_never_more_holders_than_slots_and_the_best_rank_first():
    pool, gate, order = WorkerPool("run", 1), asyncio.Event(), []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(pool, (0, 0), order, gate))
        await asyncio.sleep(0)
        for rank in [(0, 5), (-1, 9), (0, 2)]:
            tasks.create_task(hold(pool, rank, order, gate))
        await asyncio.sleep(0)
        assert (pool.active, pool.waiting, pool.free) == (1, 3, 0)
        gate.set()
    assert order == [(0, 0), (-1, 9), (0, 2), (0, 5)]
    assert pool.active == 0


async def test_growing_admits_waiters_and_shrinking_interrupts_no_holder():
    pool, gate, order = WorkerPool("run", 0), asyncio.Event(), []
    async with asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(hold(pool, (0, number), order, gate))
        await asyncio.sleep(0)
        assert order == []
        pool.resize(2)
        await asyncio.sleep(0)
        assert len(order) == 2
        pool.resize(1)
        assert pool.active == 2
        assert pool.free == 0
        gate.set()
    assert len(order) == 3
    with pytest.raises(ValueError):
        pool.resize(-1)


async def test_a_slot_granted_to_a_cancelled_waiter_goes_to_the_next():
    pool, gate, order = WorkerPool("run", 1), asyncio.Event(), []
    await pool.acquire()
    first = asyncio.create_task(hold(pool, (0, 1), order, gate))
    second = asyncio.create_task(hold(pool, (0, 2), order, gate))
    await asyncio.sleep(0)
    pool.release()  # granted to the first, which is cancelled before it runs
    first.cancel()
    gate.set()
    await asyncio.gather(first, second, return_exceptions=True)
    assert order == [(0, 2)]
    assert pool.active == 0


async def test_a_newcomer_does_not_overtake_a_waiter():
    pool, gate, order = WorkerPool("run", 1), asyncio.Event(), []
    await pool.acquire()
    waiting = asyncio.create_task(hold(pool, (0, 1), order, gate))
    await asyncio.sleep(0)
    pool.release()
    late = asyncio.create_task(hold(pool, (0, 0), order, gate))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(waiting, late)
    assert order == [(0, 1), (0, 0)]
