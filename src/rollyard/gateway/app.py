"""The gateway as an ASGI app: routes a path to its dialect and sends the response.

    POST /v1/chat/completions   POST /v1/responses   POST /v1/messages   POST /v1/messages/count_tokens   GET /v1/models

Each path also works without /v1. This is plain ASGI without a framework: it needs one small router, and it is the hot
path of every agent program's every step.

A streamed response starts with its first token: an error before that is an HTTP status, as SDKs expect.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import orjson

from rollyard.gateway.base import ChatRequest, Dialect, Event, Problem, Reply, Writer
from rollyard.gateway.dialects.chat import Chat, model_body, models_body
from rollyard.gateway.dialects.messages import Messages
from rollyard.gateway.dialects.responses import Responses
from rollyard.gateway.exchange import Listener
from rollyard.gateway.parameters import header_of
from rollyard.gateway.session import GatewaySession

log = logging.getLogger("rollyard.gateway")

FIRST_S = 15.0
"""A stream whose first token takes longer starts with a keep-alive: clients time out on silence."""
KEEP_ALIVE_S = 15.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SEND_NOW = "rollyard.send_now"
"""The ASGI extension of the doorway's server that holds its `SendNow`."""


class SendNow(Protocol):
    """Sends part of a body immediately. Returns False if it could not; nothing was sent then."""

    def __call__(self, body: bytes, *, is_end: bool) -> bool: ...


CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
DIALECTS: Mapping[str, Dialect] = {"/chat/completions": CHAT, "/responses": RESPONSES, "/messages": MESSAGES}
COUNT, MODELS = "/messages/count_tokens", "/models"
PATHS = frozenset({*DIALECTS, COUNT, MODELS})

_JSON = (b"content-type", b"application/json")
_NO_RETRY = (b"x-should-retry", b"false")  # SDKs retry by status, but a retry would fail again
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GatewayApp:
    """The ASGI app of one session. `watches`: the server does not cancel the app when its client disconnects, so the
    app waits for the disconnect itself."""

    def __init__(self, session: GatewaySession, *, watches: bool = False) -> None:
        self._session = session
        self._watches = watches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path = short_path(scope["path"])
        dialect = dialect_of(path, headers)
        request: ChatRequest | None = None
        try:
            if path == MODELS or path.startswith(f"{MODELS}/"):
                name = path[len(MODELS) + 1 :]  # a name may contain slashes
                await _answer(send, 200, model_body(name) if name else models_body((self._session.model,)))
                return
            if scope["method"] != "POST" or (path not in DIALECTS and path != COUNT):
                raise Problem("not_found", f"there is no {scope['method']} {scope['path']} here")
            is_only_counted = path == COUNT
            raw = await _body(receive, partial(self._session.check_size, is_only_counted=is_only_counted))
            request, key, weight, sent = await self._session.read(dialect, raw, is_only_counted=is_only_counted)
            del raw  # up to 16 MiB, not needed while the reply is sampled
            if is_only_counted:
                await _answer(send, 200, orjson.dumps({"input_tokens": await self._session.count(request, weight)}))
                return
            retries = _retries(headers)
            listener = await self._session.open(dialect, request, key, weight=weight, retries=retries, sent=sent)
        except Problem as problem:
            await refuse(send, dialect, problem, request)
            return
        except Exception as error:  # a third-party renderer may raise anything
            log.exception("a request could not be started", extra={"path": path})
            await refuse(send, dialect, Problem("internal", f"{type(error).__name__}; see the service's log"), request)
            return
        try:
            send_now = None if self._watches else scope.get("extensions", {}).get(SEND_NOW)
            await self._respond(dialect, request, listener, receive, send, send_now)
        finally:
            listener.leave()

    async def _respond(
        self,
        dialect: Dialect,
        request: ChatRequest,
        listener: Listener,
        receive: Receive,
        send: Send,
        send_now: SendNow | None,
    ) -> None:
        respond = partial(_stream, send_now=send_now) if request.is_stream else _whole
        if not self._watches:
            await respond(dialect, request, listener, send)
            return
        disconnect = asyncio.ensure_future(_wait_disconnect(receive))

        async def send_checked(message: MutableMapping[str, Any]) -> None:
            await send(message)
            if disconnect.done():  # such a server accepts data for a disconnected client without an error
                raise _Disconnected

        response = asyncio.ensure_future(respond(dialect, request, listener, send_checked))
        try:
            await asyncio.wait((response, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                with suppress(_Disconnected):
                    response.result()
        finally:
            for task in (response, disconnect):
                task.cancel()
            await asyncio.wait((response, disconnect))


async def _whole(dialect: Dialect, request: ChatRequest, listener: Listener, send: Send) -> None:
    try:
        reply = await listener.reply()
    except Problem as problem:
        await refuse(send, dialect, problem)
        return
    headers = [(b"x-request-id", reply.id.encode()), *header_of(reply.warnings)]
    await _answer(send, 200, dialect.reply(request, reply), *headers)
    listener.delivered()


async def _stream(
    dialect: Dialect, request: ChatRequest, listener: Listener, send: Send, send_now: SendNow | None = None
) -> None:
    exchange = listener.exchange
    batch = await listener.next(FIRST_S)
    if batch is None and exchange.problem is not None:
        await refuse(send, dialect, exchange.problem, request)
        return
    writer = dialect.writer(request, exchange.id, exchange.created, exchange.prompt_tokens)
    own = [(b"x-request-id", exchange.id.encode()), *header_of(exchange.granted.warnings)]
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS, *own]})
    relay = _Relay(writer, send_now)
    lead = writer.begin()
    while batch is not None:
        lead += relay.take_unsent()
        lead += b"".join(map(writer.event, batch)) if batch else writer.keep_alive()
        if not listener.is_done:  # else it is sent with the end
            await send({"type": "http.response.body", "body": lead, "more_body": True})
            lead = b""
            relay.listen_to(listener)
        batch = await listener.next(KEEP_ALIVE_S)
    lead += relay.take_unsent()
    if relay.has_ended and not lead:
        return  # everything has been sent
    reply = exchange.reply
    if reply is None:
        problem = exchange.problem or Problem("internal", "the reply was lost")
        await send({"type": "http.response.body", "body": lead + writer.error(problem), "more_body": False})
        return
    end = b"" if relay.has_ended else writer.end(reply)
    await send({"type": "http.response.body", "body": lead + end, "more_body": False})
    listener.delivered()


class _Relay:
    """Sends events from the engine's read directly to the client's socket while the client keeps up. It keeps what it
    could not send for the response's own task, and accepts no more until that task has taken it."""

    def __init__(self, writer: Writer, send_now: SendNow | None) -> None:
        self.has_ended = False
        self._writer = writer
        self._send_now = send_now
        self._unsent = b""

    def listen_to(self, listener: Listener) -> None:
        if self._send_now is not None and not self._unsent and not self.has_ended:
            listener.relay = self

    def take_unsent(self) -> bytes:
        unsent, self._unsent = self._unsent, b""
        return unsent

    def __call__(self, events: Sequence[Event], reply: Reply | None) -> bool:
        assert self._send_now is not None
        data = b"".join(map(self._writer.event, events))
        if reply is not None:
            data += self._writer.end(reply)
            self.has_ended = True
        if self._send_now(data, is_end=self.has_ended):
            return True
        self._unsent = data
        return False


class _Disconnected(Exception):
    """The client has not received what was sent."""


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- reading


def short_path(path: str) -> str:
    return path.removeprefix("/v1").rstrip("/")


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Returns the dialect of a path; for a path that all dialects share, the client's header decides."""
    if path == COUNT or (path not in DIALECTS and b"anthropic-version" in headers):
        return MESSAGES
    return DIALECTS.get(path, CHAT)


def _retries(headers: Mapping[bytes, bytes]) -> int:
    """Returns how often the SDK has sent this request before, from the header of OpenAI's and Anthropic's SDKs."""
    value = headers.get(b"x-stainless-retry-count", b"0")
    return int(value[:9]) if value.isdigit() else 0


async def _body(receive: Receive, check_size: Callable[[int], None]) -> bytes | bytearray:
    """Returns the whole body. `check_size` raises as soon as it is too long; the rest is not stored."""
    message = await receive()
    if not message.get("more_body", False) and message["type"] == "http.request":
        return message.get("body", b"")
    chunks = bytearray(message.get("body", b""))
    while message["type"] == "http.request" and message.get("more_body", False):
        check_size(len(chunks))
        message = await receive()
        chunks += message.get("body", b"")
    if message["type"] != "http.request":
        raise Problem("invalid", "the client went away")
    return chunks


# --- answering


async def refuse(send: Send, dialect: Dialect, problem: Problem, request: ChatRequest | None = None) -> None:
    """Reports a problem by HTTP status, except a context overflow of a Responses stream: that API reports it in the
    stream, where its clients expect it."""
    if request is not None and request.is_stream and problem.kind == "context" and dialect is RESPONSES:
        writer = dialect.writer(request, secrets.token_hex(12), int(time.time()), problem.used_tokens or 0)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await send({"type": "http.response.body", "body": writer.begin() + writer.error(problem), "more_body": False})
        return
    await _answer(send, problem.status, dialect.error(problem), _NO_RETRY)


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
