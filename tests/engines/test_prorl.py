"""The reference system's engine protocol, tested with the scripted engine."""

import asyncio
import re

import pytest

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineUnavailable
from rollyard.engines import EngineSpec, GenerateRequest, Kind, ProrlEngine
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.prorl import kind_at
from rollyard.testing.engine_conformance import CHECKS, Context, EngineCheck
from rollyard.testing.script import Fault, Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.scripted_sampling import scripted_logprob
from tests.engines.parts import END_ID, PROMPT, complete, routed, text_of

ALPHABET = Reply(token_ids=tuple(65 + i % 26 for i in range(1000)))

CANNOT = re.compile("abort|stream|hang|hung|cancel|chat|context|broken|tokenize|version")
"""Checks of features that this protocol does not have."""


async def prorl(server: ScriptedEngine, http: HttpPool) -> ProrlEngine:
    engine = ProrlEngine(EngineSpec("e1", server.url, Kind.PRORL, tokenizer="/models/Qwen3-8B"), http)
    await engine.probe()
    return engine


def asked(max_tokens: int = 50, **fields: object) -> GenerateRequest:
    return GenerateRequest("r1", PROMPT, Sampling(), max_tokens, seed=3, stop_token_ids=(END_ID,), **fields)  # type: ignore[arg-type]


CHECKED = [check for check in CHECKS if not CANNOT.search(check.name)]


@pytest.mark.parametrize("check", CHECKED, ids=lambda check: check.name)
async def test_the_prorl_engine_passes_the_checks_that_apply(check: EngineCheck, http: HttpPool) -> None:
    assert len(CHECKED) >= 3
    async with ScriptedEngine(lambda _: ALPHABET, tokens_per_s=5000, dialect="prorl") as server:
        engine = await prorl(server, http)
        try:
            await check.run(engine, Context(PROMPT, long_tokens=900))
        finally:
            await engine.close()


async def test_request_and_reply_follow_the_protocol(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "hello", dialect="prorl") as server:
        engine = await prorl(server, http)
        generation = await engine.generate(asked())
        sent = server.requests[-1].body
        assert sent["prompt_ids"] == PROMPT
        assert (sent["temperature"], sent["top_p"], sent["max_tokens"], sent["seed"]) == (1.0, 1.0, 50, 3)
        assert text_of(generation) == "hello"
        assert (generation.finish_reason, generation.versions, generation.prompt_tokens) == ("stop", (), len(PROMPT))
        assert generation.logprobs is not None
        assert generation.logprobs[0] == pytest.approx(scripted_logprob(PROMPT[-1], len(PROMPT), ord("h")))
        cut = await engine.generate(asked(max_tokens=3))
        assert (text_of(cut), cut.finish_reason) == ("hel", "length")
        assert (engine.info.model, engine.info.logprobs_kind, engine.info.api) == ("Qwen3-8B", "unknown", "generate")
        assert await engine.healthy()
    assert not await engine.healthy()


@pytest.mark.parametrize("fault", ["wrong_ids", "fewer_logprobs", "positive_logprob", "not_json"])
async def test_an_invalid_reply_is_not_repaired(fault: Fault, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "hello", dialect="prorl") as server:
        engine = await prorl(server, http)
        server.fail_next(1, fault)
        with pytest.raises(EngineBroken):
            await engine.generate(asked())


async def test_on_tokens_receives_all_tokens_of_an_unstreamed_reply(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "hello", dialect="prorl") as server:
        engine = await prorl(server, http)
        streamed_ids: list[int] = []
        generation = await engine.generate(asked(), streamed_ids.extend)
        assert streamed_ids == list(generation.token_ids)


async def test_a_session_stamps_its_tokens_with_the_policys_version() -> None:
    async with ScriptedEngine(lambda _: "hello", dialect="prorl") as server, routed() as router:
        await router.add(EngineSpec("e1", server.url, Kind.PRORL))
        async with router.session("default", "s1") as session:
            generation = await complete(session)
        assert text_of(generation) == "hello"
        assert [(span.version, span.start, span.end) for span in generation.versions] == [
            (0, 0, len(generation.token_ids))
        ]


async def test_the_kind_of_engine_at_an_address_is_detected(http: HttpPool) -> None:
    async with (
        ScriptedEngine() as vllm,
        ScriptedEngine(dialect="sglang") as sglang,
        ScriptedEngine(dialect="prorl") as own,
    ):
        assert await asyncio.gather(*(kind_at(it.url, http) for it in (vllm, sglang, own))) == [
            Kind.VLLM,
            Kind.SGLANG,
            Kind.PRORL,
        ]
        assert await kind_at(f"{vllm.url}/v1", http) is Kind.VLLM
    with pytest.raises(EngineUnavailable):
        await kind_at("http://127.0.0.1:1", http)
