"""A node's calls to its head, against a server that answers as heads, proxies and strangers do."""

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


async def test_a_call_goes_where_the_head_is_now_with_the_token_of_now() -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.path_qs, request.headers["Authorization"], await request.read()))
        reply = Orders(3) if "poll" in request.path else Reported([])
        return web.Response(body=encode(reply), content_type=MEDIA_TYPE)

    async with served(answer) as first, served(answer) as second:
        places = [(first, "one"), (second + "/", "two")]
        async with HeadConnection(lambda: places.pop(0)) as link:
            assert (await link.poll(POLL, 2.5)).number == 3
            assert (await link.report(Report("session", NodeStatus()))).refused == []
    assert seen == [
        ("/v1/fleet/poll?wait_s=2.5", "Bearer one", encode(POLL)),
        ("/v1/fleet/report", "Bearer two", encode(Report("session", NodeStatus()))),
    ]


async def test_a_head_that_has_forgotten_us_says_so() -> None:
    with pytest.raises(NodeUnknown, match="so it is"):
        await polled(always(409, problem("node_unknown")))


async def test_a_head_that_had_let_us_in_may_do_so_again() -> None:
    """It was started again, elsewhere perhaps: whoever knows where will say so, and with which token."""
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
async def test_a_head_that_will_not_have_us_is_not_asked_again(status: int, code: str) -> None:
    with pytest.raises(NodeRefused, match="so it is"):
        await polled(always(status, problem(code)))


async def test_another_protocol_is_not_ours() -> None:
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
    ids=["internal", "unavailable", "no object", "a page", "somebody in between", "another conflict"],
)
async def test_what_no_head_would_say_means_that_it_is_away(handler: Handler) -> None:
    with pytest.raises(HeadUnreachable):
        await polled(handler)


async def test_a_cut_connection_means_that_it_is_away() -> None:
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


async def test_nobody_there_means_that_it_is_away() -> None:
    async with served(always(200, b"")) as url:
        pass
    async with HeadConnection(lambda: (url, "token")) as link:
        with pytest.raises(HeadUnreachable):
            await link.poll(POLL, 0.0)


async def test_one_that_never_answers_is_away_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
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
