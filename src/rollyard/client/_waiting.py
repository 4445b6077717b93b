"""Waits for many rollouts at once, promptly and without missing one.

A few concurrent long polls go through all ids; this alone is correct, but late if the first ids are slow. The stream of
events reports the others as soon as they end. If the stream breaks, only promptness is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from rollyard.client.records import Event, Record
from rollyard.core import RollyardError
from rollyard.core.exception_groups import first_error

log = logging.getLogger("rollyard.client")

POLL_S = 30.0  # one long poll; the service has its own maximum
POLLS = 16  # concurrent long polls


class Source(Protocol):
    """The calls of `AsyncClient` that waiting needs."""

    async def get(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Record: ...

    def events(self, *, after: str | None = None, run: str | None = None) -> AsyncIterator[Event]: ...


async def wait_all(
    client: Source,
    ids: Sequence[str],
    on_end: Callable[[Record], object] | None,
    on_event: Callable[[Event], object] | None,
    timeout_s: float | None,
    run: str | None = None,
    after: str | None = None,
) -> list[Record]:
    """Implements `AsyncClient.wait_all`."""
    waiting = dict.fromkeys(ids)
    records: dict[str, Record] = {}

    async def take(id: str, wait_s: float) -> None:
        record = await client.get(id, wait_s=wait_s, run=run)
        if record.is_ended and id in waiting:
            del waiting[id]
            records[id] = record
            if on_end is not None:
                on_end(record)

    async def watch() -> None:
        try:
            async for event in client.events(after=after, run=run):
                if event.rollout in waiting:
                    if on_event is not None:
                        on_event(event)
                    if event.state == "ended":
                        await take(event.rollout, 0.0)
        except RollyardError as error:
            log.info("the stream of events ended; long polls continue", extra={"code": error.code})

    async def poll(turn: Iterator[str]) -> None:
        for id in turn:
            while id in waiting:
                await take(id, POLL_S)

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as watcher:
            watching = watcher.create_task(watch())
            turn = iter(tuple(waiting))
            async with asyncio.TaskGroup() as polls:
                for _ in range(min(POLLS, len(waiting))):
                    polls.create_task(poll(turn))
            watching.cancel()
    except TimeoutError:
        raise TimeoutError(f"{len(waiting)} of {len(ids)} rollouts have not ended after {timeout_s} s") from None
    except BaseExceptionGroup as group:
        raise first_error(group) from None  # callers catch NotFound, not a group of one
    return [records[id] for id in ids]
