"""The probe of an engine."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from rollyard.core.failure import EngineRefused
from rollyard.engines import make_engine
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.logprob_probe import compare, cut_is_included
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import probed, spec_of

DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "old": {"has_old_logprobs": True},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("mode", ["processed", "raw"])
async def test_the_probe_determines_the_meaning_of_logprobs(
    mode: Literal["processed", "raw"], dialect: str, http: HttpPool
) -> None:
    async with ScriptedEngine(logprobs_mode=mode, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        assert engine.info.logprobs_kind == mode
        assert engine.info.max_context == 32_768 and engine.info.model == "scripted"


def test_a_gap_that_follows_neither_rule_or_is_too_small_is_unknown() -> None:
    assert compare({1: -0.5, 2: -2.5}, {1: -0.9, 2: -1.9}) == "processed"
    assert compare({1: -0.5, 2: -2.5}, {1: -0.5, 2: -2.5}) == "raw"
    assert compare({1: -0.5, 2: -2.5}, {1: -0.5, 2: -2.0}) == "unknown"
    assert compare({1: -1.0, 2: -1.05}, {1: -1.0, 2: -1.05}) == "unknown"
    assert compare({1: -1.0, 2: -9999.0}, {1: -1.0, 2: -9999.0}) == "unknown"
    assert compare({}, {1: -1.0}) == "unknown"


def test_a_cut_is_detected_by_its_total_probability() -> None:
    assert cut_is_included({1: -0.6931, 2: -0.6931, 3: -9999.0})
    assert not cut_is_included({1: -1.2, 2: -1.5, 3: -2.0})


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_two_probes_at_once_do_not_disturb_each_other(dialect: str, http: HttpPool) -> None:
    """A health check and a resume may both probe an engine that has become ready, and so do all nodes of a fleet."""
    async with ScriptedEngine(latency_s=0.05, record=100, **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        first, second = await asyncio.gather(engine.probe(), engine.probe())
        assert first == second and engine.info == first
        sent = [request.body.get("rid") or request.headers.get("X-Request-Id") for request in server.requests]
        ids = [request_id for request_id in sent if request_id]
        assert len(set(ids)) == len(ids) > 3


async def test_the_fallback_api_is_noted_and_reports_no_versions(http: HttpPool) -> None:
    async with ScriptedEngine(is_scale_out=False) as server:
        info = (await probed(server, http)).info
        assert info.api == "v1/completions" and not info.reports_versions
        assert any("--enable-scale-out" in note for note in info.notes)
    async with ScriptedEngine() as server:
        info = (await probed(server, http)).info
        assert info.api == "inference/v1/generate" and info.reports_versions


async def test_a_model_that_the_engine_does_not_serve_is_refused(http: HttpPool) -> None:
    async with ScriptedEngine(model="m1") as server:
        with pytest.raises(EngineRefused, match="does not serve 'm2'; it has m1"):
            await probed(server, http, model="m2")


async def test_an_engine_without_logprobs_is_noted_as_untrainable(http: HttpPool) -> None:
    async with ScriptedEngine() as server:
        server.fail_next(1, "no_logprobs")
        info = (await probed(server, http)).info
        assert info.logprobs_kind == "unknown" and any("not trainable" in note for note in info.notes)


async def test_info_before_the_probe_raises(http: HttpPool) -> None:
    async with ScriptedEngine() as server:
        with pytest.raises(RuntimeError, match="not been probed"):
            _ = make_engine(spec_of(server), http).info


async def test_the_engine_tokenizes_text(http: HttpPool) -> None:
    async with ScriptedEngine() as server:
        assert await (await probed(server, http)).tokenize("hi<|im_end|>") == [104, 105, 257]
