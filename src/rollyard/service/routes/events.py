"""/v1/events: every change of state as server-sent events.

Invariant: whichever comes first, the client's leaving or the service's closing, ends the stream at once, and nothing
of it is left. A reader that is too slow finds a `gap` event, never an endless buffer.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollyard.core import check_id
from rollyard.pipeline import Event, Hub
from rollyard.service.bounds import disconnected, end_all
from rollyard.service.house import house_of
from rollyard.service.records import encode

router = APIRouter(prefix="/v1", tags=["events"])

KEEP_ALIVE_S = 15.0
"""Shorter than what proxies and NAT boxes forget an idle connection after (30 s and more)."""


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(default=None, description="The id of the last event seen; else from now on.")
    run: str | None = None


@router.get("/events", response_class=Response)
async def events(request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
    """A stream of `state` events, for ever. After a `gap` event, list what you follow: some were missed."""
    house = house_of(request)
    after = query.after or request.headers.get("last-event-id")
    run = None if query.run is None else check_id(query.run, "run")
    return EventStream(house.yard.hub, after, run, house.closing)


class EventStream(Response):
    """See the module."""

    def __init__(self, hub: Hub, after: str | None, run: str | None, closing: asyncio.Event) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._hub = hub
        # Taken now: what happens between the headers and the first event is not missed.
        self._after = after or hub.last_id
        self._run = run
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send(send, b": open\n\n")
        pump = asyncio.create_task(self._pump(send))
        alive = asyncio.create_task(self._keep_alive(send))
        gone = asyncio.create_task(disconnected(receive))
        closed = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait((pump, alive, gone, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_all(pump, alive, gone, closed)
        if not pump.cancelled():
            pump.result()  # it never ends by itself: this raises what broke it
        if not gone.cancelled():
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._hub.events(self._after)) as stream:
            async for event in stream:
                if event.kind == "gap" or self._run in (None, event.run):
                    await _send(send, _frame(event))

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await _send(send, b": still here\n\n")


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _frame(event: Event) -> bytes:
    data = encode(
        {
            "rollout": event.rollout,
            "run": event.run,
            "state": event.state,
            "attempt": event.attempt,
            "outcome": event.outcome,
            "code": event.code,
            "at": event.at,
        }
    )
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.kind.encode(), data)
