"""The conformance suite against the scripted engine in each of its dialects."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.engines.clients.http import HttpPool
from rollyard.testing.engine_conformance import CHECKS, Context, EngineCheck
from rollyard.testing.script import Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import PROMPT, probed

ALPHABET = Reply(token_ids=tuple(65 + i % 26 for i in range(1000)))

DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm before 0.29": {"has_old_logprobs": True},
    "vllm without scale-out": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
    "sglang, incremental": {"dialect": "sglang", "is_incremental": True},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_the_scripted_engine_conforms(check: EngineCheck, dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: ALPHABET, tokens_per_s=200, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        try:
            await check.run(engine, Context(PROMPT, long_tokens=900))
        finally:
            await engine.close()
