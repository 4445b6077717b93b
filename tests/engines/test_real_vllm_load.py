"""The load of a real vLLM is read correctly."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.core import Sampling
from rollyard.engines import EngineSpec, GenerateRequest, Kind, Router
from rollyard.engines.pool.admission import CapRules

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

LONG = 400


async def test_the_metrics_of_vllm_set_its_session_cap(vllm_url: str) -> None:
    async with Router() as router:
        status = await router.add(EngineSpec("real", vllm_url, Kind.VLLM))
        assert status.cap == CapRules().start and status.load is not None
        engine = router.engine("real")
        request = GenerateRequest("load", tuple(range(100, 400)), Sampling(extra={"ignore_eos": True}), LONG)
        running = asyncio.create_task(engine.generate(request))
        busy = await engine.load()
        while not (busy is not None and busy.running and busy.kv_use) and not running.done():
            busy = await engine.load()
        assert busy is not None and busy.running >= 1 and 0 < busy.kv_use < 1 and busy.preemptions >= 0
        running.cancel()
        await asyncio.wait({running})
