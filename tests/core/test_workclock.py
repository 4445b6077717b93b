"""Time in which the process did not run does not count, whatever detects it first."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from rollyard.core import Deadline, DeadlineExpired, WorkClock
from rollyard.core.workclock import MOST_LATE_S, TICK_S

pytestmark = pytest.mark.slow


class Now:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
async def clock() -> AsyncGenerator[WorkClock]:
    work_clock = WorkClock()
    work_clock.start()
    yield work_clock
    work_clock.stop()


def stand_still(seconds: float) -> None:
    """Blocks the event loop and everything that runs on it, as if the process had been stopped."""
    time.sleep(seconds)


async def test_a_standstill_is_subtracted_when_the_clock_is_read() -> None:
    now = Now()
    clock = WorkClock(now)
    clock.start()
    now.at += TICK_S + MOST_LATE_S
    assert clock() == 100.0 + TICK_S + MOST_LATE_S, "a busy loop is not a standstill"
    now.at += 50
    assert clock() == 100.0 + TICK_S and clock.stopped_s == MOST_LATE_S + 50
    now.at += 0.1
    assert clock() == pytest.approx(100.0 + TICK_S + 0.1)
    clock.stop()
    now.at += 50
    assert clock() == pytest.approx(150.0 + TICK_S + 0.1), "after stop, it is a plain clock"


async def test_a_deadline_that_passes_during_a_standstill_does_not_fire(clock: WorkClock) -> None:
    deadline = Deadline(MOST_LATE_S + 0.2, clock)
    async with deadline.counting():
        stand_still(MOST_LATE_S + 1.0)
        await asyncio.sleep(0.01)  # everything that was due has run
    assert deadline.used_s < MOST_LATE_S


async def test_the_rest_of_a_deadline_counts_after_a_standstill(clock: WorkClock) -> None:
    deadline = Deadline(0.5, clock)
    with pytest.raises(DeadlineExpired):
        async with deadline.counting():
            stand_still(MOST_LATE_S + 1.0)
            await asyncio.Event().wait()
    assert deadline.is_expired


async def test_a_reply_read_right_after_a_standstill_does_not_count_it(clock: WorkClock) -> None:
    reader, writer = asyncio.StreamReader(), asyncio.get_running_loop()
    deadline = Deadline(0.8, clock)
    async with deadline.counting():
        writer.call_soon(reader.feed_data, b"reply\n")
        writer.call_soon(stand_still, MOST_LATE_S + 1.0)
        assert await reader.readline() == b"reply\n"
    assert not deadline.is_expired
    async with deadline.counting():
        pass


async def test_alike_uses_the_same_clock(clock: WorkClock) -> None:
    limit = Deadline(30, clock).with_budget(0.5)
    async with limit.counting():
        stand_still(MOST_LATE_S + 1.0)
        await asyncio.sleep(0.01)
    assert not limit.is_expired


async def test_a_clock_holds_only_deadlines_that_count(clock: WorkClock) -> None:
    deadline = Deadline(30, clock)
    async with deadline.counting():
        with deadline.held():
            assert not clock._counting  # pyright: ignore[reportPrivateUsage]
        assert clock._counting  # pyright: ignore[reportPrivateUsage]
    assert not clock._counting  # pyright: ignore[reportPrivateUsage]
