"""Streams over real HTTP: tokens as they arrive, and streams that fail."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineTimeout, EngineUnavailable
from rollyard.engines import (
    EngineSpec,
    GenerateRequest,
    Kind,
    SglangEngine,
    VersionSpan,
    VllmEngine,
    make_engine,
)
from rollyard.engines.base import Generation
from rollyard.engines.clients import http as http_module
from rollyard.engines.clients import remote, transport
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.routing.completion import PartialCompletion
from rollyard.testing.script import Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import END_ID, PROMPT, TOKENIZER, probed

DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
    "sglang, incremental": {"dialect": "sglang", "is_incremental": True},
}
WORDS = "the quick brown fox jumps over the lazy dog"
IDS = TOKENIZER.encode(WORDS)


def request(name: str = "r1", **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(), **{"max_tokens": 100, "session_id": "s1", **fields})


class TokenRecorder:
    """Records the batches of tokens that an engine passes on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.came = asyncio.Event()

    def __call__(self, ids: Any) -> None:
        self.batches.append(list(ids))
        self.came.set()

    @property
    def ids(self) -> list[int]:
        return [token for batch in self.batches for token in batch]


@asynccontextmanager
async def streaming(
    *events: object, ends: bool = True, holds_s: float = 0.0, kind: str = "text/event-stream"
) -> AsyncGenerator[str, None]:
    """A server that streams these events (bytes unchanged) to each request, then [DONE] if `ends`, and holds the
    connection open for `holds_s`."""
    closing = asyncio.Event()

    async def handle(asked: web.BaseRequest) -> web.StreamResponse:
        await asked.read()
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(asked)
        for event in events:
            await response.write(event if isinstance(event, bytes) else b"data: " + orjson.dumps(event) + b"\n\n")
        if ends:
            await response.write(b"data: [DONE]\n\n")
        with suppress(TimeoutError):
            async with asyncio.timeout(holds_s):
                await closing.wait()
        return response

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        closing.set()
        await runner.cleanup()


def vllm_event(*ids: int, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": finish, "logprobs": {"content": content}, **fields}
    return {"choices": [choice]}


def sglang_event(ids: list[int], total: int, finish: str | None = None, **meta: Any) -> dict[str, Any]:
    entries = [[-0.5, token, None] for token in ids]
    reason = None if finish is None else {"type": finish}
    known = {"finish_reason": reason, "completion_tokens": total, "output_token_logprobs": entries, **meta}
    return {"output_ids": ids, "meta_info": known}


def vllm_at(url: str, http: HttpPool) -> VllmEngine:
    return VllmEngine(EngineSpec("e", url, Kind.VLLM), http)


def sglang_at(url: str, http: HttpPool) -> SglangEngine:
    return SglangEngine(EngineSpec("e", url, Kind.SGLANG), http)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_tokens_are_passed_on_as_they_arrive(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: WORDS, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply(WORDS, stall_after=4)
        recorder = TokenRecorder()
        task = asyncio.create_task(engine.generate(request("r1"), recorder))
        await recorder.came.wait()
        assert recorder.ids == IDS[:4] and server.running == 1
        await engine.abort("r1")
        assert list((await task).token_ids) == IDS[:4]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_gives_what_a_call_without_one_gives(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: WORDS, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        whole = await engine.generate(request(stop_token_ids=(END_ID,)))
        server.script = lambda _: Reply(WORDS, tokens_per_s=400)
        recorder = TokenRecorder()
        streamed = await engine.generate(request(stop_token_ids=(END_ID,)), recorder)
        assert recorder.ids == list(streamed.token_ids) == list(whole.token_ids)
        assert streamed.logprobs == whole.logprobs and streamed.finish_reason == "stop"
        assert (streamed.prompt_tokens, streamed.cached_tokens) == (len(PROMPT), len(PROMPT) - 1)
        assert not any("does not stream" in note for note in engine.info.notes)


async def test_a_call_without_on_tokens_is_not_streamed(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        engine = await probed(server, http)
        await engine.generate(request())
        assert "stream" not in server.calls[-1].body
        await engine.generate(request(), TokenRecorder())
        assert server.calls[-1].body["stream"] is True


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (500, EngineUnavailable),
        (400, EngineRefused),
        ("cut", EngineUnavailable),
        ("not_json", EngineBroken),
        ("no_token_ids", EngineBroken),
        ("wrong_ids", EngineBroken),
        ("fewer_logprobs", EngineBroken),
        ("positive_logprob", EngineBroken),
    ],
)
async def test_a_fault_before_the_first_token_raises_as_in_a_plain_call(
    fault: Any, error: type[EngineFailure], dialect: str, http: HttpPool
) -> None:
    async with ScriptedEngine(lambda _: "ok", **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.fail_next(1, fault)
        recorder = TokenRecorder()
        with pytest.raises(error) as caught:
            await engine.generate(request(), recorder)
        assert type(caught.value) is error and recorder.ids == []
        assert len((await engine.generate(request(), recorder)).token_ids) == 3, "it works after a fault"
        await engine.close()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "fault",
    ["cut_midway", "error_midway", "not_json", "no_token_ids", "wrong_ids", "fewer_logprobs", "positive_logprob"],
)
async def test_a_fault_after_the_first_token_keeps_the_tokens_so_far(
    fault: Any, dialect: str, http: HttpPool, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(lambda _: WORDS, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        whole = await engine.generate(request())
        server.script = lambda _: Reply(WORDS, tokens_per_s=400)
        server.fail_next(1, fault)
        recorder = TokenRecorder()
        with caplog.at_level(logging.WARNING, "rollyard.engines"):
            part = await engine.generate(request(), recorder)
        assert part.finish_reason == "abort" and recorder.ids == list(part.token_ids)
        count = len(part.token_ids)
        assert 0 < count < len(whole.token_ids) and part.token_ids == whole.token_ids[:count]
        assert part.logprobs is not None and whole.logprobs is not None and part.logprobs == whole.logprobs[:count]
        assert "a stream broke off; its tokens so far are kept" in caplog.messages
        await engine.close()
        await server.idle()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_version_that_is_not_a_number_drops_only_the_tokens_of_its_event(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: WORDS, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply(WORDS, tokens_per_s=400)
        server.fail_next(1, "bad_version")
        recorder = TokenRecorder()
        part = await engine.generate(request(), recorder)
        assert part.finish_reason == "abort" and 0 < len(part.token_ids) <= len(IDS)
        assert all(span.version < 0 for span in part.versions)
        assert recorder.ids == list(part.token_ids)
        await engine.close()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", ["no_logprobs", "missing_logprob"])
async def test_missing_logprobs_are_none_in_a_stream_too(fault: Any, dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: Reply(WORDS), **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply(WORDS, tokens_per_s=400)
        server.fail_next(1, fault)
        generation = await engine.generate(request(), TokenRecorder())
        assert generation.logprobs is None and len(generation.token_ids) == len(IDS) + 1


async def test_the_versions_of_a_stream_are_spans_over_all_tokens(http: HttpPool, web: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply("abcdef", stall_after=4)
        server.version = "7"
        recorder = TokenRecorder()
        task = asyncio.create_task(engine.generate(request("r1"), recorder))
        await recorder.came.wait()
        async with web.post(f"{server.url}/update_weight_version", json={"new_version": "8"}):
            pass
        await engine.abort("r1")
        assert (await task).versions == (VersionSpan(7, 0, 4),) and recorder.ids == list(b"abcd")


async def test_sglang_reports_a_version_with_each_event(http: HttpPool) -> None:
    events = (
        sglang_event([1, 2], 2, weight_version="3"),
        sglang_event([1, 2, 3], 3, weight_version="4"),
        sglang_event([1, 2, 3], 3, "stop", weight_version="4"),
    )
    async with streaming(*events) as url:
        generation = await sglang_at(url, http).generate(request(), TokenRecorder())
        assert generation.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_cancelling_a_stream_aborts_it_by_id(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok", **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply("long", stall_after=2)
        recorder = TokenRecorder()
        task = asyncio.create_task(engine.generate(request("r9"), recorder))
        await recorder.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.idle()
        await engine.close()
        assert [name for name in server.aborted if "r9" in name]


async def test_an_invalid_event_in_a_stream_frees_the_engine(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply(WORDS, tokens_per_s=400)
        server.fail_next(1, "not_json")
        await engine.generate(request("r9"), TokenRecorder())
        await engine.close()
        assert [name for name in server.aborted if "r9" in name]


async def test_hanging_up_a_silent_stream_is_a_timeout(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        engine = await probed(server, http)
        server.script = lambda _: Reply("x", fault="hang")
        task = asyncio.create_task(engine.generate(request("r9"), TokenRecorder()))
        await server.busy()
        engine.hang_up("r9")
        with pytest.raises(EngineTimeout, match="streamed nothing"):
            await task
        await engine.close()
        assert [name for name in server.aborted if "r9" in name]


async def test_an_engine_that_does_not_stream_returns_all_tokens_at_the_end(http: HttpPool) -> None:
    whole = {"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}

    async def handle(asked: web.BaseRequest) -> web.StreamResponse:
        if asked.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if asked.path == "/version":
            return web.json_response({"version": "old"})
        return web.json_response(whole | {"choices": [{**whole["choices"][0], "token_ids": [1]}]})  # type: ignore[dict-item]

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        engine = make_engine(EngineSpec("e", f"http://127.0.0.1:{runner.addresses[0][1]}", Kind.VLLM), http)
        info = await engine.probe()
        assert "it does not stream: tokens come all at once, at the end" in info.notes
        recorder = TokenRecorder()
        assert list((await engine.generate(request(), recorder)).token_ids) == [1] and recorder.batches == [[1]]
    finally:
        await runner.cleanup()


# --- the transport


async def test_events_are_found_wherever_the_bytes_are_split(http: HttpPool) -> None:
    raw = b"".join(
        b": ping\r\n\r\ndata:" + orjson.dumps(event) + b"\r\n\r\n"
        for event in (vllm_event(1, 2), vllm_event(3, finish="stop"))
    )
    async with streaming(*(raw[i : i + 7] for i in range(0, len(raw), 7))) as url:
        recorder = TokenRecorder()
        generation = await vllm_at(url, http).generate(request(), recorder)
        assert recorder.batches == [[1, 2], [3]] and generation.finish_reason == "stop"


async def test_a_line_that_is_too_long_is_not_read(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_REPLY_BYTES", 2000)
    async with streaming(*[b"data: " + b"x" * 500] * 5, ends=False) as url:
        engine = vllm_at(url, http)
        with pytest.raises(EngineBroken, match="a line of more than 2000 bytes"):
            await engine.generate(request(), TokenRecorder())
        await engine.close()


async def test_a_reply_that_is_not_a_stream_is_reported_with_its_type(http: HttpPool) -> None:
    async with streaming(b"<html>", kind="text/html") as url:
        with pytest.raises(EngineBroken, match="text/html where a stream was asked for"):
            await vllm_at(url, http).generate(request(), TokenRecorder())


async def test_a_stream_without_its_last_line_is_complete(http: HttpPool) -> None:
    async with streaming(vllm_event(1, 2, finish="stop"), ends=False) as url:
        assert (await vllm_at(url, http).generate(request(), TokenRecorder())).finish_reason == "stop"


async def test_a_stream_returns_its_connection_after_its_end(http: HttpPool) -> None:
    """The stream ends some time after [DONE]; a connection that is left before that would be closed."""
    async with streaming(vllm_event(1), vllm_event(2, finish="stop"), holds_s=0.05) as url:
        for _ in range(2):
            await vllm_at(url, http).generate(request(), TokenRecorder())
            async with asyncio.timeout(90):
                while not http.idle:
                    await asyncio.sleep(0.01)
        assert http.idle == 1


@pytest.mark.parametrize("ends", [True, False], ids=["after [DONE]", "without [DONE]"])
async def test_a_connection_held_open_after_the_end_is_not_waited_for(
    http: HttpPool, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    for module in (http_module, remote):
        monkeypatch.setattr(module, "DRAIN_S", 0.02)
    async with streaming(vllm_event(1, finish="stop"), ends=ends, holds_s=60.0) as url:
        assert (await vllm_at(url, http).generate(request(), TokenRecorder())).finish_reason == "stop"


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "without a finish_reason"),
        ([vllm_event(*range(101))], "101 tokens where 100 were asked for"),
        ([vllm_event(1, finish="tired")], "finish_reason 'tired'"),
        ([vllm_event(-1)], "negative"),
        ([{"choices": [{"finish_reason": None}]}], "no token_ids"),
        ([{"choices": [{"token_ids": []}] * 2}], "2 choices"),
        ([vllm_event(1, logprobs={"content": [{"token_id": 2, "logprob": -1.0}]})], "not that of the sampled token"),
        ([vllm_event(1, finish="stop", weight_versions=[{"version": "1", "start": 0, "end": 9}])], "cover 9 of 1"),
        ([{"error": {"message": "it broke", "code": 500}}], "it broke"),
    ],
)
async def test_an_invalid_event_of_vllm_ends_the_stream(events: list[Any], says: str, http: HttpPool) -> None:
    for before in ([], [vllm_event(7, 8)]):
        async with streaming(*before, *events) as url:
            engine = vllm_at(url, http)
            recorder = TokenRecorder()
            if before:
                part = await engine.generate(request(max_tokens=102 if "101" in says else 100), recorder)
                assert (list(part.token_ids), part.finish_reason) == ([7, 8], "abort") and recorder.ids == [7, 8]
            else:
                with pytest.raises(EngineFailure, match=says):
                    await engine.generate(request(), recorder)
                assert recorder.ids == []
            await engine.close()


async def test_tokens_after_the_finish_reason_are_ignored(http: HttpPool, caplog: pytest.LogCaptureFixture) -> None:
    async with streaming(vllm_event(1, finish="stop"), vllm_event(2)) as url:
        recorder = TokenRecorder()
        generation = await vllm_at(url, http).generate(request(), recorder)
        assert caplog.messages == [], "it is complete: no abort, no warning"
        assert (list(generation.token_ids), generation.finish_reason) == ([1], "stop") and recorder.ids == [1]


@pytest.mark.parametrize(
    ("events", "ids", "finish"),
    [
        # all tokens so far; only new ones; new ids with all logprobs so far (older --stream-output)
        ([sglang_event([1], 1), sglang_event([1, 2, 3], 3, "stop")], [1, 2, 3], "stop"),
        ([sglang_event([1], 1), sglang_event([2, 3], 3, "stop")], [1, 2, 3], "stop"),
        (
            [
                sglang_event([1], 1),
                sglang_event([2], 2, "stop", output_token_logprobs=[[-0.5, 1, None], [-0.5, 2, None]]),
            ],
            [1, 2],
            "stop",
        ),
        # no output_ids; a list that grew while it was written; a last event without new tokens
        ([sglang_event([1], 1) | {"output_ids": None}, sglang_event([1, 2], 2, "stop")], [1, 2], "stop"),
        ([sglang_event([1, 2], 1), sglang_event([1, 2], 2, "length")], [1, 2], "length"),
        ([sglang_event([1, 2], 2), sglang_event([1, 2], 2, "stop")], [1, 2], "stop"),
        ([sglang_event([1, 2], 2), sglang_event([], 2, "stop")], [1, 2], "stop"),
        # aborted: the last token repeated, or no lists
        ([sglang_event([1, 2], 2), sglang_event([2], 2, "abort", output_token_logprobs=None)], [1, 2], "abort"),
        ([sglang_event([1, 2], 2), {"meta_info": {"finish_reason": {"type": "abort"}}}], [1, 2], "abort"),
        # changed tokens, or lists of any other length: the tokens before are kept
        ([sglang_event([1, 2], 2), sglang_event([1, 9, 3], 3, "stop")], [1, 2], "abort"),
        ([sglang_event([1, 2, 3], 3), sglang_event([4, 5], 4, "stop")], [1, 2, 3], "abort"),
    ],
)
async def test_sglang_streams_cumulative_and_incremental_events(
    events: list[Any], ids: list[int], finish: str, http: HttpPool
) -> None:
    async with streaming(*events) as url:
        engine = sglang_at(url, http)
        recorder = TokenRecorder()
        generation = await engine.generate(request(), recorder)
        assert (list(generation.token_ids), generation.finish_reason) == (ids, finish) and recorder.ids == ids
        assert generation.logprobs is not None and len(generation.logprobs) == len(ids)
        await engine.close()


@pytest.mark.parametrize(
    ("event", "error", "is_context"),
    [
        ({"error": {"message": "longer than the model's context length (8 tokens)"}}, EngineRefused, True),
        (
            sglang_event([], 0, "abort")
            | {"meta_info": {"finish_reason": {"type": "abort", "message": "full", "status_code": 503}}},
            EngineUnavailable,
            False,
        ),
        ({"output_ids": [1]}, EngineBroken, False),
    ],
)
async def test_refusals_of_sglang_in_a_stream(
    event: Any, error: type[EngineFailure], is_context: bool, http: HttpPool
) -> None:
    async with streaming(event) as url:
        engine = sglang_at(url, http)
        with pytest.raises(error) as caught:
            await engine.generate(request(), TokenRecorder())
        assert bool(caught.value.data.get("context")) is is_context
        await engine.close()


# --- top logprobs


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_top_logprobs_are_returned_for_each_position(dialect: str, is_stream: bool, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: Reply(WORDS, tokens_per_s=400), **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        recorder = TokenRecorder() if is_stream else None
        generation = await engine.generate(request("a", top_logprobs=2), recorder)
        assert generation.tops is not None and len(generation.tops) == len(generation.token_ids)
        for token, top in zip(generation.token_ids, generation.tops, strict=True):
            assert len(top) == 2 and top[0][0] == token and top[0][1] > top[1][1]
        plain = await engine.generate(request("b"), recorder)
        assert plain.tops is None and plain.token_ids == generation.token_ids and plain.logprobs == generation.logprobs


async def test_a_masked_token_is_left_out_of_the_top_logprobs(http: HttpPool) -> None:
    tops = [{"token_id": 8, "logprob": -9999.0}, {"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -0.7}]
    entry = {"token_id": 7, "logprob": -0.5, "top_logprobs": tops}
    async with streaming(vllm_event(7, finish="stop", logprobs={"content": [entry]})) as url:
        generation = await vllm_at(url, http).generate(request(top_logprobs=3), TokenRecorder())
        assert generation.tops == (((7, -0.5), (9, -0.7)),)


@pytest.mark.parametrize("first", [(((7, -0.5),),), None])
def test_top_logprobs_of_several_calls_are_joined_or_none(first: Any) -> None:
    completion = PartialCompletion()
    for token, tops in ((7, first), (8, (((8, -0.1),),))):
        completion.add(Generation(array("i", [token]), array("f", [-0.5]), "stop", tops=tops))
    assert completion.generation("stop").tops == (None if first is None else (((7, -0.5),), ((8, -0.1),)))
