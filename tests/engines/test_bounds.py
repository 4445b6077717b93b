"""The limits of this package on waiting and on the size of replies, each reached."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import orjson
import pytest

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineRefused, EngineTimeout, EngineUnavailable
from rollyard.engines import EngineSpec, GenerateRequest, Kind, Router, SglangEngine, VllmEngine
from rollyard.engines.clients import remote, transport
from rollyard.engines.clients.http import HttpPool
from rollyard.testing import ScriptedEngine
from tests.engines.parts import QUICK, answering, complete, probed, routed, spec_of

REQUEST = GenerateRequest("r1", [1, 2, 3], Sampling(), 10)


async def test_a_reply_that_is_too_large_is_not_read(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(lambda _: "x" * 500) as server:
        engine = await probed(server, http)
        monkeypatch.setattr(transport, "MAX_REPLY_BYTES", 2000)
        with pytest.raises(EngineBroken, match="more than 2000 bytes"):
            await engine.generate(GenerateRequest("r2", [1, 2, 3], Sampling(), 1000))


async def test_a_silent_engine_is_not_healthy(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HEALTH_S", 0.02)
    async with answering(None) as url:
        assert not await VllmEngine(EngineSpec("e", url, Kind.VLLM), http).healthy()


async def test_freeing_a_silent_engine_is_bounded_in_time(http: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FREE_S", 0.02)
    async with answering(None) as url:
        engine = VllmEngine(EngineSpec("e", url, Kind.VLLM), http)
        task = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await engine.close()


async def test_a_probe_that_takes_too_long_is_a_timeout() -> None:
    async with ScriptedEngine() as server, Router(replace(QUICK, probe_s=2.0)) as router:
        server.fail_next(1, "hang")
        with pytest.raises(EngineTimeout, match="did not answer its probe within"):
            await router.add(spec_of(server))
        await router.add(spec_of(server))  # the id is free again


async def test_an_engine_that_hangs_at_its_trial_stays_down() -> None:
    async with ScriptedEngine() as server, routed(server, settings=replace(QUICK, probe_s=2.0)) as router:
        await server.stop()
        while router.list()[0].health != "down":
            await asyncio.sleep(0.002)
        server.fail_next(1, "hang")
        await server.start()
        while "sampled nothing" not in router.list()[0].stats.last_error:
            assert router.list()[0].health == "down"
            await asyncio.sleep(0.002)
        while router.list()[0].health != "up":
            await asyncio.sleep(0.002)


async def test_a_closed_session_makes_no_call() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        session = await router.open_session("default", "s1")
        await session.close()
        await session.close()
        with pytest.raises(RuntimeError, match="closed"):
            await complete(session)
        assert router.list()[0].stats.sessions == 0


@pytest.mark.parametrize(
    ("status", "message", "error", "is_context"),
    [
        (400, "The input (9 tokens) is longer than the model's context length (8 tokens).", EngineRefused, True),
        (400, "Invalid regex", EngineRefused, False),
        (503, "Server is overloaded", EngineUnavailable, False),
    ],
)
async def test_an_sglang_abort_with_a_status_is_a_failure(
    status: int, message: str, error: type[Exception], is_context: bool, http: HttpPool
) -> None:
    finish = {"type": "abort", "message": message, "status_code": status}
    raw = orjson.dumps({"output_ids": [], "meta_info": {"finish_reason": finish, "prompt_tokens": 3}})
    async with answering(raw) as url:
        with pytest.raises(error) as caught:
            await SglangEngine(EngineSpec("e", url, Kind.SGLANG), http).generate(REQUEST)
        assert bool(getattr(caught.value, "data", {}).get("context")) is is_context


async def test_ids_of_older_sglang_are_read_from_its_logprobs(http: HttpPool) -> None:
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]]}
    async with answering(orjson.dumps({"text": "x", "meta_info": meta})) as url:
        generation = await SglangEngine(EngineSpec("e", url, Kind.SGLANG), http).generate(REQUEST)
        assert list(generation.token_ids) == [7, 8] and list(generation.logprobs or ()) == [-0.5, -0.25]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"token_ids": list(range(11)), "finish_reason": "length"}, "11 tokens where 10 were asked for"),
        ({"token_ids": [1], "finish_reason": "tired"}, "finish_reason 'tired'"),
        ({"token_ids": [1], "finish_reason": None}, "finish_reason None"),
        (
            {"token_ids": [1], "finish_reason": "stop", "logprobs": {"content": [{"token_id": 2, "logprob": -1.0}]}},
            "the logprob at 0 is not that of the sampled token",
        ),
        (
            {"token_ids": [1], "finish_reason": "stop", "weight_versions": [{"version": "1", "start": 0, "end": 9}]},
            "cover 9 of 1 tokens",
        ),
    ],
)
async def test_an_invalid_reply_is_engine_broken(choice: dict[str, object], says: str, http: HttpPool) -> None:
    async with answering(orjson.dumps({"choices": [choice]})) as url:
        with pytest.raises(EngineBroken, match=says):
            await VllmEngine(EngineSpec("e", url, Kind.VLLM), http).generate(REQUEST)


async def test_a_reply_without_choices_is_engine_broken(http: HttpPool) -> None:
    async with answering(b'{"choices": []}') as url:
        with pytest.raises(EngineBroken, match="0 choices"):
            await VllmEngine(EngineSpec("e", url, Kind.VLLM), http).generate(REQUEST)
