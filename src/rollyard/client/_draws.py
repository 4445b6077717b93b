"""A trainer's handle of a draw: numbered batches of useful groups. Created by `AsyncClient.draw` and `get_draw`.

    draw = await client.draw(run, tasks, id="grpo-7b", group_size=8)
    batch = await draw.batch(want=32)

A batch is opened by its number and read page by page, each page from the cursor after the last. So an interrupted call
can be sent again, and each group arrives exactly once, even if a connection breaks or the service is restarted. After a
restart of the trainer, the next number is the one after the last acknowledged batch, which the service stores. Batches
that were opened since then are delivered again unchanged, because it is unknown which of them a crashed trainer had
received; `rewind` undoes them instead, and `batch(number=…)` starts at a given one.

Backpressure: a page is requested when the previous one has been consumed, and has at most `limit` groups.

One consumer: a handle must not be used by two tasks at once, and two handles of one draw get the same batches.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from rollyard.client._bodies import TaskLike, part, task_body, without_none
from rollyard.client._errors import DrawEnded, UnexpectedReply
from rollyard.client._transport import ARROW, Params, Transport
from rollyard.client._waiting import POLL_S
from rollyard.client.groups import Batch, BatchFacts, Group, GroupsPage, batch_of, read_arrow_page
from rollyard.client.records import JsonObject, read, read_object

PAGE_GROUPS = 8
"""Groups per page: 8 groups of 8 rollouts of 8,000 tokens are 7 MB."""


@dataclass(slots=True)
class _Reading:
    """A batch that is being read: its facts, and the position reached."""

    facts: BatchFacts
    cursor: str | None
    groups: list[Group] = field(default_factory=list[Group])
    is_whole: bool = False

    def take(self, page: GroupsPage) -> None:
        """Records that all groups of the page have been consumed."""
        self.cursor = page.next or self.cursor
        self.is_whole = self.facts.is_closed and (not page.groups or self.cursor == self.facts.last)


class AsyncDraw:
    """A trainer's handle of a draw. `last_batch` is the batch that was read last, without its groups."""

    id: str
    run: str
    last_batch: Batch | None

    def __init__(self, wire: Transport, facts: JsonObject) -> None:
        self._wire = wire
        self.id = str(facts["id"])
        self.run = str(facts.get("run", ""))
        self.last_batch = None
        self._path = f"/draws/{part(self.id)}"
        self._in = {"run": self.run or None}
        self._last: int | None = None  # the number of the batch before the next one
        self._opened = 0  # the last batch that an earlier process of this trainer may have opened
        self._batch_reading: _Reading | None = None  # of batch(), until the batch is complete
        self._stream_reading: _Reading | None = None  # of stream(), whose groups have been yielded

    async def batch(
        self,
        want: int | None = None,
        *,
        number: int | None = None,
        timeout_s: float | None = None,
        limit: int = PAGE_GROUPS,
    ) -> Batch:
        """The next batch of `want` groups, when it is complete; with fewer groups, `reason` is set.

        With `number`, that batch: an earlier one is returned unchanged, and needs no `want`. Raises TimeoutError after
        `timeout_s`; nothing is lost, and the next call continues with the same batch. Raises DrawEnded if the draw has
        ended and no groups are left.
        """
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        reading = self._batch_reading
        if reading is None or (number is not None and number != reading.facts.number):
            reading = await self._open(want, number)
        self._batch_reading = reading
        while not reading.is_whole:
            poll_s = POLL_S if give_up is None else min(POLL_S, max(0.0, give_up - time.monotonic()))
            page = await self._read(reading, poll_s, limit)
            reading.groups += page.groups
            reading.take(page)
            if not reading.is_whole and give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(
                    f"batch {reading.facts.number} of draw {self.id} has {len(reading.groups)} of "
                    f"{reading.facts.want} groups after {timeout_s:g} s"
                )
        await self._finish(reading)
        return batch_of(reading.facts, reading.groups)

    async def stream(
        self, want: int | None = None, *, number: int | None = None, limit: int = PAGE_GROUPS
    ) -> AsyncIterator[Group]:
        """The groups of the next batch, each as soon as it is ready; `last_batch` describes the batch afterwards.

        If the iteration is left early, the next call continues after the last group yielded; `batch()` returns all of
        them.
        """
        reading = self._stream_reading
        if reading is None or (number is not None and number != reading.facts.number):
            reading = await self._open(want, number)
        self._stream_reading = reading
        if reading.is_whole:
            await self._finish(reading)
        while not reading.is_whole:
            page = await self._read(reading, POLL_S, limit)
            # The caller can leave at any `yield`, so the position is updated before each, including the last.
            for group in page.groups[:-1]:
                reading.cursor = group.cursor
                yield group
            reading.take(page)
            if reading.is_whole:
                await self._finish(reading)
            if page.groups:
                yield page.groups[-1]

    async def ack(self, batch: Batch | int) -> int:
        """Acknowledges batches up to that one, which the trainer has saved in a checkpoint: their traces may be
        deleted. Returns how many were."""
        number = batch if isinstance(batch, int) else batch.number
        body = await self._wire.json(
            "POST", f"{self._path}/ack", params=self._in, body={"batch": number}, is_repeatable=True
        )
        return int(read_object(body).get("deleted") or 0)

    async def rewind(self, batch: Batch | int, version: int, *, policy_version: int | None = None) -> JsonObject:
        """Returns to a checkpoint: the last batch that it contains, and its version of the weights.

        Later batches are undone. Groups with tokens of newer versions become void and their tasks are drawn again; the
        other groups are delivered again. Tasks of batches that were acknowledged are drawn again too, because their
        traces are deleted. The next batch is the one after `batch`. `policy_version`: the version under which the
        policy has the checkpoint's weights now, if it is a new one. Returns the draw.
        """
        number = batch if isinstance(batch, int) else batch.number
        call = without_none(batch=number, version=version, policy_version=policy_version)
        facts = read_object(
            await self._wire.json("POST", f"{self._path}/rewind", params=self._in, body=call, is_repeatable=True)
        )
        self._batch_reading = self._stream_reading = None
        self._last, self._opened = number, 0
        return facts

    async def push(self, tasks: Sequence[TaskLike], *, ids: Sequence[str] | None = None, close: bool = False) -> int:
        """Adds tasks to a draw whose source is push; `close`: these are the last. Returns how many it has now.

        Without `ids`, a call whose response was lost is not sent again, because it may have arrived.
        """
        if ids is not None and len(ids) != len(tasks):
            raise ValueError(f"{len(tasks)} tasks and {len(ids)} ids: there must be one id for each task")
        body = without_none(tasks=[task_body(task) for task in tasks], ids=None if ids is None else [*ids], close=close)
        is_repeatable = ids is not None or not tasks
        reply = await self._wire.json(
            "POST", f"{self._path}/tasks", params=self._in, body=body, is_repeatable=is_repeatable
        )
        return int(read_object(reply).get("total") or 0)

    async def status(self) -> JsonObject:
        """State, version, last batch, last acknowledged batch, figures."""
        return read_object(await self._wire.json("GET", self._path, params=self._in))

    async def close(self) -> JsonObject:
        """Ends the draw: rollouts in flight are cancelled; delivered groups and figures stay. Returns the draw."""
        return read_object(await self._wire.json("DELETE", self._path, params=self._in) or {"id": self.id})

    async def _open(self, want: int | None, number: int | None) -> _Reading:
        """Opens a batch by its number, so that repeating is harmless: the one after the last, even if that has been
        opened before. A batch that was open at a crash may be full by now, and would be lost otherwise."""
        is_there = False
        if number is None:
            if self._last is None:
                facts = await self.status()
                self._last, self._opened = int(facts.get("acked") or 0), int(facts.get("batch") or 0)
            number = self._last + 1
            is_there = number <= self._opened  # it is returned unchanged, whatever `want` is
        if want is None or is_there:
            reply = await self._wire.json("GET", f"{self._path}/batches/{number}", params=self._in)
        else:
            body = {"want": want, "number": number}
            reply = await self._wire.json(
                "POST", f"{self._path}/batches", params=self._in, body=body, is_repeatable=True
            )
        batch = read(reply, BatchFacts)
        if batch.number != number:
            raise UnexpectedReply(f"batch {number} of draw {self.id} was requested, but {batch.number} was returned")
        return _Reading(batch, batch.after, is_whole=batch.is_closed and not batch.delivered)

    async def _read(self, reading: _Reading, wait_s: float, limit: int) -> GroupsPage:
        """The groups after the cursor, as soon as there is one. Empty: none yet, or the batch is closed."""
        params: Params = {
            **self._in,
            "batch": reading.facts.number,
            "after": reading.cursor,
            "limit": limit,
            "wait_s": wait_s,
        }
        data, _ = await self._wire.call("GET", f"{self._path}/groups", params=params, accept=ARROW, wait_s=wait_s)
        page = read_arrow_page(data)
        if page.batch is None or page.batch.number != reading.facts.number:
            raise UnexpectedReply(f"a page of batch {reading.facts.number} of draw {self.id} was expected")
        cursors = [group.cursor for group in page.groups]
        if cursors and (page.next != cursors[-1] or None in cursors or reading.cursor in cursors):
            raise UnexpectedReply(f"a page of draw {self.id} does not continue from {reading.cursor}")
        reading.facts = page.batch
        return page

    async def _finish(self, reading: _Reading) -> None:
        self._batch_reading = self._stream_reading = None
        if not reading.facts.delivered and reading.facts.is_last:
            facts = await self.status()
            why = f": {facts['detail']}" if facts.get("detail") else ""
            reason, figures = facts.get("reason"), facts.get("figures")
            raise DrawEnded(f"draw {self.id} has ended ({reason}{why})", reason=reason, figures=figures)
        self._last = reading.facts.number
        self.last_batch = batch_of(reading.facts, ())
