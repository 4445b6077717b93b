"""Events and ends."""

import asyncio
import gc
from dataclasses import replace

from rollyard.core import Position, Rollout, State, Task
from rollyard.pipeline.event_log import Event, EventLog


def rollout(number: int, state: State = State.QUEUED) -> Rollout:
    return replace(Rollout(f"r{number}", "run", Task("shell")), position=Position(state))


async def read(hub: EventLog, after: str | None, count: int) -> list[Event]:
    events: list[Event] = []
    async for event in hub.events(after):
        events.append(event)
        if len(events) == count:
            break
    return events


async def test_a_reader_goes_on_after_the_last_event_it_saw():
    hub = EventLog(epoch=7)
    for number in range(5):
        hub.publish(rollout(number))
    events = await read(hub, "7-2", 3)
    assert [event.rollout for event in events] == ["r2", "r3", "r4"]
    assert [event.id for event in events] == ["7-3", "7-4", "7-5"]


async def test_a_reader_waits_for_news():
    hub = EventLog(epoch=1)
    reader = asyncio.create_task(read(hub, None, 2))
    await asyncio.sleep(0)
    hub.publish(rollout(1))
    hub.publish(rollout(2))
    assert [event.rollout for event in await reader] == ["r1", "r2"]


async def test_a_reader_that_was_away_too_long_is_told_of_the_gap():
    hub = EventLog(epoch=2, ring=3)
    for number in range(10):
        hub.publish(rollout(number))
    events = await read(hub, "2-1", 4)
    assert [event.kind for event in events] == ["gap", "state", "state", "state"]
    assert [event.rollout for event in events[1:]] == ["r7", "r8", "r9"]
    assert (await read(hub, "1-5", 1))[0].kind == "gap"  # another epoch
    for nonsense in ("nonsense", "2-²", "2-" + "9" * 5000):
        assert (await read(hub, nonsense, 1))[0].kind == "gap"


async def test_who_waits_for_an_end_is_told_and_nothing_is_kept_of_it():
    hub = EventLog(epoch=1)
    end = hub.end_of("r1")
    assert hub.end_of("r1") is end
    hub.publish(rollout(1, State.RUN))
    assert not end.done()
    hub.publish(rollout(1, State.ENDED))
    await asyncio.wait_for(end, 1)
    del end
    hub.end_of("r2")
    gc.collect()
    assert len(hub._ends) == 0
