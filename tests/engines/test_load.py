"""The load from an engine's /metrics, whatever their content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.engines import EngineSpec, Kind
from rollyard.engines.clients import load as load_module
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.load import EngineLoad, parse_load, read_load
from rollyard.engines.clients.transport import EngineTransport
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import answering, probed

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a } b"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 70.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{engine="0",model_name="a } b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a } b"} 0.75
vllm:num_preemptions_total{engine="0"} 2.0
vllm:num_preemptions_total{engine="1"} 1e+01
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="a } b"} 5000.0
vllm:generation_tokens_total{engine="1",model_name="a } b"} 250.0
vllm:generation_tokens_created{engine="0",model_name="a } b"} 1.7e+09
"""

SGLANG = b"""sglang:token_usage{model_name="m"} 0.28 1700000000000
sglang:num_running_reqs{model_name="m"} 162.0
sglang:num_queue_reqs{model_name="m"} 2826.0
sglang:num_retracted_reqs{model_name="m"} 4.0
sglang:num_retracted_requests_total{model_name="m"} 9.0
"""


def test_of_several_ranks_the_fullest_cache_counts_and_requests_are_summed() -> None:
    assert parse_load(VLLM) == EngineLoad(0.75, running=7, waiting=1, preemptions=12, sampled_tokens=5250)


def test_the_metrics_of_sglang_are_parsed() -> None:
    assert parse_load(SGLANG) == EngineLoad(0.28, running=162, waiting=2826, preemptions=9)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Not Found</html>",
        b'{"detail": "Not Found"}',
        b"vllm:num_requests_running 3\n",  # no KV use
        b"vllm:kv_cache_usage_perc NaN\n",
        b"vllm:kv_cache_usage_perc +Inf\n",
        b"vllm:kv_cache_usage_perc -0.5\n",
        b"vllm:kv_cache_usage_perc much\n",
        b"vllm:kv_cache_usage_perc 0.5\nvllm:num_preemptions_total 1e300\n",
        b"not_vllm:kv_cache_usage_perc 0.5\n",
        b"vllm:kv_cache_usage_percent 0.5\n",
        b"# vllm:kv_cache_usage_perc 0.5\n",
    ],
)
def test_invalid_metrics_are_no_load(body: bytes) -> None:
    assert parse_load(body) is None


def test_a_cache_is_never_more_than_full() -> None:
    assert parse_load(b"vllm:kv_cache_usage_perc 1.0000001\n") == EngineLoad(1.0)


@given(st.binary(max_size=300) | st.from_regex(rb"vllm:(kv_cache_usage_perc|num_preemptions_total)[^\x00]*\n"))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    load = parse_load(body)
    assert load is None or (0 <= load.kv_use <= 1 and load.preemptions >= 0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_load_of_an_engine_is_read(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(dialect=dialect) as server:  # type: ignore[arg-type]
        engine = await probed(server, http)
        assert await engine.load() is None  # it reports none by default
        server.kv_use, server.preemptions = 0.5, 3
        assert await engine.load() == EngineLoad(0.5, running=0, waiting=0, preemptions=3)
        await engine.close()


async def test_read_load_returns_none_for_any_failure(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wire(url: str) -> EngineTransport:
        return EngineTransport(EngineSpec("e1", url, Kind.VLLM), http)

    assert await read_load(wire("http://127.0.0.1:1")) is None
    monkeypatch.setattr(load_module, "MAX_METRICS_BYTES", 100)
    async with answering(VLLM) as url:
        assert await read_load(wire(url)) is None  # too large
        monkeypatch.setattr(load_module, "MAX_METRICS_BYTES", 10_000)
        assert await read_load(wire(url)) == parse_load(VLLM)
    monkeypatch.setattr(load_module, "LOAD_S", 0.05)
    async with answering(None) as url:
        assert await read_load(wire(url)) is None  # silent
