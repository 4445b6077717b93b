"""Events, and waiting for ends."""

import asyncio
import gc
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

from rollyard.core import Position, Rollout, State, Task
from rollyard.pipeline.event_log import Event, EventLog


def rollout(number: int, state: State = State.QUEUED, run: str = "run") -> Rollout:
    return replace(Rollout(f"r{number}", run, Task("shell")), position=Position(state))


async def read(
    event_log: EventLog,
    after: str | None,
    count: int,
    runs: list[str] | None = None,
    grows: Callable[[str], bool] | None = None,
) -> list[Event]:
    events: list[Event] = []
    async with aclosing(event_log.events(after, runs, grows=grows)) as stream:
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
    return events


async def test_a_reader_continues_after_its_last_event():
    event_log = EventLog(epoch=7)
    for number in range(5):
        event_log.publish(rollout(number))
    events = await read(event_log, "7-2", 3)
    assert [event.rollout for event in events] == ["r2", "r3", "r4"]
    assert [event.id for event in events] == ["7-3", "7-4", "7-5"]


async def test_a_reader_waits_for_new_events():
    event_log = EventLog(epoch=1)
    reader = asyncio.create_task(read(event_log, None, 2))
    await asyncio.sleep(0)
    event_log.publish(rollout(1))
    event_log.publish(rollout(2))
    assert [event.rollout for event in await reader] == ["r1", "r2"]


async def test_a_reader_that_missed_events_gets_a_gap():
    event_log = EventLog(epoch=2, ring=3)
    for number in range(10):
        event_log.publish(rollout(number))
    events = await read(event_log, "2-1", 4)
    assert [event.kind for event in events] == ["gap", "state", "state", "state"]
    assert [event.rollout for event in events[1:]] == ["r7", "r8", "r9"]
    assert (await read(event_log, "1-5", 1))[0].kind == "gap"  # another epoch
    for nonsense in ("nonsense", "2-²", "2-" + "9" * 5000):
        assert (await read(event_log, nonsense, 1))[0].kind == "gap"


async def test_the_events_of_a_deleted_run_are_dropped_and_the_others_keep_their_ids():
    event_log = EventLog(epoch=1, ring=4)
    for number in range(6):
        event_log.publish(replace(rollout(number), run=f"run{number % 2}"))
    event_log.forget_run("run0")
    event_log.publish(replace(rollout(6), run="run0"))
    events = await read(event_log, "1-3", 3)
    assert [(event.id, event.rollout) for event in events] == [("1-4", "r3"), ("1-6", "r5"), ("1-7", "r6")]


async def test_events_of_other_runs_are_not_read_and_leave_no_gap():
    event_log = EventLog(epoch=1, ring=3)
    reader = asyncio.create_task(read(event_log, None, 2, ["mine", "also mine"]))
    await asyncio.sleep(0)
    for number in range(10):  # more than the ring holds
        event_log.publish(rollout(number, run="theirs"))
    event_log.publish(rollout(10, run="mine"))
    await asyncio.sleep(0)
    for number in range(20, 30):
        event_log.publish(rollout(number, run="theirs"))
    event_log.publish(rollout(30, run="also mine"))
    assert [(event.kind, event.rollout) for event in await reader] == [("state", "r10"), ("state", "r30")]
    assert not event_log._readers


async def test_a_reader_that_was_woken_too_long_ago_gets_a_gap():
    event_log = EventLog(epoch=1, ring=3)
    reader = asyncio.create_task(read(event_log, None, 1, ["mine"]))
    await asyncio.sleep(0)
    event_log.publish(rollout(1, run="mine"))
    for number in range(10):
        event_log.publish(rollout(number, run="theirs"))
    assert [event.kind for event in await reader] == ["gap"]


async def test_a_reader_follows_new_runs_that_it_may_read():
    event_log = EventLog(epoch=1)
    reader = asyncio.create_task(read(event_log, None, 2, [], grows=lambda run: run.startswith("mine")))
    await asyncio.sleep(0)
    for run in ("mine-1", "theirs", "mine-2"):
        event_log.run_created(run)
        event_log.publish(rollout(1, run=run))
    assert [event.run for event in await reader] == ["mine-1", "mine-2"]


async def test_waiters_for_an_end_are_woken_and_nothing_is_kept():
    event_log = EventLog(epoch=1)
    end = event_log.end_of("r1")
    assert event_log.end_of("r1") is end
    event_log.publish(rollout(1, State.RUN))
    assert not end.done()
    event_log.publish(rollout(1, State.ENDED))
    await asyncio.wait_for(end, 1)
    del end
    event_log.end_of("r2")
    gc.collect()
    assert len(event_log._ends) == 0
