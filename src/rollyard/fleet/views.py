"""What a head asks a node about a running rollout while people look at it: its messages, the log of its calls, or the
requests of its agent program.

    GET … ─▶ head: a `ViewRequest` in the node's next orders ─▶ node ─▶ POST /v1/fleet/view ─▶ the reply of the GET

Nothing is kept, and nothing is sent while no client asks. A view changes nothing about the rollout.

Invariants. A view has at most `MOST_VIEW_BYTES`, which the head does not decode, except the calls. Of one node at most
`PER_NODE` views are awaited, of all nodes at most `IN_ALL`, so that the memory of a head is bounded; their bytes per
second are bounded by `RATE_BYTES`. Who asks the same at the same time shares an answer. A request that is not answered
within `VIEW_S` is None, and so is any request to a node of an older version, which is sent nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rollyard.fleet.messages import Key, View, ViewRequest
from rollyard.pipeline.message_page import PAGE_BYTES

VIEW_S = 2.0
"""How long a reader waits for a node; without an answer the reply says that the messages are not available."""

PER_NODE, IN_ALL = 2, 16
"""A node that does not answer holds two of the places of all nodes, for `VIEW_S`."""

MOST_VIEW_BYTES = PAGE_BYTES + (16 << 10)
"""The size of an encoded `View`: a page, and what is around it."""

RATE_BYTES = 16 << 20

LEAST_BYTES = 128 << 10
"""What a view counts at least: the calls around it cost the head more than its bytes."""


_Part = tuple[Key, int | None, bool]
"""Of which attempt a request asks for what, as `ViewRequest` has it."""


class ViewPace:
    """The bounds of all nodes' views together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots = asyncio.Semaphore(IN_ALL)
        self._free_at = 0.0  # when the views so far are paid for

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None, None]:
        """The right to await one view, as soon as the rate allows it."""
        async with self._slots:
            await asyncio.sleep(max(0.0, self._free_at - self._clock()))
            yield

    def spend(self, size_bytes: int) -> None:
        self._free_at = max(self._free_at, self._clock()) + max(size_bytes, LEAST_BYTES) / RATE_BYTES


class NodeViews:
    """What one node is asked. `has_orders` is set when there is a request to send."""

    def __init__(self, pace: ViewPace, has_orders: asyncio.Event, *, is_supported: bool) -> None:
        self._pace = pace
        self._has_orders = has_orders
        self._is_supported = is_supported
        self._slots = asyncio.Semaphore(PER_NODE)
        self._unsent: dict[str, ViewRequest] = {}
        self._awaited: dict[str, asyncio.Future[View | None]] = {}  # by the id of the request
        self._asked: dict[_Part, asyncio.Future[View | None]] = {}  # also those that wait for a slot

    async def ask(self, key: Key, after: int | None, *, requests: bool = False) -> View | None:
        """Returns the messages of an attempt from number `after` on, its calls (None), or its agent program's
        `requests`; None without an answer."""
        if not self._is_supported:
            return None
        part: _Part = (key, after, requests)
        answer = self._asked.get(part)
        if answer is not None:
            await asyncio.wait((answer,), timeout=VIEW_S)
            return answer.result() if answer.done() and not answer.cancelled() else None
        answer = self._asked[part] = asyncio.get_running_loop().create_future()
        request = ViewRequest(secrets.token_hex(8), *part)
        try:
            async with asyncio.timeout(VIEW_S), self._slots, self._pace.slot():
                if not answer.done():  # or the node was lost meanwhile
                    self._awaited[request.id] = answer
                    self._unsent[request.id] = request
                    self._has_orders.set()
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[part]
            self._awaited.pop(request.id, None)
            self._unsent.pop(request.id, None)
            if not answer.done():
                answer.set_result(None)

    def take(self) -> list[ViewRequest]:
        """Returns the requests to send. Each is sent once: if it is lost, its reader gets no view."""
        requests = [*self._unsent.values()]
        self._unsent.clear()
        return requests

    def receive(self, view: View) -> None:
        """Hands a view to its readers. One that comes late is dropped."""
        answer = self._awaited.pop(view.id, None)
        if answer is not None and not answer.done():
            self._pace.spend(view.size_bytes)
            answer.set_result(view)

    def close(self) -> None:
        """Ends all waiting: the node is lost."""
        self._is_supported = False
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
