"""The real vLLM on this machine's CPU, which the scripted engine imitates."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from rollyard.core import Deadline, Sampling
from rollyard.core.failure import EngineTimeout
from rollyard.engines import Engine, EngineSpec, GenerateRequest, Generation, Kind, Router, VersionSpan, make_engine
from rollyard.engines.base import OnTokens
from rollyard.engines.clients.http import HttpPool
from rollyard.testing.engine_conformance import CHECKS, Context, EngineCheck
from rollyard.testing.script import FolderTokenizer
from tests.real_vllm import HUB_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

HELLO = "<|im_start|>user\nWrite a long story about a fox and a bridge.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def prompt(vllm_model: Path) -> list[int]:
    return FolderTokenizer(vllm_model).encode(HELLO)


@pytest.fixture
async def engine(vllm_url: str, http: HttpPool) -> Engine:
    engine = make_engine(EngineSpec("real", vllm_url, Kind.VLLM), http)
    await engine.probe()
    return engine


async def test_the_probe_finds_its_properties(engine: Engine) -> None:
    info = engine.info
    assert (info.model, info.max_context, info.api) == ("smollm2", 4096, "inference/v1/generate")
    assert info.logprobs_kind == "processed" and info.reports_versions and info.version
    assert info.model_source == HUB_NAME and info.notes == ()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_it_conforms(check: EngineCheck, engine: Engine, prompt: list[int]) -> None:
    await check.run(engine, Context(prompt, long_tokens=300))
    await engine.close()


async def test_it_conforms_with_the_completions_api(vllm_url: str, http: HttpPool, prompt: list[int]) -> None:
    from rollyard.engines import VllmEngine

    engine = VllmEngine(EngineSpec("real", vllm_url, Kind.VLLM), http)
    await engine.probe()
    engine._api = "v1/completions"  # as the probe would choose without scale-out
    for check in CHECKS:
        if any(word in check.name for word in ("abort", "logprob", "stream")):
            await check.run(engine, Context(prompt, long_tokens=300))
    await engine.close()


async def test_its_tokenizer_is_that_of_the_model_folder(engine: Engine, vllm_model: Path) -> None:
    text = "naïve 漢字 🚀\r\n  1234567890 <|im_start|>"
    assert await engine.tokenize(text) == FolderTokenizer(vllm_model).encode(text)


async def test_versions_follow_the_updates(
    engine: Engine, vllm_url: str, http: HttpPool, prompt: list[int], web: aiohttp.ClientSession
) -> None:
    async with web.post(f"{vllm_url}/update_weight_version", json={"new_version": "7"}) as reply:
        assert reply.status == 200
    generation = await engine.generate(GenerateRequest("v", prompt, Sampling(), 3))
    assert generation.versions == (VersionSpan(7, 0, len(generation.token_ids)),)
    streamed = await engine.generate(GenerateRequest("w", prompt, Sampling(), 3), lambda _: None)
    assert streamed.versions == (VersionSpan(7, 0, len(streamed.token_ids)),)


async def test_a_second_turn_finds_its_prefix_cached(engine: Engine, prompt: list[int]) -> None:
    long = prompt * 20  # whole blocks are cached, and a block may have 128 tokens
    first = await engine.generate(GenerateRequest("c1", long, Sampling(), 4, session_id="s", cache_salt="p:1"))
    extended = [*long, *first.token_ids, *prompt]
    second = await engine.generate(GenerateRequest("c2", extended, Sampling(), 4, session_id="s", cache_salt="p:1"))
    assert second.cached_tokens is not None and second.cached_tokens >= len(long) // 2
    salted = await engine.generate(GenerateRequest("c3", extended, Sampling(), 4, session_id="s", cache_salt="p:2"))
    assert salted.cached_tokens == 0, "other weights share no prefix"


async def test_long_prompts_with_seeds_are_answered_together(engine: Engine, prompt: list[int]) -> None:
    """More prompt tokens than one step takes: where vLLM splits a prompt, its CPU backend ends."""
    prompts = [(prompt * 60)[number : 1000 + number] for number in range(8)]
    requests = [GenerateRequest(f"l{n}", one, Sampling(), 4, seed=n + 1) for n, one in enumerate(prompts)]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [len(generation.token_ids) for generation in generations] == [4] * 8


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_an_interrupted_completion_is_continued_by_the_router(
    is_streamed: bool, vllm_url: str, prompt: list[int]
) -> None:
    streamed_ids: list[int] = []
    on_tokens = streamed_ids.extend if is_streamed else None
    # The first time limit in which this machine, as fast and as busy as it is, samples a part of the 40 tokens.
    for model_s in (0.05 * 1.5**step for step in range(14)):
        streamed_ids.clear()
        async with Router() as router:
            await router.add(EngineSpec("real", vllm_url, Kind.VLLM))
            with suppress(EngineTimeout):
                generation = await _forty_tokens(router, prompt, model_s, on_tokens)
                break
    else:
        pytest.fail("the engine samples nothing in 9 s")
    assert len(generation.token_ids) == 40 and generation.finish_reason == "length"
    assert generation.logprobs is not None and len(generation.logprobs) == 40
    assert generation.versions[-1].end == 40
    assert not is_streamed or streamed_ids == list(generation.token_ids)
    assert router.stats.continuations > 0


async def _forty_tokens(router: Router, prompt: list[int], model_s: float, on_tokens: OnTokens | None) -> Generation:
    async with router.session("default", "s1") as session:
        return await session.generate(
            prompt,
            sampling=Sampling(extra={"ignore_eos": True}),
            max_tokens=40,
            seed=3,
            stop_token_ids=(),
            clock=Deadline(),
            model_s=model_s,
            on_tokens=on_tokens,
        )
