# pyright: reportMissingImports=false
"""The server with Rollyard's own client: pauses, versions, aborts, weight updates, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rollyard.core import Sampling
from rollyard.core.failure import EngineRefused, EngineUnavailable
from rollyard.core.policy import PauseMode
from rollyard.embedded.batching import Settings
from rollyard.embedded.calls import Call
from rollyard.embedded.server import Engine
from rollyard.engines.base import GenerateRequest, Generation, VersionSpan
from rollyard.engines.clients.vllm import VllmEngine
from tests.with_torch.parts import ask, batcher_of, plain_logprobs, prompt_of, run, served, tiny

ENDLESS = Sampling(extra={"ignore_eos": True})


def request(name: str = "r", length: int = 10, max_tokens: int = 12, **fields: Any) -> GenerateRequest:
    values: dict[str, Any] = {"sampling": ENDLESS, "seed": 5, "session_id": name, **fields}
    return GenerateRequest(name, prompt_of(length), max_tokens=max_tokens, **values)


class Streaming:
    """A streamed call, and its tokens so far."""

    def __init__(self, client: VllmEngine, generate_request: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(client.generate(generate_request, self._take))

    def _take(self, ids: Any) -> None:
        self.tokens += ids
        self._more.set()

    async def at_least(self, count: int) -> None:
        while len(self.tokens) < count:
            self._more.clear()
            await self._more.wait()


async def post(engine: Engine, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body or {}) as reply:
        return reply.status, await reply.json()


async def test_a_kept_call_is_frozen_and_continues_with_the_same_result():
    async with served(tiny()) as (engine, client):
        streaming = Streaming(client, request("cut", max_tokens=5000))
        await streaming.at_least(3)
        assert await client.control.pause(PauseMode.KEEP)
        sampled = engine._batcher.running[0].sampled
        await client.healthy()
        assert engine._batcher.running[0].sampled == sampled < 5000, "nothing is sampled after the response"
        assert not streaming.task.done()
        assert await client.control.clear_cache()
        assert await client.control.resume()
        await streaming.at_least(sampled + 20)
        await client.abort("cut")
        resumed = (await streaming.task).token_ids[: sampled + 20]
        assert resumed == (await client.generate(request("whole", max_tokens=sampled + 20))).token_ids


async def test_a_pause_that_aborts_returns_the_tokens_sampled_so_far():
    async with served(tiny()) as (_, client):
        streaming = Streaming(client, request(max_tokens=5000))
        whole = asyncio.create_task(client.generate(request("whole", max_tokens=5000)))
        await streaming.at_least(3)
        assert await client.control.pause(PauseMode.ABORT)
        first, second = await streaming.task, await whole
        assert first.finish_reason == second.finish_reason == "abort"
        assert 3 <= len(first.token_ids) < 5000 and list(first.token_ids) == streaming.tokens
        late = asyncio.create_task(client.generate(request("late")))
        await client.healthy()
        assert not late.done(), "it waits for the resume"
        await client.control.resume()
        assert len((await late).token_ids) == 12


async def test_a_pause_that_drains_waits_for_running_calls():
    async with served(tiny()) as (engine, client):
        streaming = Streaming(client, request(max_tokens=150))
        await streaming.at_least(1)
        pausing = asyncio.create_task(client.control.pause(PauseMode.DRAIN))
        while not (await _is_paused(client)):
            pass
        late = asyncio.create_task(client.generate(request("late")))
        while not engine._registry.deferred:  # an abort that overtakes its request has no effect
            await asyncio.sleep(0.001)
        await pausing
        assert streaming.task.done() or len((await streaming.task).token_ids) == 150
        assert not late.done()
        await client.abort("late")
        assert (await late).finish_reason == "abort", "also if it has not started"
        await client.control.resume()


async def _is_paused(client: VllmEngine) -> bool:
    return b"true" in await client._wire.get("/is_paused")


async def test_version_spans_change_at_the_right_token():
    async with served(tiny()) as (_, client):
        streaming = Streaming(client, request(max_tokens=5000))
        await streaming.at_least(2)
        await client.control.pause(PauseMode.KEEP)
        assert await client.control.set_version(7)
        assert await client.control.version() == "7"
        sampled = len(streaming.tokens)
        await client.control.resume()
        await streaming.at_least(sampled + 5)
        await client.abort("r")
        generation = await streaming.task
        (before, after) = generation.versions
        assert (before.version, before.start, after.version, after.end) == (-1, 0, 7, len(generation.token_ids))
        assert 2 <= before.end == after.start < len(generation.token_ids)
        assert (await client.generate(request("next"))).versions == (VersionSpan(7, 0, 12),)


def check_spans(
    module: Any, generate_request: GenerateRequest, generation: Generation, weights: dict[int, Any]
) -> None:
    """Checks that the tokens of each span have the logprobs of its weights, given all earlier tokens."""
    assert generation.logprobs is not None
    asked = ask(list(generate_request.prompt_ids))
    for span in generation.versions:
        module.load_state_dict(weights[span.version])
        expected = plain_logprobs(module, asked, list(generation.token_ids)[: span.end])
        assert generation.logprobs[span.start : span.end].tolist() == pytest.approx(expected[span.start :], abs=1e-4)


async def test_a_trainer_in_the_same_process_writes_weights_between_two_tokens():
    module, other = tiny(), tiny(seed=1)
    weights = {n: {k: v.clone() for k, v in m.state_dict().items()} for n, m in ((1, module), (2, other))}
    async with served(module) as (engine, client):
        with engine.weights(version=1):
            pass

        def train() -> None:
            with engine.weights(version=2):
                module.load_state_dict(weights[2])

        generate_request = request(max_tokens=6000)
        streaming = Streaming(client, generate_request)
        await streaming.at_least(3)
        await asyncio.to_thread(train)
        at = engine._batcher.running[0].sampled
        await streaming.at_least(at + 5)
        await client.abort("r")
        generation = await streaming.task
        assert [span.version for span in generation.versions] == [1, 2]
    check_spans(tiny(), generate_request, generation, weights)


async def test_weights_can_be_loaded_from_a_folder_during_a_call(tmp_path: Path):
    module, other = tiny(), tiny(seed=1)
    weights = {n: {k: v.clone() for k, v in m.state_dict().items()} for n, m in ((-1, module), (2, other))}
    other.save_pretrained(tmp_path / "v2")
    tiny("qwen3").save_pretrained(tmp_path / "else")
    async with served(module) as (engine, client):
        status, answer = await post(engine, "/update_weights_from_folder", {"path": str(tmp_path / "else")})
        assert status == 400 and "not of this model" in answer["error"]["message"]
        generate_request = request(max_tokens=6000)
        streaming = Streaming(client, generate_request)
        await streaming.at_least(3)
        body = {"path": str(tmp_path / "v2"), "version": 2}
        assert await post(engine, "/update_weights_from_folder", body) == (
            200,
            {"success": True, "weight_version": "2"},
        )
        at = len(streaming.tokens)
        await streaming.at_least(at + 5)
        await client.abort("r")
        generation = await streaming.task
        assert [span.version for span in generation.versions] == [-1, 2]
    check_spans(tiny(), generate_request, generation, weights)


async def test_a_stream_that_is_cut_still_has_its_versions():
    async with served(tiny()) as (_, client):
        await client.control.set_version(3)
        streaming = Streaming(client, request(max_tokens=5000))
        await streaming.at_least(3)
        client.hang_up("r")
        generation = await streaming.task
        assert generation.versions == (VersionSpan(3, 0, len(generation.token_ids)),)


async def test_the_next_turn_reuses_the_prefix_and_metrics_report_the_load():
    async with served(tiny()) as (engine, client):
        first = await client.generate(request(length=50))
        ids = [*prompt_of(50), *first.token_ids, 5, 6, 7]
        second = await client.generate(GenerateRequest("r2", ids, ENDLESS, 4, session_id="r"))
        assert second.cached_tokens == 61
        streaming = Streaming(client, request("long", max_tokens=5000))
        await streaming.at_least(1)
        load = await client.load()
        assert load is not None and load.running == 1 and 0 < load.kv_use < 1
        await client.abort("long")
        await streaming.task
        async with aiohttp.ClientSession() as session, session.get(engine.url + "/metrics") as reply:
            text = await reply.text()
        metrics = {name: float(value) for name, value in (line.split() for line in text.splitlines() if line[0] != "#")}
        assert metrics['vllm:prefix_cache_hits_total{engine="0",model_name="local"}'] >= 61
        assert metrics['vllm:generation_tokens_total{engine="0",model_name="local"}'] >= 12 + 4 + 1
        assert metrics['rollyard_engine_steps_total{kind="prompts"}'] >= 3
        assert metrics['rollyard_engine_step_seconds_total{kind="tokens"}'] > 0


async def test_it_serves_the_files_of_its_tokenizer(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text(f'"{name}"')
    async with served(tiny(), root=str(tmp_path)) as (_, client):
        listed = await client.tokenizer_file()
        assert listed is not None and b"tokenizer_config.json" in listed and b"safetensors" not in listed
        assert await client.tokenizer_file("tokenizer.json") == b'"tokenizer.json"'
        for name in ("model.safetensors", "..", "../etc/passwd"):
            assert await client.tokenizer_file(name) is None
    async with served(tiny()) as (_, client):
        assert await client.tokenizer_file() is None, "its folder is not known"


async def test_unsupported_parameters_are_refused():
    async with served(tiny()) as (engine, client):
        for extra in ({"min_p": 0.1}, {"presence_penalty": 0.5}):
            with pytest.raises(EngineRefused, match=next(iter(extra))):
                await client.generate(request(sampling=Sampling(extra=extra)))
        await client.generate(request(sampling=Sampling(extra={"min_p": 0.0})))
        for name, value, status in (("nonsense", 1, 400), ("n", 2, 400), ("n", 1, 200)):
            params = {"max_tokens": 1, name: value}
            assert (await post(engine, "/inference/v1/generate", {"token_ids": [1], "sampling_params": params}))[
                0
            ] == status
        for sampling in (Sampling(temperature=-1.0), Sampling(top_p=0.0)):
            with pytest.raises(EngineRefused):
                await client.generate(request(sampling=sampling))
        with pytest.raises(EngineRefused, match="vocabulary"):
            await client.generate(GenerateRequest("r", [1, 999_999], ENDLESS, 4))
        generate = "/inference/v1/generate"
        assert (await post(engine, generate, {"token_ids": [1], "model": "other"}))[0] == 404
        assert (await post(engine, generate, {"token_ids": "x"}))[0] == 400
        assert (await post(engine, "/pause?mode=never"))[0] == 400
        assert (await post(engine, "/v1/chat/completions", {"messages": 5}))[0] == 400


async def test_calls_beyond_the_limit_are_refused():
    async with served(tiny(), settings=Settings(max_calls=1)) as (_, client):
        streaming = Streaming(client, request(max_tokens=5000))
        await streaming.at_least(1)
        with pytest.raises(EngineUnavailable, match="running or waiting"):
            await client.generate(request("second"))
        await client.abort("r")
        await streaming.task
        assert len((await client.generate(request("third"))).token_ids) == 12


async def test_the_context_limits_a_completion():
    async with served(tiny(), max_context=64) as (_, client):
        generation = await client.generate(request(length=60, max_tokens=100))
        assert (len(generation.token_ids), generation.finish_reason) == (4, "length")


async def test_an_abort_is_answered_while_the_model_is_busy():
    async with served(tiny()) as (engine, client):
        streaming = Streaming(client, request(max_tokens=5000))
        await streaming.at_least(2)
        with engine.weights():  # while it is held, the worker is blocked
            await client.abort("r")
            assert (await streaming.task).finish_reason == "abort"
            assert await client.healthy()
        assert len((await client.generate(request("after"))).token_ids) == 12


async def test_tokens_for_a_finished_call_are_ignored():
    call_request = ask(prompt_of(4))
    (steps,) = run(batcher_of(tiny()), [call_request])
    call = Call("r", call_request, has_logprobs=True)
    call.take(steps[0])
    call.abort()
    before = call.choice(), call.usage()
    call.take(steps[1])
    call.fail("too late")
    assert (call.choice(), call.usage(), call.error) == (*before, "")
    assert before[0]["token_ids"] == [steps[0].drawn.token] and before[0]["finish_reason"] == "abort"


@pytest.mark.parametrize("can_clear", [True, False])
async def test_a_failed_step_fails_its_calls_but_not_the_engine(can_clear: bool, monkeypatch: pytest.MonkeyPatch):
    """Also if the cache cannot be cleared, as after an error of the GPU itself."""
    module = tiny()
    async with served(module) as (engine, client):
        if not can_clear:
            monkeypatch.setattr("rollyard.embedded.transformer.model.Model.forget_numbers", _broken_once())
        weight = module.model.norm.weight
        good = weight.detach().clone()
        with engine.weights(), torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(EngineUnavailable, match="not finite"):
            await client.generate(request())
        streamed: list[int] = []
        with pytest.raises(EngineUnavailable, match="not finite"):
            await client.generate(request("s"), streamed.extend)
        with engine.weights(), torch.no_grad():
            weight.copy_(good)
        assert len((await client.generate(request("after"))).token_ids) == 12
        assert await client.healthy()


def _broken_once() -> Callable[[object], None]:
    """Fails at the second call, the one after the failed step; the change of weights before it also clears."""
    calls = iter([None, RuntimeError("an illegal memory access was encountered")])

    def forget(_: object) -> None:
        if (error := next(calls, None)) is not None:
            raise error

    return forget


async def test_concurrent_calls_give_the_same_results_as_single_ones():
    async with served(tiny()) as (_, client):
        requests = [request(f"r{n}", 5 + n, 30, seed=n) for n in range(24)]
        together = await asyncio.gather(*map(client.generate, requests))
        for one, batched in zip(requests[::5], together[::5], strict=True):
            assert (await client.generate(one)).token_ids == batched.token_ids


async def test_a_stopping_engine_answers_open_calls_and_leaves_no_thread():
    async with served(tiny()) as (engine, client):
        streaming = Streaming(client, request(max_tokens=8000))
        await streaming.at_least(1)
        worker = engine._registry.worker
    assert (await streaming.task).finish_reason == "abort"
    assert not worker.is_alive
