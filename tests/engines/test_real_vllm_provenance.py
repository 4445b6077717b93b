"""Real vLLMs that are killed and replaced behind one address: no token gets a version that did not sample it.

`test_provenance.py` tests each case with the scripted engine; this shows that vLLM behaves like it. Starting vLLM is
expensive, so one test has two kills. The last of the three is the vLLM of the other tests, which keeps running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Deadline, Sampling
from rollyard.engines import EngineSpec, Health, Kind, Router
from rollyard.engines.base import Generation, Session
from rollyard.engines.routing.settings import RouterSettings
from tests.real_vllm import Servers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NOT_WATCHED = RouterSettings(watch_s=600.0, backoff_s=0.01, probe_s=60.0, max_tries=20, trip_after=20)
"""No health checks, and the engine is not taken down if calls use connections that are not yet known to be closed."""

LONG = 150
SHORT = 12
RESTARTED = "reports no version where it had version {}: was it restarted?"


class Balancer:
    """One address for the current vLLM. A connection that arrives while there is none waits for the next one."""

    def __init__(self) -> None:
        self.url = ""
        self.waited = asyncio.Event()  # a connection arrived while there was none
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._joined: set[asyncio.Task[None]] = set()

    def lead_to(self, url: str) -> None:
        self._port.set_result(int(url.rpartition(":")[2]))

    def lead_nowhere(self) -> None:
        self._port = asyncio.get_running_loop().create_future()
        self.waited.clear()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._joined.add(task)
        task.add_done_callback(self._joined.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self._port.done():
                self.waited.set()
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", await asyncio.shield(self._port))
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))
        finally:
            writer.close()

    async def close(self) -> None:
        for task in (joined := list(self._joined)):
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until one side closes, then closes the other one."""
    try:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
    finally:
        writer.close()


@asynccontextmanager
async def balanced() -> AsyncGenerator[Balancer, None]:
    balancer = Balancer()
    server = await asyncio.start_server(balancer.accept, "127.0.0.1")
    balancer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield balancer
    finally:
        server.close()
        await balancer.close()


async def sample(session: Session, tokens: int, **fields: Any) -> Generation:
    sampling = Sampling(temperature=0.8, extra={"min_tokens": tokens, "ignore_eos": True})
    values: dict[str, Any] = {"seed": 1, "stop_token_ids": (), "clock": Deadline(), "model_s": 200.0, **fields}
    return await session.generate(tuple(range(100, 150)), sampling=sampling, max_tokens=tokens, **values)


def versions(generation: Generation) -> list[int]:
    """One per token."""
    assert [span.start for span in generation.versions] == [0, *(span.end for span in generation.versions[:-1])]
    assert generation.versions[-1].end == len(generation.token_ids)
    return [span.version for span in generation.versions for _ in range(span.start, span.end)]


def health(router: Router) -> Health:
    (status,) = router.list()
    return status.health


async def quarantined(router: Router) -> None:
    async with asyncio.timeout(120):
        while health(router) is not Health.QUARANTINED:
            await asyncio.sleep(0.01)


async def test_tokens_of_a_replaced_vllm_do_not_have_the_previous_version(
    vllm_servers: Servers, vllm_url: str, vllm_model: Path
) -> None:
    with vllm_servers.serving(str(vllm_model)) as first, vllm_servers.serving() as second:
        for server in (first, second):
            await asyncio.to_thread(server.wait)
        async with balanced() as balancer, Router(NOT_WATCHED) as router:
            balancer.lead_to(first.url)
            await router.add(EngineSpec("real", balancer.url, Kind.VLLM))
            assert router.engine("real").info.tokenizer == str(vllm_model), "a folder that is readable here"
            await router.policies.pause("default", holder="trainer")
            await router.policies.resume("default", 3)
            async with router.session("default", "s1") as session, router.session("default", "s2") as other:
                before = await sample(session, SHORT)
                assert (versions(before), before.untrainable) == ([3] * SHORT, "")

                # Between two tokens of a stream, and of a plain call.
                streamed_ids: list[int] = []
                streamed = asyncio.create_task(sample(session, LONG, on_tokens=streamed_ids.extend))
                whole = asyncio.create_task(sample(other, LONG))
                while len(streamed_ids) < 5:
                    await asyncio.sleep(0.001)
                assert health(router) is Health.UP
                balancer.lead_nowhere()
                first.kill()
                await balancer.waited.wait()
                by_first = len(streamed_ids)
                assert by_first < LONG and not whole.done(), "it was killed too late"
                balancer.lead_to(second.url)
                await quarantined(router)
                await router.policies.resume("default", 4)
                for generation, first_count in ((await streamed, by_first), (await whole, 0)):
                    token_versions = versions(generation)
                    assert (
                        token_versions[:first_count] == [3] * first_count and 3 not in token_versions[first_count:]
                    ), "more than the first one sampled"
                    assert set(token_versions[first_count:]) <= {-1, 4} and len(token_versions) == LONG
                    assert not generation.untrainable or RESTARTED.format(3) in generation.untrainable
                    assert bool(generation.untrainable) is (-1 in token_versions)
                assert streamed.result().untrainable or whole.result().untrainable

                # Between two calls of one session, and between the rollouts of two.
                again = await sample(session, SHORT)
                assert (versions(again), again.untrainable, health(router)) == ([4] * SHORT, "", Health.UP)
                balancer.lead_nowhere()
                second.kill()
                balancer.lead_to(vllm_url)
                async with router.session("default", "s3") as new:
                    calls = [asyncio.create_task(sample(one, SHORT)) for one in (session, new)]
                    await quarantined(router)
                    assert not all(call.done() and not call.result().untrainable for call in calls)
                    await router.policies.resume("default", 5)
                    generations = await asyncio.gather(*calls)
                    for generation in generations:
                        token_versions = versions(generation)
                        assert set(token_versions) <= {-1, 5} and bool(generation.untrainable) is (-1 in token_versions)
                    assert any(RESTARTED.format(4) in generation.untrainable for generation in generations)
                    after = await sample(new, SHORT)
                assert (versions(after), after.untrainable, health(router)) == ([5] * SHORT, "", Health.UP)
