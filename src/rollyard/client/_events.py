"""The stream of events (text/event-stream), followed across dropped connections.

After a drop it reconnects with the id of the last event; the service sends a `gap` if it no longer has all events since
then. The service sends keep-alive comments, so a dead connection is detected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp
import msgspec

from rollyard.client._errors import ServiceUnreachable, UnexpectedReply
from rollyard.client._transport import BACKOFF_S, RetryableError, Transport, raise_for
from rollyard.client.records import Event, read

SILENCE_S = 45.0  # three keep-alives


async def follow(wire: Transport, after: str | None, run: str | None) -> AsyncGenerator[Event, None]:
    """Events, without end. Raises the service's error, or ServiceUnreachable after `retry_s` without a connection."""
    last_seen = time.monotonic()
    pause_s, longest_s = BACKOFF_S
    while True:
        try:
            params = {"after": after, "run": run}
            async with wire.stream("/events", params, accept="text/event-stream", silence_s=SILENCE_S) as reply:
                if reply.status >= 400:
                    await raise_for(reply, await reply.read(), f"{wire.place.url} answered GET /v1/events")
                wire.answered()
                pause_s = BACKOFF_S[0]
                async with aclosing(_parse(reply.content)) as events:
                    async for event in events:
                        last_seen = time.monotonic()
                        after = event.id or after
                        yield event
                last_seen = time.monotonic()
            error = ServiceUnreachable(f"{wire.place.url} ended the stream of events")
        except RetryableError as again:
            error = again.error
        except ValueError as broken:  # of aiohttp, for a line that is too long
            raise UnexpectedReply(f"the stream of events cannot be read: {broken}") from broken
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as broken:
            error = ServiceUnreachable(f"the stream of events from {wire.place.url} was interrupted ({broken!r})")
        if time.monotonic() + pause_s > last_seen + wire.retry_s:
            raise error
        wire.not_answered(error, pause_s, last_seen + wire.retry_s)
        await asyncio.sleep(pause_s)
        pause_s = min(longest_s, pause_s * 2)


async def _parse(stream: aiohttp.StreamReader) -> AsyncGenerator[Event, None]:
    """The events of a text/event-stream; comments and unknown fields are ignored."""
    fields: dict[str, str] = {}
    while line := await stream.readline():
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text:
            if "data" in fields or "event" in fields:
                yield _event(fields)
            fields = {}
        elif not text.startswith(":"):
            name, _, value = text.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and name in fields else value


def _event(fields: dict[str, str]) -> Event:
    try:
        body = msgspec.json.decode(fields.get("data") or "{}")
    except msgspec.DecodeError as error:
        raise UnexpectedReply("an event's data is not JSON") from error
    if not isinstance(body, dict):
        raise UnexpectedReply("an event's data is not a JSON object")
    return read({**body, "id": fields.get("id", ""), "kind": fields.get("event", "state")}, Event)
