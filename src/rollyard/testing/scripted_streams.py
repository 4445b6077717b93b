"""The streams of a scripted engine: server-sent events while tokens are sampled, and the faults of a stream.

A reply without a rate is one event in one plain response, which costs hardly more than an unstreamed one. A reply with
a rate is at least two events, however busy the machine is. A fault in the body (for example, a missing logprob) is in
the last event, so all earlier events are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import orjson
from aiohttp import web

from rollyard.testing.script import Fault
from rollyard.testing.scripted_dialects import Body, StreamFormat, spoil
from rollyard.testing.scripted_sampling import Finish, Sampled
from rollyard.testing.scripted_work import ScriptedGeneration, ScriptedGenerations

MIDWAY: frozenset[Fault | None] = frozenset({"cut_midway", "error_midway"})
DONE = b"data: [DONE]\n\n"
_FAILED = {"error": {"message": "the engine failed", "type": "InternalServerError", "code": 500}}


async def stream_out(
    request: web.BaseRequest,
    work: ScriptedGenerations,
    known_as: str,
    piece: ScriptedGeneration,
    plan: Sampled,
    end: Callable[[int, Finish], Sampled],
    voice: StreamFormat,
) -> web.StreamResponse:
    """Streams `plan` while `piece` progresses; `end` returns the final result."""
    fault = plan.fault
    good = plan.without_fault()
    response: web.StreamResponse | None = None
    sent = 0

    async def send_up_to(count: int) -> None:
        nonlocal response, sent
        if count > sent:
            start, sent = sent, count
            response = await _opened(request, response)
            await response.write(_lines(voice.events(good, start, count, is_last=False)))

    async def send_new() -> int:
        count = piece.sampled()
        await send_up_to(count if piece.is_stalling else min(count, len(plan.ids) - 1))  # the last is sent at the end
        if fault in MIDWAY and sent >= piece.limit:
            piece.end("stopped")
        return sent

    how = await work.do(known_as, piece, send_new)
    if how == "stopped":
        if fault == "error_midway":
            response = await _opened(request, response)
            await response.write(_lines([_FAILED]) + DONE)
            return response
        if request.transport is not None:
            request.transport.close()  # sends its buffer first
        return response or web.Response()
    if how == "done" and piece.tokens_per_s and not sent:
        await send_up_to(len(plan.ids) // 2)
    if fault == "not_json":
        last = b"data: <html>Bad gateway</html>\n\n"
    else:
        if how == "abort":
            sampled = end(max(sent, piece.sampled()), "abort")
        elif fault == "unasked_abort":
            sampled = end(sent, "abort")
        else:
            sampled = end(len(plan.ids), plan.finish)
        last = _lines(spoil(sampled, body) for body in voice.events(sampled, sent, len(sampled.ids), is_last=True))
    if response is None:
        return web.Response(body=last + DONE, content_type="text/event-stream")
    await response.write(last + DONE)
    return response


async def _opened(request: web.BaseRequest, response: web.StreamResponse | None) -> web.StreamResponse:
    if response is None:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
    return response


def _lines(bodies: Iterable[Body]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(body) + b"\n\n" for body in bodies)
