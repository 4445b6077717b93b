"""Hostile requests do not block the event loop: bounds are checked before the work, and the work is done in threads."""

import asyncio
import io
import json
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.failure import InvalidRequest
from rollyard.gateway import intake, parser
from rollyard.gateway import work_threads as work_threads_module
from rollyard.gateway.app import CHAT, MESSAGES, RESPONSES, GatewayApp
from rollyard.gateway.base import Problem
from rollyard.gateway.body_size import LIGHT_BYTES, LIGHT_VALUES, STEP_BYTES, has_more_values, weight_of
from rollyard.gateway.counts import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS
from rollyard.gateway.intake import (
    MOST_BYTES_PER_TOKEN,
    MOST_VALUES,
    PIECE_CHARS,
    SLACK_BYTES,
)
from rollyard.gateway.work_threads import LARGE_BYTES, WorkThreads
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import Tokenizers
from rollyard.tokens.chatml import ChatML
from rollyard.tokens.tokenizer import STEP_CHARS
from tests.gateway.site import Site, gateway
from tests.gateway.test_session import body, says

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "go"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
PATHS = {CHAT: "chat/completions", RESPONSES: "responses", MESSAGES: "messages"}
RENDERER = ChatML(Tokenizers().load(str(tokenizer_dir())))


async def post(site: Site, raw: bytes, path: str = "chat/completions") -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"{site.url}/v1/{path}", data=io.BytesIO(raw), headers={"content-type": "application/json"}
        ) as answer,
    ):
        return answer.status, await answer.json()


@asynccontextmanager
async def ticking() -> AsyncGenerator[list[None], None]:
    """Adds a tick at each iteration of the event loop."""
    ticks: list[None] = []

    async def tick() -> None:
        while True:
            ticks.append(None)
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


# --- refusals, by bound


def messages_of(dialect: Any, items: Any, **fields: Any) -> bytes:
    name = "input" if dialect is RESPONSES else "messages"
    return orjson.dumps({"model": "any", name: items, **fields})


@pytest.mark.parametrize("dialect", PATHS, ids=lambda dialect: dialect.name)
async def test_more_messages_parts_or_tools_than_the_bound_are_refused_by_name(dialect: Any):
    kind = "input_text" if dialect is RESPONSES else "text"
    part = {"type": kind, "text": ""}
    parts = [{"role": "user", "content": [part] * (MOST_PARTS // 2)}] * 2
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part] * MOST_PARTS}
    hostile = {
        f"maximum length {MOST_MESSAGES}": messages_of(
            dialect, [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)
        ),
        f"{MOST_PARTS} is the maximum": messages_of(dialect, [*parts, {"role": "user", "content": [part]}]),
        f"maximum length {MOST_TOOLS}": messages_of(dialect, [USER], tools=[{}] * (MOST_TOOLS + 1)),
        "at most 256 characters": messages_of(dialect, [USER], model="m" * 257),
    }
    if dialect is MESSAGES:
        hostile[f"and {MOST_PARTS} is"] = messages_of(dialect, [{"role": "user", "content": [result]}])
    async with gateway(says("ok")) as site:
        for bound, raw in hostile.items():
            status, answer = await post(site, raw, PATHS[dialect])
            assert status == 400 and bound in answer["error"]["message"], answer
            assert answer["error"]["type"] == "invalid_request_error"
        assert site.engine.calls == [] or all(not call.session_id for call in site.engine.calls)


@pytest.mark.parametrize("dialect", PATHS, ids=lambda dialect: dialect.name)
async def test_a_body_of_too_many_values_is_never_parsed(dialect: Any, monkeypatch: pytest.MonkeyPatch):
    parsed: list[int] = []
    loads = orjson.loads
    monkeypatch.setattr(parser.orjson, "loads", lambda raw: (parsed.append(len(raw)), loads(raw))[1])
    bodies = [
        b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 578_000) + b"]}",
        b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}",
        b'{"a":' + b'{"a":' * MOST_VALUES + b"1" + b"}" * (MOST_VALUES + 1),
    ]
    async with gateway(says("ok"), engine_options={"max_context": 1 << 20}) as site, ticking() as ticks:
        for raw in bodies:
            before = len(ticks)
            status, answer = await post(site, raw, PATHS[dialect])
            assert status == 413 and f"more than {MOST_VALUES} JSON values" in answer["error"]["message"]
            assert len(ticks) > before + 3
    assert not parsed or max(parsed) < min(map(len, bodies))


async def test_a_body_that_is_far_beyond_the_context_is_not_read(monkeypatch: pytest.MonkeyPatch):
    async with gateway(says("ok"), engine_options={"max_context": 1000}) as site:
        monkeypatch.setattr(intake, "parsed_body", lambda _: pytest.fail("it was read"))
        raw = b"{" * (SLACK_BYTES + 1000 * MOST_BYTES_PER_TOKEN + 1)
        for path in PATHS.values():
            status, answer = await post(site, raw, path)
            assert status == 400 and "1000" in answer["error"]["message"], answer
        monkeypatch.undo()
        assert (await post(site, raw[:-1]))[0] == 413


async def test_a_body_that_is_too_long_for_the_context_is_not_stored_while_it_arrives():
    """A sandbox has 16 connections, and each would hold 16 MiB until its last byte."""
    chunk = b"x" * (256 << 10)
    received: list[int] = []
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        received.append(len(chunk))
        return {"type": "http.request", "body": chunk, "more_body": len(received) < 64}

    async def send(message: Any) -> None:
        sent.append(message)

    async with gateway(says("ok"), engine_options={"max_context": 1000}) as site:
        scope = {"headers": [], "path": "/v1/chat/completions", "method": "POST"}
        await GatewayApp(site.session)(scope, receive, send)
    assert sent[0]["status"] == 400 and b"context_length_exceeded" in sent[1]["body"]
    assert sum(received) <= SLACK_BYTES + 1000 * MOST_BYTES_PER_TOKEN + len(chunk)


async def test_a_piece_that_cannot_be_started_does_not_block_the_next(monkeypatch: pytest.MonkeyPatch):
    threads = WorkThreads()
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    with monkeypatch.context() as patched:
        patched.setattr(work_threads_module, "_SMALL", closed)
        with pytest.raises(RuntimeError):
            await threads.thread(1, len, "abc")
    assert await threads.thread(1, len, "abc") == 3


def test_a_long_text_full_of_commas_is_not_counted_as_many_values():
    text = 'x = {"a": [1, 2, 3]}\n' * 100_000
    request = intake.read(CHAT, orjson.dumps(body(text)))
    assert request.messages[0]["content"] == text


@pytest.mark.parametrize("field", ["content", "reasoning_content", "arguments", "description"])
async def test_a_text_that_cannot_fit_is_never_tokenized_whole(field: str, monkeypatch: pytest.MonkeyPatch):
    encoded_chars: list[int] = []
    encode = ChatML.encode
    monkeypatch.setattr(ChatML, "encode", lambda self, text: (encoded_chars.append(len(text)), encode(self, text))[1])
    text = "word " * (2 << 20)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    turns: dict[str, Any] = {
        "content": {"messages": [{"role": "user", "content": text}]},
        "reasoning_content": {
            "messages": [USER, {"role": "assistant", "content": "", "reasoning_content": text}, USER]
        },
        "arguments": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]},
        "description": {"messages": [USER], "tools": [{**TOOL, "function": {"name": "f", "description": text}}]},
    }
    async with gateway(says("ok"), engine_options={"max_context": 4096}) as site, ticking() as ticks:
        rendered: list[None] = []
        monkeypatch.setattr(ChatML, "render", lambda *_: rendered.append(None))
        status, answer = await post(site, orjson.dumps({"model": "any", **turns[field]}))
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        assert "maximum context length is 4096 tokens" in answer["error"]["message"]
        assert not rendered and max(encoded_chars, default=0) <= PIECE_CHARS and len(ticks) > 3
        assert site.session.overflow is not None


async def test_a_text_that_fits_is_not_refused_however_few_tokens_it_has():
    text = "-" * 400_000
    tokens = len(RENDERER.encode(text))
    assert tokens > 0
    async with gateway(says("ok"), engine_options={"max_context": tokens + 100}) as site:
        status, _ = await post(site, orjson.dumps(body(f"go {text}")))
        assert status == 200


@pytest.mark.parametrize(
    "raw", [b"[" * 500_000, b'{"messages":' * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"]
)
async def test_deep_nesting_is_refused(raw: bytes):
    async with gateway(says("ok")) as site:
        status, _ = await post(site, raw)
        assert status in (400, 413)


async def test_an_error_does_not_repeat_megabytes():
    huge = ["x" * 100] * 10_000
    for dialect, item in (
        (CHAT, {"role": huge, "content": ""}),
        (CHAT, {"role": "r" * (1 << 20), "content": ""}),
        (RESPONSES, {"role": huge, "content": ""}),
        (RESPONSES, {"type": "t" * (1 << 20)}),
        (RESPONSES, {"role": "user", "content": [{"type": "p" * (1 << 20)}]}),
        (MESSAGES, {"role": "user", "content": [{"type": "p" * (1 << 20)}]}),
    ):
        with pytest.raises(Problem) as caught:
            intake.read(dialect, messages_of(dialect, [item]))
        assert len(caught.value.message) < 400


async def test_a_response_does_not_echo_megabytes():
    raw = orjson.dumps({"model": "any", "instructions": "go " * 100_000, "input": "go", "stream": True})
    async with (
        gateway(says("ok"), engine_options={"max_context": 1 << 20}) as site,
        aiohttp.ClientSession() as http,
        http.post(f"{site.url}/v1/responses", data=raw) as answer,
    ):
        assert answer.status == 200 and len(await answer.read()) < 20_000


# --- threads


async def test_light_requests_are_read_on_the_event_loop_and_others_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []
    read = intake.parsed_body
    monkeypatch.setattr(
        intake, "parsed_body", lambda raw: (threads.append(threading.current_thread().name), read(raw))[1]
    )
    here = threading.current_thread().name
    many = [{"role": "user", "content": "go"}, {"role": "assistant", "content": ""}] * 300
    async with gateway(says("ok"), engine_options={"max_context": 1 << 20}) as site:
        for raw in (body("go"), body("go" * LIGHT_BYTES), {"model": "any", "messages": [*many, USER]}):
            assert (await post(site, orjson.dumps(raw)))[0] == 200
    assert threads[0] == here and all(name.startswith("gateway-small") for name in threads[1:])


async def test_all_work_for_a_heavy_request_runs_in_threads(monkeypatch: pytest.MonkeyPatch):
    here = threading.get_ident()
    calls: set[tuple[str, bool]] = set()

    def watched(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **named: Any) -> Any:
            calls.add((name, threading.get_ident() == here))
            return inner(*args, **named)

        monkeypatch.setattr(owner, name, outer)

    for name in ("parsed_body", "request_of", "key_of"):
        watched(intake, name)
    watched(intake.RequestLog, "read")
    for name in ("find", "extended", "rendered"):
        watched(intake.ConversationBook, name)
    text = "go, [{" * 20_000
    async with gateway(says("ok", "ok"), engine_options={"max_context": 1 << 20}) as site:
        assert (await post(site, orjson.dumps(body(text))))[0] == 200
        assert (await post(site, orjson.dumps(body(text, "ok", text))))[0] == 200
        (trace,) = site.verified().traces
        assert len(trace.spans) == 2
    names = ("parsed_body", "request_of", "read", "key_of", "find", "extended", "rendered")
    assert calls == {(name, False) for name in names}


async def test_large_work_of_many_sessions_does_not_delay_small_work():
    may_end = threading.Event()
    large = [asyncio.create_task(WorkThreads().thread(LARGE_BYTES + 1, may_end.wait, 30.0)) for _ in range(8)]
    try:
        await asyncio.sleep(0)
        assert await WorkThreads().thread(LARGE_BYTES, len, "abc") == 3
        assert not any(task.done() for task in large)
    finally:
        may_end.set()
        await asyncio.gather(*large)


async def test_sessions_take_turns(monkeypatch: pytest.MonkeyPatch):
    """A session with ten pieces does not delay another with one."""
    monkeypatch.setattr(work_threads_module, "_SMALL", ThreadPoolExecutor(1))  # of two, one could run more meanwhile
    started, may_go = threading.Semaphore(0), threading.Event()
    order: list[str] = []

    def hold(_: None) -> None:
        started.release()
        may_go.wait(30)

    blocker = asyncio.create_task(WorkThreads().thread(1, hold, None))
    await asyncio.to_thread(started.acquire)
    greedy, modest = WorkThreads(), WorkThreads()
    pieces = [asyncio.create_task(greedy.thread(1, order.append, "greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    pieces.append(asyncio.create_task(modest.thread(1, order.append, "modest")))
    await asyncio.sleep(0)
    may_go.set()
    await asyncio.gather(blocker, *pieces)
    assert order.index("modest") == 1


# --- counting values without parsing


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab",{[\\é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\,', max_size=3), inner, max_size=5),
    max_leaves=40,
)


@given(JSON)
def test_a_count_is_never_less_than_the_number_of_values(value: Any):
    raw, values = json.dumps(value).encode(), count(value)
    assert weight_of(raw).values + 1 >= values
    assert has_more_values(raw, values * 2) is False
    assert has_more_values(raw, values // 2 - 1)


@given(st.integers(0, 8), st.sampled_from(['"', "\\", "\\\\", '\\"', "é"]))
def test_a_text_longer_than_a_step_is_left_out_of_the_count(before: int, end: str):
    """An escape at the end of a step belongs to the next one."""
    text = "," * (STEP_BYTES - before) + end + "," * (LIGHT_VALUES + 10)
    raw = orjson.dumps([text, 1])
    assert not has_more_values(raw, 10)
    assert has_more_values(orjson.dumps([text, *[1] * 20]), 10)


@given(
    st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "x", "\ud800"]), max_size=12),
    st.integers(-14, 2),
)
def test_escaping_in_steps_equals_escaping_at_once(parts: list[str], offset: int):
    tokenizer = RENDERER._tokenizer
    text = "a" * (STEP_CHARS + offset) + "".join(parts) * 3 + "b" * STEP_CHARS + "<|im_end|>"
    assert tokenizer.escape(text) == tokenizer._escaped(text)


def test_no_token_is_longer_than_the_longest():
    tokenizer = RENDERER._tokenizer
    longest = RENDERER.longest_token_chars
    assert max(len(tokenizer.decode(token)) for token in range(tokenizer.vocab_size)) <= longest


def test_a_tokenizer_that_panics_is_an_invalid_request():
    """A Rust panic is not an Exception: it would pass every handler."""
    with pytest.raises(InvalidRequest, match="cannot encode this text"):
        RENDERER.encode(" " * 11_000_000)


def test_a_long_text_is_encoded_without_the_interpreter():
    """The event loop continues while another thread tokenizes."""
    done = threading.Event()
    thread = threading.Thread(target=lambda: (RENDERER.encode("word, {x} " * 50_000), done.set()))
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 3


def test_both_encoders_return_the_same_ids():
    text = "A few words, 漢字 🚀 <|im_end|> and\n\n\tmore. " * 60
    backend = RENDERER._tokenizer._backend
    assert RENDERER.encode(text) == backend.encode(text, add_special_tokens=False).ids
