"""HTTP to an engine: the one place where what goes wrong on the wire becomes an EngineFailure.

    connection refused, reset, cut short       EngineUnavailable
    408, 425, 429, 5xx                         EngineUnavailable   (it may well work again, or elsewhere)
    any other 4xx                              EngineRefused       with the engine's own words, `status` in its data,
                                                                   and `context: true` where the prompt is too long
    not JSON, or not the fields it should be   EngineBroken        saying which field

There is no time-out here but for connecting: how long a generation may take, or a stream be silent, is the caller's
business, who cancels. A stream (server-sent events) is handed over event by event as its bytes arrive, and one event
may be as large as a whole reply. One `aiohttp.ClientSession` serves a whole router (`open_http`); nothing throttles
it, since the pools of the pipeline bound how many calls there are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson

from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineUnavailable
from rollyard.engines.base import EngineSpec

CONNECT_S = 10.0
KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that we, and not the engine, close an idle connection
MAX_REPLY_BYTES = 256 << 20  # 1M tokens with logprobs are about 100 MB of JSON
DRAIN_S = 1.0  # for the end of a stream after its last token or its [DONE]: only then can its connection be used again
MAX_DETAIL = 400  # characters of an engine's message that we repeat; some echo the whole prompt

_RETRYABLE_4XX = frozenset({408, 425, 429})
_CONTEXT = re.compile(
    r"context.{0,12}(length|window|limit)|max(imum)?[ _]model[ _]len(gth)?|"
    r"longer than the (model|maximum)|exceeds? the (model|maximum).{0,40}(length|tokens)",
    re.IGNORECASE,
)

T = TypeVar("T")


def open_http() -> aiohttp.ClientSession:
    """The pooled session that all engines of a router share."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=300)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Wire:
    """One engine's URL, key and errors over a shared session."""

    def __init__(self, spec: EngineSpec, http: aiohttp.ClientSession) -> None:
        self._id = spec.id
        self._url = spec.url.rstrip("/").removesuffix("/v1")
        self._http = http
        self._base_headers = {"Content-Type": "application/json"}
        if spec.api_key:
            self._base_headers["Authorization"] = f"Bearer {spec.api_key}"

    async def get(self, path: str) -> bytes:
        return await self._send("GET", path, None, {})

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
        # OPT_SERIALIZE_NUMPY costs nothing and lets a caller hold its prompt as it likes
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._send("POST", path, data, headers or {})

    def read(self, raw: bytes, shape: type[T], what: str) -> T:
        """The reply as `shape`, or EngineBroken naming the field that is not as it should be."""
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
        """Posts, and hands the data of each event to `take` as it comes; returns after [DONE] or at the end."""
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._asked("POST", path, data, headers) as response:
            if response.status >= 300 or response.content_type != "text/event-stream":
                self._check(path, response, await _read_bounded(response))
                raise self.broken(f"{path} answered {response.content_type} where a stream was asked for")
            pieces: list[bytes] = []  # of a line whose end has not come: joined once, however many they are
            size = 0
            async for chunk in response.content.iter_any():
                *lines, rest = chunk.split(b"\n")
                if lines:
                    lines[0] = b"".join((*pieces, lines[0]))
                    pieces, size = [], 0
                if rest:
                    pieces.append(rest)
                    size += len(rest)
                if size > MAX_REPLY_BYTES:
                    raise self.broken(f"{path} streamed a line of more than {MAX_REPLY_BYTES} bytes")
                for line in lines:
                    if not line.startswith(b"data:"):  # blank lines between events, and comments
                        continue
                    event = line[5:].strip()
                    if event == b"[DONE]":
                        await _drain(response)
                        return
                    take(event)

    async def _send(self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
        async with self._asked(method, path, data, headers) as response:
            raw = await _read_bounded(response)
        return self._check(path, response, raw)

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        try:
            async with self._http.request(
                method,
                self._url + path,
                data=data,
                headers={**self._base_headers, **headers},
                allow_redirects=False,  # an engine is where it was said to be
            ) as response:
                yield response
        except aiohttp.ClientError as error:
            # ClientError covers refused, reset, cut short, TLS and a malformed HTTP reply alike
            raise EngineUnavailable(f"engine {self._id} cannot be reached: {_say(error)}") from error
        except (TimeoutError, OSError) as error:
            raise EngineUnavailable(f"engine {self._id} cannot be reached: {_say(error)}") from error

    def _check(self, path: str, response: aiohttp.ClientResponse, raw: bytes | None) -> bytes:
        if raw is None:
            raise self.broken(f"{path} answered more than {MAX_REPLY_BYTES} bytes")
        if response.status >= 300:
            raise self.refusal(response.status, f"{path} answered {response.status}: {engine_message(raw)}")
        return raw

    def refusal(self, status: int, what: str) -> EngineFailure:
        """The failure that a status and the engine's own words mean."""
        detail = f"engine {self._id}: {what}"
        if status >= 500 or status in _RETRYABLE_4XX:
            return EngineUnavailable(detail, status=status)
        if _CONTEXT.search(what):
            return EngineRefused(detail, status=status, context=True)
        return EngineRefused(detail, status=status)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes | None:
    """The body, or None if it is larger than we take."""
    length = response.content_length
    if length is not None and response.headers.get("Content-Encoding") is None:
        return await response.read() if length <= MAX_REPLY_BYTES else None
    chunks = bytearray()
    async for chunk in response.content.iter_any():
        chunks += chunk
        if len(chunks) > MAX_REPLY_BYTES:
            return None
    return bytes(chunks)


async def _drain(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(DRAIN_S):
            await response.content.readany()
    except (TimeoutError, aiohttp.ClientError):
        pass  # all that was wanted has come; the connection is closed instead of used again


def engine_message(raw: bytes) -> str:
    """What an engine says in an error body, in any of the shapes that are about, bounded."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:MAX_DETAIL].decode("utf-8", "replace").strip() or "(nothing)"
    found: object = body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    if isinstance(found, list):  # FastAPI's validation errors: where and what, never the input they echo
        found = "; ".join(
            f"{'.'.join(str(part) for part in item.get('loc', ()))}: {item.get('msg', '')}"
            for item in found
            if isinstance(item, dict)
        )
    return str(found)[:MAX_DETAIL]


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL] if str(error) else type(error).__name__


def session_headers(session_id: str, request_id: str = "") -> dict[str, str]:
    """Lets a router behind the URL stick too: vLLM's reads the first name, SGLang's gateway the second."""
    headers = {"X-Session-ID": session_id, "X-SMG-Routing-Key": session_id} if session_id else {}
    if request_id:
        headers["X-Request-Id"] = request_id  # vLLM takes this before the body's; a proxy might set its own
    return headers
