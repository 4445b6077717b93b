"""HTTP to an engine, and the only place where transport errors become EngineFailures.

    connection refused, reset, cut short       EngineUnavailable
    408, 425, 429, 5xx                         EngineUnavailable   (a retry, or another engine, may succeed)
    any other 4xx                              EngineRefused       with the engine's message, `status` in its data,
                                                                   and `context: true` if the prompt is too long
    not JSON, or invalid fields                EngineBroken        naming the field

Only connecting has a timeout here: the caller decides how long a generation may take, or a stream be silent, and
cancels the call. A stream (server-sent events) is passed on event by event as its bytes arrive, and one event may be as
large as a complete reply. One `HttpPool` serves a whole router (`open_http`); it has no limit of its own, since the
pools of the pipeline bound the number of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import orjson

from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineUnavailable
from rollyard.engines.base import Contact, EngineSpec
from rollyard.engines.clients.http import HttpFailure, HttpPool, HttpReply, OnBody, Target, TooLarge

MAX_REPLY_BYTES = 256 << 20  # 1M tokens with logprobs are about 100 MB of JSON
MAX_DETAIL = 400  # characters of an engine's message that are repeated; some engines echo the whole prompt

_RETRYABLE_4XX = frozenset({408, 425, 429})
_CONTEXT = re.compile(
    r"context.{0,12}(length|window|limit)|max(imum)?[ _]model[ _]len(gth)?|"
    r"longer than the (model|maximum)|exceeds? the (model|maximum).{0,40}(length|tokens)",
    re.IGNORECASE,
)

T = TypeVar("T")


def open_http() -> HttpPool:
    """The connections that all engines of a router share."""
    return HttpPool()


class EngineTransport:
    """Requests to one engine over shared connections: its URL, its key, its errors."""

    def __init__(self, spec: EngineSpec, http: HttpPool) -> None:
        self._id = spec.id
        self._http = http
        self._target = Target.of(spec.url.rstrip("/").removesuffix("/v1"))
        base = {"Host": self._target.authority, "Accept": "*/*", "Content-Type": "application/json"}
        if spec.api_key:
            base["Authorization"] = f"Bearer {spec.api_key}"
        self._base_headers = _headers(base)

    @property
    def contact(self) -> Contact:
        return self._http.contact(self._target)

    async def get(self, path: str, most_bytes: int | None = None) -> bytes:
        return self._check(path, await self._asked("GET", path, None, {}, most_bytes=most_bytes))

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
        # OPT_SERIALIZE_NUMPY costs nothing and allows a prompt to be a NumPy array
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._send("POST", path, data, headers or {})

    def read(self, raw: bytes, shape: type[T], what: str) -> T:
        """The reply as `shape`. Raises EngineBroken, naming the invalid field."""
        try:
            return msgspec.json.decode(raw, type=shape)
        except msgspec.ValidationError as error:
            raise EngineBroken(f"engine {self._id}: {what}: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineBroken(f"engine {self._id}: {what} is not JSON: {error}") from None

    def broken(self, detail: str) -> EngineBroken:
        return EngineBroken(f"engine {self._id}: {detail}")

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], take: Callable[[bytes], None]
    ) -> None:
        """Posts, and passes the data of each event to `take` as it arrives; returns after [DONE] or at the end."""
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        reply = await self._asked("POST", path, data, headers, _Events(take))
        if reply.status >= 300 or reply.content_type != "text/event-stream":
            self._check(path, reply)
            raise self.broken(f"{path} answered {reply.content_type or 'nothing'} where a stream was asked for")

    async def _send(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
        return self._check(path, await self._asked(method, path, data, headers))

    async def _asked(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        on_body: OnBody | None = None,
        most_bytes: int | None = None,
    ) -> HttpReply:
        body = data or b""
        most = MAX_REPLY_BYTES if most_bytes is None else most_bytes
        head = (
            f"{method} {self._target.prefix}{path} HTTP/1.1\r\n{self._base_headers}{_headers(headers)}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            return await self._http.request(self._target, head.encode("latin-1"), body, most, on_body)
        except TooLarge:
            part = "streamed a line of" if on_body is not None else "answered"
            raise self.broken(f"{path} {part} more than {most} bytes") from None
        except HttpFailure as error:
            detail = f"engine {self._id} cannot be reached: {str(error)[:MAX_DETAIL]}"
            raise EngineUnavailable(detail, remedy=f"Start it, or correct its URL ({self._target.url}).") from error

    def _check(self, path: str, reply: HttpReply) -> bytes:
        if reply.status >= 300:
            raise self.refusal(reply.status, f"{path} answered {reply.status}: {engine_message(reply.body)}")
        return reply.body

    def refusal(self, status: int, what: str) -> EngineFailure:
        """The failure for a status and the engine's message."""
        detail = f"engine {self._id}: {what}"
        if status >= 500 or status in _RETRYABLE_4XX:
            return EngineUnavailable(detail, status=status)
        if _CONTEXT.search(what):
            return EngineRefused(detail, status=status, context=True)
        return EngineRefused(detail, status=status)


class _Events:
    """Splits a stream's bytes into events, wherever the chunks end, and passes their data to `take`."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._pieces: list[bytes] = []  # of an incomplete line; joined only once, however many they are
        self._size = 0

    def __call__(self, chunk: bytes) -> bool:
        *lines, rest = chunk.split(b"\n")
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces, self._size = [], 0
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
            if self._size > MAX_REPLY_BYTES:
                raise TooLarge
        for line in lines:
            if not line.startswith(b"data:"):  # a blank line between events, or a comment
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                return True
            self._take(event)
        return False


def _headers(headers: Mapping[str, str]) -> str:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break in it")
    return lines


def engine_message(raw: bytes) -> str:
    """The message in an engine's error body, in any of the usual formats, cut to MAX_DETAIL characters."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:MAX_DETAIL].decode("utf-8", "replace").strip() or "(nothing)"
    message: object = body
    for key in ("error", "message", "detail"):
        if isinstance(message, dict) and key in message:
            message = message[key]
    if isinstance(message, list):  # FastAPI's validation errors: location and message, not the input they echo
        message = "; ".join(
            f"{'.'.join(str(part) for part in item.get('loc', ()))}: {item.get('msg', '')}"
            for item in message
            if isinstance(item, dict)
        )
    return str(message)[:MAX_DETAIL]


def session_headers(session_id: str, request_id: str = "") -> dict[str, str]:
    """Headers for sticky routing behind the URL: vLLM's router reads the first name, SGLang's gateway the second."""
    headers = {"X-Session-ID": session_id, "X-SMG-Routing-Key": session_id} if session_id else {}
    if request_id:
        headers["X-Request-Id"] = request_id  # vLLM prefers it to the body's id, and a proxy might set its own
    return headers
