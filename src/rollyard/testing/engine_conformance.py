"""Conformance checks for engines: run them against your own.

    for check in CHECKS:
        await check.run(engine, Context(prompt_ids, stop_token_ids))

A check raises AssertionError, or the engine's own error. Probe the engine before the first check. Generations are
short, so that the checks can be run against a real model on a CPU.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from rollyard.core import Sampling
from rollyard.core.failure import EngineRefused
from rollyard.engines.base import Engine, GenerateRequest, Generation

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Context:
    """The properties of the model that the checks need."""

    prompt_ids: Sequence[int]  # a prompt whose answer has more than `long_tokens` tokens
    long_tokens: int = 400  # long enough that an abort arrives during generation
    extra: dict[str, bool] = field(default_factory=lambda: {"ignore_eos": True})

    def request(self, max_tokens: int, name: str = "", **fields: object) -> GenerateRequest:
        sampling = Sampling(extra=self.extra)
        request_id = f"conformance-{name}-{next(_numbers)}"
        values: dict[str, object] = {"session_id": "conformance", "seed": 7, **fields}
        return GenerateRequest(request_id, self.prompt_ids, sampling, max_tokens, **values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EngineCheck:
    name: str
    run: Callable[[Engine, Context], Awaitable[None]]


CHECKS: list[EngineCheck] = []


def _check(function: Callable[[Engine, Context], Awaitable[None]]) -> Callable[[Engine, Context], Awaitable[None]]:
    CHECKS.append(EngineCheck(function.__name__, function))
    return function


def check_shape(generation: Generation, max_tokens: int) -> None:
    """Checks that each id has one logprob, and that versions cover all ids or no id."""
    ids = generation.token_ids
    assert len(ids) <= max_tokens, "it returned more tokens than requested"
    assert ids.typecode == "i" and all(token >= 0 for token in ids)
    if generation.logprobs is not None:
        assert len(generation.logprobs) == len(ids), "logprobs and tokens differ in number"
        assert all(math.isfinite(value) and value <= 1e-3 for value in generation.logprobs)
    place = 0
    for span in generation.versions:
        assert span.start == place and span.end > place, "version spans have a gap"
        place = span.end
    assert place in (0, len(ids)), "version spans do not cover the tokens"


@_check
async def the_probe_describes_the_engine(engine: Engine, context: Context) -> None:
    info = engine.info
    assert info.model and info.api
    assert info.max_context is None or info.max_context > len(context.prompt_ids)
    assert info.logprobs_kind in ("processed", "raw", "unknown")


@_check
async def health_succeeds(engine: Engine, context: Context) -> None:
    assert await engine.healthy()


@_check
async def a_generation_has_one_logprob_per_token(engine: Engine, context: Context) -> None:
    generation = await engine.generate(context.request(4, "shape"))
    assert len(generation.token_ids) == 4 and generation.finish_reason == "length"
    assert generation.prompt_tokens == len(context.prompt_ids)
    assert generation.logprobs is not None, "training needs logprobs"
    check_shape(generation, 4)


@_check
async def a_stop_token_ends_the_generation_and_is_included(engine: Engine, context: Context) -> None:
    free = await engine.generate(context.request(6, "free"))
    stop = free.token_ids[2]
    first = list(free.token_ids).index(stop)
    stopped = await engine.generate(context.request(6, "stop", stop_token_ids=(stop,)))
    if stopped.finish_reason == "stop":  # without a repeatable seed it may sample something else
        assert stopped.token_ids[-1] == stop
        assert len(stopped.token_ids) <= first + 1 or stopped.token_ids[:first] != free.token_ids[:first]
    check_shape(stopped, 6)


@_check
async def an_abort_returns_the_sampled_tokens(engine: Engine, context: Context) -> None:
    request = context.request(context.long_tokens, "abort")
    task = asyncio.create_task(engine.generate(request))
    try:
        for _ in range(100):  # an abort may arrive before its request
            await asyncio.wait({task}, timeout=0.2)
            if task.done():
                break
            await engine.abort(request.request_id)
        assert task.done(), "the call did not end when it was aborted"
        generation = task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert generation.finish_reason == "abort"
    assert len(generation.token_ids) < context.long_tokens
    check_shape(generation, context.long_tokens)


@_check
async def an_abort_of_an_unknown_id_does_nothing(engine: Engine, context: Context) -> None:
    await engine.abort("conformance-unknown")
    assert await engine.healthy()


@_check
async def a_cancelled_call_leaves_the_engine_working(engine: Engine, context: Context) -> None:
    task = asyncio.create_task(engine.generate(context.request(context.long_tokens, "cancel")))
    await asyncio.wait({task}, timeout=0.2)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled(), "it suppressed the cancellation"
    check_shape(await engine.generate(context.request(2, "after")), 2)


class _Streaming:
    """A streamed call in progress, and the tokens reported so far."""

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.started = asyncio.Event()
        self.task = asyncio.create_task(engine.generate(request, self._take))

    def _take(self, ids: Sequence[int]) -> None:
        assert len(ids) > 0, "it reported an empty list of tokens"
        self.tokens += ids
        self.started.set()

    async def __aenter__(self) -> _Streaming:
        """Waits for the first token."""
        started = asyncio.ensure_future(self.started.wait())
        await asyncio.wait({self.task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self.task.done():
            self.task.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@_check
async def a_stream_contains_exactly_the_generation(engine: Engine, context: Context) -> None:
    tokens: list[int] = []
    streamed = await engine.generate(context.request(8, "stream"), tokens.extend)
    assert tokens == list(streamed.token_ids), "the streamed tokens differ from the returned ones"
    check_shape(streamed, 8)
    whole = await engine.generate(context.request(8, "whole"))
    assert (len(streamed.token_ids), streamed.finish_reason) == (8, "length")
    assert streamed.token_ids == whole.token_ids, "the same seed gave other tokens"
    assert (streamed.logprobs is None) == (whole.logprobs is None)
    assert (streamed.prompt_tokens, bool(streamed.versions)) == (whole.prompt_tokens, bool(whole.versions))


@_check
async def a_stream_ends_where_a_whole_reply_ends(engine: Engine, context: Context) -> None:
    free = await engine.generate(context.request(6, "free"))
    tokens: list[int] = []
    request = context.request(6, "stop", stop_token_ids=(free.token_ids[2],))
    stopped = await engine.generate(request, tokens.extend)
    assert tokens == list(stopped.token_ids)
    if stopped.finish_reason == "stop":
        assert stopped.token_ids[-1] == free.token_ids[2], "the stop token was not kept"
    check_shape(stopped, 6)


@_check
async def an_abort_of_a_stream_keeps_the_streamed_tokens(engine: Engine, context: Context) -> None:
    request = context.request(context.long_tokens, "stream-abort")
    async with _Streaming(engine, request) as streaming:
        await engine.abort(request.request_id)
        generation = await streaming.task
    assert generation.finish_reason == "abort" and 0 < len(generation.token_ids) < context.long_tokens
    assert streaming.tokens == list(generation.token_ids)
    check_shape(generation, context.long_tokens)


@_check
async def a_stream_cut_by_the_engine_keeps_the_streamed_tokens(engine: Engine, context: Context) -> None:
    request = context.request(context.long_tokens, "hang-up")
    async with _Streaming(engine, request) as streaming:
        engine.hang_up(request.request_id)
        generation = await streaming.task
    assert generation.finish_reason == "abort"
    assert streaming.tokens == list(generation.token_ids)
    check_shape(generation, context.long_tokens)
    engine.hang_up("conformance-unknown")


@_check
async def a_cancelled_stream_leaves_the_engine_working(engine: Engine, context: Context) -> None:
    async with _Streaming(engine, context.request(context.long_tokens, "stream-cancel")) as streaming:
        streaming.task.cancel()
        await asyncio.wait({streaming.task})
        assert streaming.task.cancelled(), "it suppressed the cancellation"
    check_shape(await engine.generate(context.request(2, "after")), 2)


@_check
async def a_prompt_longer_than_the_context_is_refused(engine: Engine, context: Context) -> None:
    if engine.info.max_context is None:
        return
    long = [context.prompt_ids[0]] * (engine.info.max_context + 8)
    for on_tokens in (None, lambda _: None):
        try:
            await engine.generate(GenerateRequest("conformance-long", long, Sampling(), 1), on_tokens)
        except EngineRefused as error:
            assert error.data.get("context") is True, f"not recognised as too long: {error.detail}"
        else:
            raise AssertionError("a prompt longer than the context was accepted")


@_check
async def chat_returns_a_message(engine: Engine, context: Context) -> None:
    reply = await engine.chat([{"role": "user", "content": "hi"}], sampling=Sampling(max_tokens=4))
    assert reply.message["role"] == "assistant" and isinstance(reply.message.get("content"), str)


@_check
async def token_ids_are_integers_or_absent(engine: Engine, context: Context) -> None:
    tokens = await engine.tokenize("hello")
    assert tokens is None or (tokens and all(isinstance(token, int) for token in tokens))
