"""/v1/events: every change of state as server-sent events.

Invariant: whichever comes first, the client's leaving or the service's closing, ends the stream at once, and nothing
of it is left. A reader that is too slow finds a `gap` event, never an endless buffer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import check_id
from rollyard.pipeline import Event, Hub
from rollyard.service.house import house_of
from rollyard.service.sse import EventStream, frame

router = APIRouter(prefix="/v1", tags=["events"])


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(default=None, description="The id of the last event seen; else from now on.")
    run: str | None = None


@router.get("/events", response_class=Response)
async def events(request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
    """A stream of `state` events, for ever. After a `gap` event, list what you follow: some were missed."""
    house = house_of(request)
    run = None if query.run is None else check_id(query.run, "run")
    # Taken now: what happens between the headers and the first event is not missed.
    after = query.after or request.headers.get("last-event-id") or house.yard.hub.last_id
    return EventStream(_frames(house.yard.hub, after, run), house.closing)


async def _frames(hub: Hub, after: str, run: str | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(hub.events(after)) as stream:
        async for event in stream:
            if event.kind == "gap" or run in (None, event.run):
                yield frame(event.kind, _data(event), event.id)


def _data(event: Event) -> dict[str, object]:
    return {
        "rollout": event.rollout,
        "run": event.run,
        "state": event.state,
        "attempt": event.attempt,
        "outcome": event.outcome,
        "code": event.code,
        "at": event.at,
    }
