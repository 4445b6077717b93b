"""Sessions in the pipeline: a slow client is not a stall, and kill -9 invents no reward."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from rollyard import AsyncClient
from rollyard.agents.session import SessionAgent
from rollyard.core import AgentSpec, Limits, Outcome, Task
from tests.acceptance.test_kill import Service, engine
from tests.pipeline.site import open_site, says

pytestmark = pytest.mark.slow


async def test_a_silent_client_is_not_a_stall(tmp_path: Path):
    task = Task("session", agent=AgentSpec("session"), limits=Limits(stall_s=0.3, run_s=30))
    async with open_site(tmp_path, says("one")) as site:
        agent = site.pipeline.resources.agents.get("session")
        assert isinstance(agent, SessionAgent)
        rollout_id = await site.submit(task)
        live = await agent.opened(rollout_id)
        await asyncio.sleep(1.0)  # three times the bound, checked every 0.05 s
        live.give({"reward": 1.0})
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert (rollout.ending.outcome, rollout.attempt) == (Outcome.COMPLETED, 1)
        assert agent.live(rollout_id) is None
        await site.idle()
        site.nothing_left()


async def test_after_kill_9_an_open_session_is_lost_and_a_saved_reward_is_not(tmp_path: Path):
    async with asyncio.timeout(90), engine(tmp_path) as engine_url:
        service = Service(tmp_path, engine_url)
        await service.start()
        try:
            async with AsyncClient(service.url, service.token) as client:
                await client.session("begun").__aenter__()
                saved = await client.session("saved").__aenter__()
                body = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
                headers = {"x-api-key": saved.key}
                async with (
                    aiohttp.ClientSession(headers=headers) as http,
                    http.post(f"{saved.base_url}/chat/completions", json=body) as reply,
                ):
                    assert reply.status == 200
                await client.resize_pools(eval=0)
                rewarding = asyncio.create_task(saved.reward(0.75))
                async for event in client.events(after="0-0"):
                    if (event.rollout, event.state) == ("saved", "eval"):
                        break
                await service.kill()
                await service.start()
                record = await rewarding  # the client retries until it gets an answer
                assert (record.outcome, record.reward, record.attempt) == ("completed", 0.75, 1)
                lost = await client.wait("begun", timeout_s=30)
                assert (lost.outcome, lost.reward, lost.attempt) == ("failed", None, 2)
                assert lost.failure is not None and lost.failure["code"] == "session_lost"
        finally:
            await service.stop()
