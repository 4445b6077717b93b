"""Changing weights on the real vLLM: the versions in a trace switch at the token where the pause interrupted it, and a
trainer that is killed during an update leaves the engine paused until a version is set.

The weights themselves do not change: the test is that every step of the handshake is obeyed.
"""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.core import Deadline, Sampling
from rollyard.core.policy import PauseMode
from rollyard.engines import EngineSpec, GenerateRequest, Kind, Router, VersionSpan
from tests.service.site import TRAINER, Site, open_site, task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TOKENS = 32
PROMPT = tuple(range(100, 400))  # more than two blocks of its cache, which are 128 tokens on a CPU
SAMPLING = Sampling(temperature=0.8, extra={"min_tokens": TOKENS, "ignore_eos": True})


class Vllm:
    """The real vLLM, as a trainer and a test use it."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def sampled(self) -> float:
        """Returns the number of tokens that it has sampled since its start. vLLM has no event for that."""
        async with self._http.get(f"{self._url}/metrics") as reply:
            match = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", await reply.text(), re.MULTILINE)
        return float(match[1]) if match else 0.0

    async def goes_on(self, tokens: int = 4) -> None:
        """Waits until it has sampled more tokens."""
        before = await self.sampled()
        async with asyncio.timeout(120):
            while await self.sampled() < before + tokens:
                await asyncio.sleep(0.02)

    async def is_paused(self) -> bool:
        async with self._http.get(f"{self._url}/is_paused") as reply:
            return (await reply.json())["is_paused"]

    async def post(self, path: str, body: Any = None) -> None:
        async with self._http.post(f"{self._url}{path}", json=body) as reply:
            reply.raise_for_status()


@asynccontextmanager
async def real(url: str) -> AsyncGenerator[Vllm, None]:
    async with aiohttp.ClientSession() as http:
        yield Vllm(url, http)


@asynccontextmanager
async def served(folder: Path, url: str, vllm_model: Path) -> AsyncGenerator[Site, None]:
    engine = {"id": "real", "url": url, "tokenizer": str(vllm_model)}
    async with open_site(folder, engines=[engine]) as site:
        async with asyncio.timeout(120):
            while not any(entry["state"] == "up" for entry in (await site.get("/v1/engines")).body["engines"]):
                await asyncio.sleep(0.1)
        yield site


async def begin(site: Site, rollout_id: str, tokens: int = TOKENS) -> None:
    sampling = {"temperature": 0.8, "max_tokens": tokens, "extra": {**SAMPLING.extra, "min_tokens": tokens}}
    limits = {"run_s": 200, "model_s": 200, "max_turns": 2}
    answer = await site.post(
        "/v1/rollouts", {"id": rollout_id, "task": task("say anything", sampling=sampling, limits=limits)}
    )
    assert answer.status == 202, answer.body


async def versions_of(site: Site, rollout_id: str) -> list[list[int]]:
    """Returns the versions of the sampled tokens of its trace, span by span."""
    (trace,) = (await site.get(f"/v1/rollouts/{rollout_id}/traces")).body["traces"]
    return [trace["versions"][span["start"] : span["end"]] for span in trace["spans"]]


async def test_a_pause_during_a_turn_switches_the_versions_of_its_trace_at_that_token(
    tmp_path: Path, vllm_url: str, vllm_model: Path
) -> None:
    async with real(vllm_url) as vllm, served(tmp_path, vllm_url, vllm_model) as site:
        assert (await site.post("/v1/policies/default/resume", {"version": 7})).body["version"] == 7
        member = site.served.app_state.router.pool("default").members["real"]
        before = member.stats.tokens
        await begin(site, "r1")
        await vllm.goes_on()
        paused = await site.post("/v1/policies/default/pause", {"mode": "abort"}, token=TRAINER)
        assert paused.body["state"] == "paused", paused.body
        cut = member.stats.tokens - before
        assert await vllm.is_paused() and 0 < cut < TOKENS
        resumed = await site.post("/v1/policies/default/resume", {"version": 8}, token=TRAINER)
        assert (resumed.body["state"], resumed.body["engines"][0]["version"]) == ("running", 8), resumed.body
        ended = await site.ended("r1")
        assert ended["failure"] is None or ended["failure"]["blame"] == "policy", ended
        first, *later = await versions_of(site, "r1")
        assert first == [7] * cut + [8] * (TOKENS - cut)
        assert all(set(versions) == {8} for versions in later)


async def test_kept_calls_are_frozen_and_report_their_versions_and_no_old_kv_is_left(
    vllm_url: str, vllm_model: Path
) -> None:
    async with real(vllm_url) as vllm, Router() as router:
        await router.add(EngineSpec("real", vllm_url, Kind.VLLM, tokenizer=str(vllm_model)))
        await router.policies.resume("default", 3)
        engine = router.engine("real")

        async def cached(name: str) -> int | None:
            return (await engine.generate(GenerateRequest(name, PROMPT, Sampling(), max_tokens=1))).cached_tokens

        await cached("first")
        assert await cached("second")
        async with router.session("default", "s1") as session:

            def call(max_tokens: int) -> Any:
                return session.generate(
                    PROMPT,
                    sampling=SAMPLING,
                    max_tokens=max_tokens,
                    seed=1,
                    stop_token_ids=(),
                    clock=Deadline(),
                    model_s=200.0,
                )

            await call(TOKENS)  # which shows that it reports its versions
            paused_call = asyncio.create_task(call(TOKENS))
            await vllm.goes_on()
            status = await router.policies.pause("default", holder="me", mode=PauseMode.KEEP)
            assert status.engines[0].is_paused and await vllm.is_paused() and not paused_call.done()
            at = await vllm.sampled()
            await router.policies.resume("default", 4)
            generation = await paused_call
        assert [span.version for span in generation.versions] == [3, 4] and len(generation.token_ids) == TOKENS
        sampled_after = await vllm.sampled() - at
        cut = generation.versions[0].end
        assert (
            generation.versions == (VersionSpan(3, 0, cut), VersionSpan(4, cut, TOKENS))
            and TOKENS - cut == sampled_after
        )
        assert router.list()[0].stats.aborts == 0, "it was never interrupted"
        assert not await cached("third"), "the cache was cleared"


TRAIN = """
import sys, time
from rollyard.client import Client
with Client(sys.argv[1], sys.argv[2]) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    with client.policy("default").update(version=1, lease_s=1.0):
        print("writing", flush=True)
        time.sleep(600)
"""


async def test_a_trainer_killed_during_an_update_leaves_the_engine_quarantined_until_a_version_is_set(
    tmp_path: Path, vllm_url: str, vllm_model: Path
) -> None:
    async with real(vllm_url) as vllm, served(tmp_path, vllm_url, vllm_model) as site:
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", TRAIN, site.url, TRAINER], stdin=pipe, stdout=pipe) as trainer:
            assert trainer.stdin is not None and trainer.stdout is not None
            try:
                assert (await asyncio.to_thread(trainer.stdout.readline)).strip() == b"ready", "r1 must not have ended"
                await begin(site, "r1", 5 * TOKENS)  # a fast engine would end a shorter one before the pause
                await vllm.goes_on()
                trainer.stdin.write(b"\n")
                trainer.stdin.flush()
                assert (await asyncio.to_thread(trainer.stdout.readline)).strip() == b"writing"
            finally:
                trainer.kill()
        async with asyncio.timeout(90):
            while (policy := (await site.get("/v1/policies/default")).body)["state"] != "abandoned":
                await asyncio.sleep(0.05)
        assert [(e["state"], e["paused"]) for e in policy["engines"]] == [("quarantined", True)]
        clock = site.served.app_state.pipeline.live["r1"].clock
        at, used_s = await vllm.sampled(), clock.used_s
        await asyncio.sleep(2.0)
        assert await vllm.sampled() == at and await vllm.is_paused(), "nothing resumed by itself"
        assert not clock.is_running and clock.used_s == used_s, "its clock does not run"
        assert (await site.get("/v1/rollouts/r1")).body["state"] == "run"
        assert (await site.post("/v1/policies/default/resume", {"version": 1})).body["state"] == "running"
        ended = await site.ended("r1")
        assert ended["failure"] is None or ended["failure"]["blame"] == "policy", ended
        first, *later = await versions_of(site, "r1")
        assert first == sorted(first) and set(first) == {0, 1} and all(set(versions) == {1} for versions in later)
