"""A deadline counts only working time."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollyard.core import Deadline, DeadlineExpired
from rollyard.core.deadline import ResettableTimeout


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_only_time_inside_counting_counts():
    clock = Clock()
    deadline = Deadline(10, clock)
    clock.now += 50
    async with deadline.counting():
        clock.now += 3
    clock.now += 50
    assert deadline.used_s == 3
    assert deadline.remaining_s == 7


async def test_held_time_does_not_count():
    clock = Clock()
    deadline = Deadline(10, clock)
    async with deadline.counting():
        clock.now += 1
        with deadline.held():
            assert not deadline.is_running
            clock.now += 100
        assert deadline.is_running
        clock.now += 1
    assert deadline.used_s == 2


async def test_parallel_work_counts_once():
    clock = Clock()
    deadline = Deadline(10, clock)
    async with deadline.counting(), deadline.counting():
        clock.now += 4
    assert deadline.used_s == 4


async def test_the_body_is_cancelled_when_the_budget_is_used_up():
    deadline = Deadline(0.01)
    with pytest.raises(DeadlineExpired):
        async with deadline.counting():
            await asyncio.Event().wait()
    assert deadline.is_expired
    with pytest.raises(DeadlineExpired):
        async with deadline.counting():
            pytest.fail("an expired deadline must not run the body")


async def test_a_hold_stops_the_timer_and_its_end_starts_it_again():
    deadline = Deadline(0.02)
    reached = False
    with pytest.raises(DeadlineExpired):
        async with deadline.counting():
            with deadline.held():
                await asyncio.sleep(0.06)
            reached = True
            await asyncio.Event().wait()
    assert reached


async def test_a_cancellation_from_elsewhere_passes_through():
    deadline = Deadline(60)

    async def work() -> None:
        async with deadline.counting():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_inside_is_not_mistaken_for_the_deadline():
    deadline = Deadline(60)
    with pytest.raises(TimeoutError):
        async with deadline.counting(), asyncio.timeout(0.001):
            await asyncio.Event().wait()


async def test_a_deadline_without_a_budget_is_a_stopwatch():
    clock = Clock()
    deadline = Deadline(None, clock)
    async with deadline.counting():
        clock.now += 1e6
    assert deadline.used_s == 1e6
    assert deadline.remaining_s is None
    assert not deadline.is_expired


async def test_an_alarm_calls_once_when_the_budget_is_used_up():
    deadline, rung = Deadline(0.02), asyncio.Event()
    alarm = deadline.alarm(rung.set)
    alarm.start()
    await asyncio.wait_for(rung.wait(), 5)
    assert alarm.is_expired and deadline.is_expired
    alarm.stop()
    alarm.stop()
    assert not deadline.is_running


async def test_a_stopped_alarm_does_not_fire_but_its_time_counts():
    deadline, rung = Deadline(0.05), asyncio.Event()
    alarm = deadline.alarm(rung.set)
    alarm.start()
    await asyncio.sleep(0.01)
    alarm.stop()
    used_s = deadline.used_s
    assert used_s > 0
    await asyncio.sleep(0.06)
    assert not rung.is_set() and deadline.used_s == used_s


async def test_an_alarm_does_not_count_while_the_clock_is_held():
    deadline, rung = Deadline(0.03), asyncio.Event()
    alarm = deadline.alarm(rung.set)
    alarm.start()
    with deadline.held():
        await asyncio.sleep(0.05)
        assert not rung.is_set()
    await asyncio.wait_for(rung.wait(), 5)
    alarm.stop()


# --- ResettableTimeout


class _Clock:
    """A loop whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.armed: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, act: Callable[[], None]) -> Any:
        entry = (when, act)
        self.armed.append(entry)
        return SimpleNamespace(when=lambda: when, cancel=lambda: self.armed.remove(entry))

    def until(self, now: float) -> None:
        while due := sorted((entry for entry in self.armed if entry[0] <= now), key=lambda entry: entry[0]):
            self.armed.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = now


def _patience() -> tuple[_Clock, ResettableTimeout, list[float]]:
    clock, rung = _Clock(), []
    return clock, ResettableTimeout(cast("Any", clock), lambda: rung.append(clock.now)), rung


def test_a_timeout_fires_at_its_bound():
    clock, patience, rung = _patience()
    patience.set(3)
    clock.until(10)
    assert rung == [3]
    assert clock.armed == []


def test_an_extended_timeout_fires_later_and_needs_no_second_timer():
    clock, patience, rung = _patience()
    patience.set(3)
    clock.until(2)
    patience.set(5)
    assert len(clock.armed) == 1
    clock.until(6.9)
    assert rung == []
    clock.until(8)
    assert rung == [7]


def test_a_shortened_timeout_fires_earlier():
    clock, patience, rung = _patience()
    patience.set(30)
    patience.set(2)
    clock.until(40)
    assert rung == [2]


def test_a_cleared_timeout_never_fires_and_can_be_set_again():
    clock, patience, rung = _patience()
    patience.set(3)
    patience.set(None)
    clock.until(10)
    assert rung == []
    patience.set(1)
    clock.until(12)
    assert rung == [11]


def test_an_ended_timeout_leaves_no_timer_in_the_loop():
    clock, patience, rung = _patience()
    patience.set(3)
    patience.end()
    assert clock.armed == []
    clock.until(10)
    assert rung == []
