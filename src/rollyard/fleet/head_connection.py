"""A node's calls to its head: HTTP, one at a time per loop, and what follows when one fails.

There are three kinds of failure. `HeadUnreachable`: there is no answer, or one from something in between; the head may
come back, at this address or another. `NodeUnknown`: the head does not know this node (it was restarted, or counts the
node as lost): join again. `NodeRefused`: the head will never accept this node as it is (the token, the name, the
protocol): end with that reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from rollyard.core.address import is_clear, split_pin
from rollyard.core.failure import InvalidRequest, NodeReplaced, NodeUnknown
from rollyard.fleet.messages import (
    MEDIA_TYPE,
    Join,
    Joined,
    Orders,
    Poll,
    Report,
    Reported,
    View,
    Viewed,
    decode,
    encode,
)

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

CONNECT_S = 10.0
ANSWER_S = 60.0
"""Timeout of an answer until the head has reported its lease time. A poll may take as much longer as it is held."""

LEAST_ANSWER_S = 5.0
FILE_S = 60.0  # timeout of a file from the head
MOST_LIST_BYTES = 1 << 20

Head = Callable[[], tuple[str, str]]
"""Returns the head's current URL and the token for it."""


class HeadUnreachable(Exception):
    """The head does not answer now."""


class NodeRefused(Exception):
    """The head does not accept this node; the message contains the reason."""


class NodeNameTaken(NodeRefused):
    """Another process has this node's name."""


class HeadConnection:
    """A node's connection to its head."""

    def __init__(self, head: Head, *, may_be_clear: bool = False) -> None:
        """`may_be_clear` allows plain HTTP beyond loopback."""
        self._where = head
        self._may_be_clear = may_be_clear
        self._http: aiohttp.ClientSession | None = None
        self._has_answered = False  # a head has answered
        self.answer_s = ANSWER_S  # later less than a lease: a dead machine does not close connections

    async def __aenter__(self) -> Self:
        import aiohttp  # here, because it takes 0.1 s, and a head does not need it

        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    def _head(self) -> tuple[str, str, aiohttp.Fingerprint | bool]:
        """Returns the URL to call, the token, and the certificate expected there."""
        import aiohttp

        url, token = self._where()
        if not self._may_be_clear and is_clear(url):
            raise NodeRefused(
                f"{url} is plain HTTP, and a token would be sent in the clear: use its https:// address, or"
                " --plain-http on a network that you trust"
            )
        try:
            plain, pin = split_pin(url)
        except ValueError as error:
            raise NodeRefused(f"{url} cannot be used: {error}") from error
        return plain.rstrip("/"), token, True if pin is None else aiohttp.Fingerprint(pin)

    async def settings(self) -> dict[str, Any]:
        """Returns the head's settings for running rollouts."""
        try:
            return msgspec.json.decode(await self.get_bytes("settings", MOST_LIST_BYTES), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise HeadUnreachable(f"what answers is not a head: {error}") from error

    async def join(self, join: Join) -> Joined:
        return await self._call("join", join, Joined, self.answer_s)

    async def poll(self, poll: Poll, wait_s: float) -> Orders:
        return await self._call(f"poll?wait_s={wait_s:g}", poll, Orders, wait_s + self.answer_s)

    async def report(self, report: Report) -> Reported:
        return await self._call("report", report, Reported, self.answer_s)

    async def view(self, view: View, within_s: float) -> Viewed:
        return await self._call("view", view, Viewed, within_s)

    async def get(self, path: str, kind: type[T]) -> T:
        return self._decoded("head", await self.get_bytes(path, MOST_LIST_BYTES), kind)

    async def get_bytes(self, path: str, most_bytes: int) -> bytes:
        """Returns the content of that path, of at most `most_bytes`."""
        import aiohttp

        assert self._http is not None
        url, token, trusted = self._head()
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with (
                asyncio.timeout(FILE_S),
                self._http.get(f"{url}/v1/fleet/{path}", headers=headers, ssl=trusted) as reply,
            ):
                body = bytearray()
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > most_bytes:
                        raise HeadUnreachable(f"{url}: received more than {most_bytes} bytes for {path}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise HeadUnreachable(f"{url}: {type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise _refusal(url, reply.status, bytes(body))
        return bytes(body)

    async def _call(self, path: str, message: msgspec.Struct, kind: type[T], within_s: float) -> T:
        import aiohttp

        assert self._http is not None
        url, token, trusted = self._head()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": MEDIA_TYPE}
        try:
            async with (
                asyncio.timeout(within_s),
                self._http.post(f"{url}/v1/fleet/{path}", data=encode(message), headers=headers, ssl=trusted) as reply,
            ):
                body = await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise HeadUnreachable(f"{url}: {type(error).__name__}: {error}") from error
        if reply.status == 200 and reply.content_type == MEDIA_TYPE:
            self._has_answered = True
            return self._decoded(url, body, kind)
        if self._has_answered and reply.status in (401, 403, 404):  # a new head with another token, or not a head
            raise HeadUnreachable(f"{url} answers {reply.status}, and has accepted this node before")
        raise _refusal(url, reply.status, body)

    @staticmethod
    def _decoded(url: str, body: bytes, kind: type[T]) -> T:
        try:
            return decode(body, kind)
        except InvalidRequest as error:
            raise NodeRefused(f"{url} does not use this node's protocol: {error.detail}") from error


def _refusal(url: str, status: int, body: bytes) -> Exception:
    try:
        problem = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.DecodeError:
        return HeadUnreachable(f"{url} answers {status}, and is not a head")
    code, detail = problem.get("code"), str(problem.get("detail", ""))
    if code == NodeUnknown.code:
        return NodeUnknown(detail)
    if code == NodeReplaced.code:
        return NodeNameTaken(f"{url}: {detail}")
    if status in (400, 401, 403, 404, 413, 422):
        return NodeRefused(f"{url} answers {status}: {detail}")
    return HeadUnreachable(f"{url} answers {status}: {detail}")
