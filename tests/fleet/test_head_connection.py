"""A node's calls to its head, against a server that answers like heads, proxies and other servers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollyard.core.failure import NodeUnknown
from rollyard.fleet import head_connection as module
from rollyard.fleet.head_connection import HeadConnection, HeadUnreachable, NodeRefused
from rollyard.fleet.messages import MEDIA_TYPE, NodeStatus, Orders, Poll, Report, Reported, encode

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
POLL = Poll("session", NodeStatus())


@asynccontextmanager
async def served(handler: Handler) -> AsyncGenerator[str, None]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def always(status: int, body: bytes, media_type: str = "application/problem+json") -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(status=status, body=body, content_type=media_type)

    return answer


def problem(code: str) -> bytes:
    return json.dumps({"code": code, "detail": "so it is"}).encode()


async def polled(handler: Handler) -> Orders:
    async with served(handler) as url, HeadConnection(lambda: (url, "token")) as link:
        return await link.poll(POLL, 0.0)


async def test_a_call_uses_the_heads_current_address_and_token() -> None:
    requests: list[tuple[str, str, bytes]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        requests.append((request.path_qs, request.headers["Authorization"], await request.read()))
        reply = Orders(3) if "poll" in request.path else Reported([])
        return web.Response(body=encode(reply), content_type=MEDIA_TYPE)

    async with served(answer) as first, served(answer) as second:
        places = [(first, "one"), (second + "/", "two")]
        async with HeadConnection(lambda: places.pop(0)) as link:
            assert (await link.poll(POLL, 2.5)).number == 3
            assert (await link.report(Report("session", NodeStatus()))).refused == []
    assert requests == [
        ("/v1/fleet/poll?wait_s=2.5", "Bearer one", encode(POLL)),
        ("/v1/fleet/report", "Bearer two", encode(Report("session", NodeStatus()))),
    ]


async def test_a_head_that_does_not_know_the_node_raises_node_unknown() -> None:
    with pytest.raises(NodeUnknown, match="so it is"):
        await polled(always(409, problem("node_unknown")))


async def test_a_refusal_by_a_head_that_accepted_the_node_before_is_temporary() -> None:
    """The head was restarted, perhaps elsewhere: its new address and token will be given to the node."""
    answers = [(200, encode(Orders(1)), MEDIA_TYPE), (401, problem("unauthorized"), "application/problem+json")]

    async def answer(request: web.Request) -> web.StreamResponse:
        status, body, media_type = answers.pop(0)
        return web.Response(status=status, body=body, content_type=media_type)

    async with served(answer) as url, HeadConnection(lambda: (url, "token")) as link:
        await link.poll(POLL, 0.0)
        with pytest.raises(HeadUnreachable):
            await link.poll(POLL, 0.0)


@pytest.mark.parametrize(
    ("status", "code"), [(409, "node_replaced"), (401, "unauthorized"), (403, "forbidden"), (404, "not_found")]
)
async def test_a_head_that_refuses_the_node_raises_node_refused(status: int, code: str) -> None:
    with pytest.raises(NodeRefused, match="so it is"):
        await polled(always(status, problem(code)))


async def test_an_answer_in_another_protocol_is_refused() -> None:
    with pytest.raises(NodeRefused, match="protocol"):
        await polled(always(200, b"\xc1 nonsense", MEDIA_TYPE))


@pytest.mark.parametrize(
    "handler",
    [
        always(500, problem("internal_error")),
        always(503, b"<html>come back later</html>", "text/html"),
        always(502, b'["not", "an", "object"]'),
        always(200, b"<html>welcome</html>", "text/html"),
        always(401, b"<html>log in</html>", "text/html"),
        always(409, problem("something_else")),
    ],
    ids=["internal", "unavailable", "no object", "a page", "a proxy", "another conflict"],
)
async def test_an_answer_that_is_not_a_heads_means_unreachable(handler: Handler) -> None:
    with pytest.raises(HeadUnreachable):
        await polled(handler)


async def test_a_broken_connection_means_unreachable() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def cut_midway(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE, "Content-Length": "1000"})
        await reply.prepare(request)
        await reply.write(b"\x80")
        assert request.transport is not None
        request.transport.abort()
        return reply

    for handler in (cut, cut_midway):
        with pytest.raises(HeadUnreachable):
            await polled(handler)


async def test_a_closed_port_means_unreachable() -> None:
    async with served(always(200, b"")) as url:
        pass
    async with HeadConnection(lambda: (url, "token")) as link:
        with pytest.raises(HeadUnreachable):
            await link.poll(POLL, 0.0)


async def test_a_head_that_never_answers_is_unreachable_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    ended = asyncio.Event()

    async def never(_: web.Request) -> web.StreamResponse:
        await ended.wait()
        return web.Response()

    async with served(never) as url, HeadConnection(lambda: (url, "token")) as link:
        try:
            with pytest.raises(HeadUnreachable):
                await link.poll(POLL, 0.0)
        finally:
            ended.set()
