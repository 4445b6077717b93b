"""Engine clients over real HTTP: their requests, and their failures."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from rollyard.core import Sampling
from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineUnavailable
from rollyard.engines import EngineSpec, GenerateRequest, Kind, make_engine
from rollyard.engines.clients.http import HttpPool
from rollyard.testing.script import Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import END_ID, PROMPT, probed

DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
}


def request(name: str = "r1", **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, Sampling(), **{"max_tokens": 50, "session_id": "s1", **fields})


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (500, EngineUnavailable, "500"),
        (503, EngineUnavailable, "503"),
        (429, EngineUnavailable, "429"),
        (400, EngineRefused, "a fault of status 400"),
        ("cut", EngineUnavailable, "cannot be reached"),
        ("not_json", EngineBroken, "not JSON"),
        ("no_token_ids", EngineBroken, "ids"),
        ("wrong_ids", EngineBroken, "int"),
        ("fewer_logprobs", EngineBroken, "2 logprobs for 3 tokens"),
        ("positive_logprob", EngineBroken, "positive"),
    ],
)
async def test_each_fault_raises_its_failure(
    fault: Any, error: type[EngineFailure], says: str, dialect: str, http: HttpPool
) -> None:
    async with ScriptedEngine(lambda _: "ok", **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.fail_next(1, fault)
        with pytest.raises(error, match=says) as caught:
            await engine.generate(request())
        assert type(caught.value) is error
        assert len((await engine.generate(request())).token_ids) == 3, "it works after a fault"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_version_that_is_not_a_number_is_engine_broken(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok", **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.fail_next(1, "bad_version")
        with pytest.raises(EngineBroken, match="'seven' is not a number"):
            await engine.generate(request())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", ["no_logprobs", "missing_logprob"])
async def test_missing_logprobs_are_none_and_never_zero(fault: Any, dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ok", **DIALECTS[dialect]) as server:
        engine = await probed(server, http)
        server.fail_next(1, fault)
        generation = await engine.generate(request())
        assert generation.logprobs is None and len(generation.token_ids) == 3


async def test_an_engine_that_is_stopped_is_unavailable(http: HttpPool) -> None:
    async with ScriptedEngine() as server:
        engine = await probed(server, http)
    assert not await engine.healthy()
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await engine.generate(request())


async def test_a_refusal_never_repeats_a_whole_prompt(http: HttpPool) -> None:
    from rollyard.engines.clients.transport import engine_message

    assert len(engine_message(b"x" * 5000)) <= 400
    detail = engine_message(b'{"detail":[{"loc":["body","model"],"msg":"field required","input":"SECRET"}]}')
    assert detail == "body.model: field required"


async def test_a_vllm_call_contains_all_parameters(http: HttpPool) -> None:
    async with ScriptedEngine() as server:
        engine = await probed(server, http, api_key="k1")
        sampling = Sampling(temperature=0.7, top_p=0.9, top_k=20, extra={"min_p": 0.1})
        await engine.generate(
            GenerateRequest("r1", PROMPT, sampling, 50, 11, (END_ID,), "s1", cache_salt="p:3", priority=2)
        )
        sent = server.calls[-1]
        assert sent.path == "/inference/v1/generate" and list(sent.prompt_ids) == PROMPT
        assert sent.body["sampling_params"] == {
            "max_tokens": 50,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
            "logprobs": 0,
            "seed": 11,
            "stop_token_ids": [END_ID],
        }
        assert sent.body["cache_salt"] == "p:3" and sent.body["priority"] == -2
        assert sent.headers["X-Session-ID"] == sent.headers["X-SMG-Routing-Key"] == "s1"
        assert sent.headers["X-Request-Id"] == "r1" and sent.headers["Authorization"] == "Bearer k1"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_tokens_of_a_stop_text_are_part_of_the_completion(http: HttpPool, dialect: Any) -> None:
    async with ScriptedEngine(lambda _: "one STOP two", dialect=dialect) as server:
        engine = await probed(server, http)
        generation = await engine.generate(
            GenerateRequest("r1", PROMPT, Sampling(), 50, session_id="s1", stop=("STOP", "x"))
        )
        assert server.calls[-1].body["sampling_params"]["stop"] == ["STOP", "x"]
        assert server.tokenizer.decode(list(generation.token_ids)) == "one STOP" and generation.finish_reason == "stop"
        assert generation.logprobs is not None and len(generation.logprobs) == len(generation.token_ids)


async def test_an_sglang_call_contains_all_parameters(http: HttpPool) -> None:
    async with ScriptedEngine(dialect="sglang") as server:
        engine = await probed(server, http)
        await engine.generate(GenerateRequest("r1", PROMPT, Sampling(), 50, 11, (END_ID,), "s1", "p:3", 2))
        body = server.calls[-1].body
        assert body["rid"] == "r1" and body["extra_key"] == "p:3" and body["priority"] == 2
        assert body["sampling_params"]["max_new_tokens"] == 50 and body["sampling_params"]["sampling_seed"] == 11
        assert body["return_logprob"] is True and body["logprob_start_len"] == -1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_cancelling_a_call_aborts_it_by_id(dialect: str, http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: Reply("long", stall_after=2), **DIALECTS[dialect]) as server:
        server.script, stalling = (lambda _: "ok"), server.script
        engine = await probed(server, http)
        server.script = stalling
        task = asyncio.create_task(engine.generate(request("r9")))
        await server.busy()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.idle()
        await engine.close()
        assert [name for name in server.aborted if "r9" in name]


async def test_a_text_engine_chats_and_returns_no_tokens(http: HttpPool) -> None:
    async with ScriptedEngine(lambda turn: "yes" if "really" in turn.text else "no") as server:
        engine = make_engine(EngineSpec("t", f"{server.url}/v1", Kind.OPENAI), http)
        info = await engine.probe()
        assert info.model == "scripted" and info.api == "v1/chat/completions" and info.logprobs_kind == "unknown"
        reply = await engine.chat([{"role": "user", "content": "really?"}], sampling=Sampling())
        assert reply.message == {"role": "assistant", "content": "yes"} and reply.finish_reason == "stop"
        with pytest.raises(EngineRefused, match="gives no tokens"):
            await engine.generate(request())


async def test_versions_are_spans_and_cached_tokens_are_counted(http: HttpPool, web: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(lambda _: Reply("abcdef", stall_after=4)) as server:
        server.script, stalling = (lambda _: "ok"), server.script
        engine = await probed(server, http)
        server.script = stalling
        async with web.post(f"{server.url}/update_weight_version", json={"new_version": "7"}):
            pass
        task = asyncio.create_task(engine.generate(request("r1")))
        await server.busy()
        async with web.post(f"{server.url}/update_weight_version", json={"new_version": "8"}):
            pass
        await engine.abort("r1")
        generation = await task
        assert list(generation.token_ids) == list(b"abcd")
        assert [(s.version, s.start, s.end) for s in generation.versions] == [(7, 0, 4)]
        assert generation.cached_tokens == 0
        again = GenerateRequest("r2", [*PROMPT, *b"abcd", 1, 2], Sampling(), 10, session_id="s1")
        server.script = lambda _: "ok"
        assert (await engine.generate(again)).cached_tokens == len(PROMPT) + 4
