"""/v1/events: every change of state as server-sent events.

Invariant: the stream ends at once when the client disconnects or the service closes, and no task of it is left. A
reader that is too slow gets a `gap` event; events are not buffered without bound.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import id_of
from rollyard.pipeline import Event
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.security.access import Caller, caller_of
from rollyard.service.sse import EventStream, frame

router = APIRouter(prefix="/v1", tags=["events"])


class EventsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(default=None, description="The id of the last event received; unset: only new events.")
    run: str | None = None


@router.get("/events", response_class=Response)
async def events(request: Request, query: Annotated[EventsQuery, Query()]) -> Response:
    """Streams `state` events without end. After a `gap` event some were missed: list what you follow."""
    app_state = app_state_of(request)
    caller = caller_of(request)
    run = None if query.run is None else (await app_state.run(caller, query.run)).id
    # Read now, so that events between the headers and the first frame are not missed.
    after = query.after or request.headers.get("last-event-id") or app_state.pipeline.event_log.last_id
    frames = _frames(app_state, caller, after, run)
    return EventStream(frames, app_state.closing, is_admitted=app_state.admission(request))


async def _frames(app_state: AppState, caller: Caller, after: str, run: str | None) -> AsyncGenerator[bytes, None]:
    def may_read(run_id: str) -> bool:
        found = app_state.pipeline.run_of(run_id)
        return caller.is_admin or (found is not None and caller.reads(found))

    event_log = app_state.pipeline.event_log
    if run is not None:
        events = event_log.events(after, [run])
    elif caller.sees_all_tenants:
        events = event_log.events(after)
    else:
        events = event_log.events(after, [one.id for one in app_state.readable(caller)], grows=may_read)
    async with aclosing(events) as stream:
        async for event in stream:
            if event.kind == "gap" or may_read(event.run):  # the run may belong to another caller by now
                yield frame(event.kind, _data(event), event.id)


def _data(event: Event) -> dict[str, object]:
    return {
        "rollout": id_of(event.rollout),
        "run": event.run,
        "state": event.state,
        "attempt": event.attempt,
        "outcome": event.outcome,
        "code": event.code,
        "at": event.at,
    }
