"""A real vLLM that was started by its hub name, as in `vllm serve Qwen/Qwen3-8B`."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.real_vllm import HUB_NAME, Servers
from tests.service.site import open_site, task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(180)]


async def test_its_tokenizer_is_found_in_the_hub_cache_and_verified(
    vllm_url: str, vllm_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(vllm_servers.hub_cache))
    limits = {"init_s": 60, "run_s": 120, "eval_s": 60, "model_s": 60, "max_turns": 1}
    async with open_site(tmp_path) as site:
        added = await site.post("/v1/engines", {"id": "e1", "url": vllm_url})
        assert added.status == 201, added.body
        async with site.http.get(f"{vllm_url}/v1/models") as answer:
            assert (await answer.json())["data"][0]["root"] == HUB_NAME, "vLLM reports no folder"
        (engine,) = (await site.get("/v1/status")).body["engines"]
        assert engine["state"] == "up", engine
        body = {"id": "r1", "task": task(limits=limits, sampling={"max_tokens": 8})}
        assert (await site.post("/v1/rollouts", {"rollouts": [body]})).status == 202
        await site.ended("r1")
        (trace,) = (await site.get("/v1/rollouts/r1/traces")).body["traces"]
    assert trace["tokenizer_verified"] is True
    assert 0 < sum(trace["mask"]) <= 8
