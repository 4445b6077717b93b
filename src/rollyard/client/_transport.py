"""Sends one HTTP call until it succeeds, is refused, or runs out of time.

Retries. After 429, and 503 while the service shuts down, any call is sent again, after its Retry-After: the service
refused it and did nothing. Without a response (refused, dropped, timed out), or if the service has lost its store, only
calls are sent again that may be repeated (reads, deletes, and calls with the client's own id) or that were never sent.

Invariants. The retries of one call wait at most `retry_s` in total; then the last error is raised unchanged. A service
that does not answer for QUIET_S is logged as a warning, once, and so is its return: without any configuration of
logging, Python prints both.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from types import TracebackType

import aiohttp
import msgspec

from rollyard.client._discovery import ServiceAddress
from rollyard.client._errors import ServiceUnreachable, UnexpectedReply, error_of
from rollyard.core import RollyardError
from rollyard.core.failure import StoreLost
from rollyard.core.texts import os_reason

log = logging.getLogger("rollyard.client")

PASSING = frozenset({"draining", "store_lost", "too_many_connections"})  # codes of a 503 that is retried

CONNECTIONS = 1024  # a long poll occupies one; further calls wait
BACKOFF_S = (0.1, 5.0)  # first and longest pause between tries
QUIET_S = 1.0  # a shorter outage is not logged
ARROW = "application/vnd.apache.arrow.stream"

Params = Mapping[str, str | int | float | None]


class Transport:
    """The HTTP session with retries."""

    def __init__(self, place: ServiceAddress, timeout_s: float, retry_s: float) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
        self._silent_since: float | None = None
        self._is_silence_logged = False

    async def __aenter__(self) -> Transport:
        pin = self.place.pin
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=True if pin is None else aiohttp.Fingerprint(pin)),
            headers={"Authorization": f"Bearer {self.place.token}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def json(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Params | None = None,
        wait_s: float = 0.0,
        is_repeatable: bool | None = None,
    ) -> object:
        """The JSON of the response, or None if it has no body."""
        payload = None if body is None else msgspec.json.encode(body)
        data, _ = await self.call(method, path, body=payload, params=params, wait_s=wait_s, is_repeatable=is_repeatable)
        if not data:
            return None
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise UnexpectedReply(f"{method} {path} returned a body that is not JSON") from error

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        params: Params | None = None,
        accept: str = "application/json",
        wait_s: float = 0.0,
        is_repeatable: bool | None = None,
    ) -> tuple[bytes, str]:
        """The body and content type of the response. `wait_s` is how long the service itself may take."""
        may_repeat = method != "POST" if is_repeatable is None else is_repeatable
        give_up = time.monotonic() + self.retry_s
        pause_s, longest_s = BACKOFF_S
        while True:
            try:
                reply = await self._once(method, path, body, params, accept, wait_s)
                self.answered()
                return reply
            except RetryableError as again:
                error = again.error
                is_unsure = isinstance(error, ServiceUnreachable | StoreLost)  # whether the call took effect
                if is_unsure and again.was_sent and not may_repeat:
                    raise error from again.__cause__
                delay_s = again.after_s if again.after_s is not None else pause_s * random.uniform(0.5, 1.0)
                if time.monotonic() + delay_s > give_up:
                    raise error from again.__cause__
                if is_unsure:
                    self.not_answered(error, delay_s, give_up)
            await asyncio.sleep(delay_s)
            pause_s = min(longest_s, pause_s * 2)

    def not_answered(self, error: RollyardError, delay_s: float, give_up: float) -> None:
        """Called before each retry. Logs the error once for all calls of this client that it concerns."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        if now + delay_s - self._silent_since >= QUIET_S and not self._is_silence_logged:
            self._is_silence_logged = True
            log.warning("%s; trying again for %.0f s. %s", error.detail, give_up - now, error.remedy)

    def answered(self) -> None:
        self._silent_since = None
        if self._is_silence_logged:
            self._is_silence_logged = False
            log.warning("%s answers again", self.place.url)

    def stream(
        self, path: str, params: Params, *, accept: str, silence_s: float
    ) -> aiohttp.client._RequestContextManager:
        """A GET whose body is read as it arrives; it fails after `silence_s` without data."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=silence_s)
        return self.session.get(self._url(path), params=_query(params), headers={"Accept": accept}, timeout=timeout)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open: use it in `async with` (or `with`)")
        return self._session

    async def _once(
        self, method: str, path: str, body: bytes | None, params: Params | None, accept: str, wait_s: float
    ) -> tuple[bytes, str]:
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s, sock_read=self.timeout_s + wait_s)
        where, url = f"{method} /v1{path}", self.place.url
        try:
            async with self.session.request(
                method, self._url(path), params=_query(params), data=body, headers=headers, timeout=timeout
            ) as reply:
                data = await reply.read()
                await raise_for(reply, data, f"{url} answered {where}")
                return data, reply.content_type
        except aiohttp.ClientConnectorError as error:
            unreachable = ServiceUnreachable(f"cannot connect to {url} ({os_reason(error.os_error)})")
            raise RetryableError(unreachable, was_sent=False) from error
        except TimeoutError as error:
            unreachable = ServiceUnreachable(f"{url} did not answer {where} within {self.timeout_s + wait_s:g} s")
            raise RetryableError(unreachable, was_sent=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, aiohttp.InvalidURL):
                raise ServiceUnreachable(f"{url!r} is not a URL") from error
            unreachable = ServiceUnreachable(f"{url} did not answer {where} ({str(error) or type(error).__name__})")
            raise RetryableError(unreachable, was_sent=True) from error

    def _url(self, path: str) -> str:
        return f"{self.place.url}/v1{path}"


class RetryableError(Exception):
    """An error after which the call may be retried."""

    def __init__(self, error: RollyardError, *, was_sent: bool, after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.was_sent = was_sent
        self.after_s = after_s


async def raise_for(reply: aiohttp.ClientResponse, data: bytes, where: str) -> None:
    """Raises the error of a failed response, wrapped in `RetryableError` if the service did nothing."""
    if reply.status < 400:
        return
    try:
        problem: object = msgspec.json.decode(data)
    except msgspec.DecodeError:
        problem = None
    error = error_of(reply.status, problem, where)
    if reply.status == 429 or (reply.status == 503 and error.code in PASSING):
        raise RetryableError(error, was_sent=True, after_s=_retry_after_s(reply.headers.get("Retry-After")))
    raise error


def _retry_after_s(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:  # a date: allowed by HTTP, never sent by Rollyard
        return None


def _query(params: Params | None) -> dict[str, str]:
    return {key: str(value) for key, value in (params or {}).items() if value is not None}
