"""Shared parts of the tests of ProRL Agent's API: a site that serves it, and its trainer's reading of a result."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Answer, Site, finish, open_site, shell

TOOLS_OFF = {"is_reasoning_task": True}


def work(trajectory_id: int | None = 0, **fields: Any) -> dict[str, Any]:
    """An instance of Rollyard's `shell` environment: a command decides its reward."""
    data = {"instruction": "write good", "checks": ['test "$(cat out.txt)" = good']}
    return {"data_source": "shell", "instance_id": "i1", "trajectory_id": trajectory_id, **data, **fields}


def good() -> tuple[str, str]:
    return shell("echo good > out.txt"), finish()


@dataclass
class Trainer:
    """ProRL Agent's trainer, as far as it calls the service: no tokens, and no job id unless one is given."""

    site: Site
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0, "top_p": 1.0, "max_iterations": 4})

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.site.post(path, body, token="")

    async def process(self, instance: dict[str, Any], job_id: str | None = None, **params: Any) -> Answer:
        body: dict[str, Any] = {"instance": instance, "sampling_params": {**self.params, **params}}
        return await self.post("/process", body if job_id is None else {**body, "job_id": job_id})

    async def waited_for(self, count: int) -> None:
        """Waits until this many calls wait in /process."""
        async with asyncio.timeout(90):
            while (await self.site.get("/status", token="")).body["pending_jobs"] != count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def open_trainer(folder: Path, engine: ScriptedEngine, **values: Any) -> AsyncGenerator[Trainer, None]:
    """A trainer with an open intake and one engine, as the real trainer sets it up."""
    chosen = {"prorl": True, "prorl_tokenizer": str(tokenizer_dir()), "trainer_tokens": [], **values}
    async with open_site(folder, **chosen) as site:
        trainer = Trainer(site)
        assert (await trainer.post("/add_llm_server", {"address": engine.url})).status == 200
        await trainer.post("/start")
        yield trainer


def as_trained(messages: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and logprobs of a result, concatenated as ProRL Agent's trainer does."""
    assert messages[-1]["role"] == "assistant"
    ids, mask, logprobs = [], [], []
    for message in messages:
        count = len(message["token_ids"])
        ids += message["token_ids"]
        mask += [int(message["role"] == "assistant")] * count
        logprobs += message["logprobs"] if message.get("logprobs") is not None else [0.0] * count
    assert len(ids) == len(mask) == len(logprobs)
    return ids, mask, logprobs
