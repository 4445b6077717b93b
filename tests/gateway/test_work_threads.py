"""A long rendering delays only its own session."""

import asyncio
import threading

import aiohttp
import pytest

from rollyard.gateway.work_threads import LONG_CHARS, WorkThreads, text_size
from tests.gateway.site import gateway
from tests.gateway.test_session import ask, body, says


async def test_long_work_runs_in_a_thread_and_short_work_does_not():
    threads = WorkThreads()
    here = threading.get_ident()
    assert await threads.run(LONG_CHARS, lambda _: threading.get_ident(), None) == here
    assert await threads.run(LONG_CHARS + 1, lambda _: threading.get_ident(), None) != here


async def test_a_session_runs_one_long_piece_at_a_time_even_after_a_cancellation():
    threads = WorkThreads()
    started, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def first(name: str) -> None:
        started.set()
        may_end.wait(30)
        done.append(name)

    one = asyncio.create_task(threads.run(LONG_CHARS + 1, first, "one"))
    await asyncio.to_thread(started.wait, 30)
    one.cancel()
    two = asyncio.create_task(threads.run(LONG_CHARS + 1, done.append, "two"))
    await asyncio.sleep(0.05)
    assert done == []
    may_end.set()
    await two
    assert done == ["one", "two"]


async def test_an_exception_in_a_thread_is_raised():
    def wrong(_: None) -> None:
        raise ValueError("no")

    threads = WorkThreads()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await threads.run(LONG_CHARS + 1, wrong, None)


def test_the_size_of_a_message_is_that_of_its_strings():
    call = {"function": {"name": "f", "arguments": "12345"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}], "tool_calls": [call]}]
    assert text_size(messages) == len("user") + len("typetexttextabc") + len("functionnamefarguments12345")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert text_size([{"content": deep}]) == 0  # type: ignore[dict-item]


async def test_a_long_request_is_one_trace_like_any_other():
    text = "go " + "word " * LONG_CHARS
    options = {"max_context": 1 << 20}
    async with gateway(says("first", "second"), engine_options=options) as site, aiohttp.ClientSession() as http:
        assert (await ask(http, site, body(text)))["status"] == 200
        answer = await ask(http, site, body(text, "first", text))
        assert answer["status"] == 200
        (trace,) = site.verified().traces
        assert len(trace.spans) == 2 and site.forks == {}
