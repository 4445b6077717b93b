"""What the tests of the reference system's API share: a site with it, and its trainer's own way of reading a result."""

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
    """An instance of our own `shell`: a command decides its reward."""
    data = {"instruction": "write good", "checks": ['test "$(cat out.txt)" = good']}
    return {"data_source": "shell", "instance_id": "i1", "trajectory_id": trajectory_id, **data, **fields}


def good() -> tuple[str, str]:
    return shell("echo good > out.txt"), finish()


@dataclass
class Trainer:
    """The reference's trainer, as far as it talks to us: no tokens, and never a job id unless it is told one."""

    site: Site
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0, "top_p": 1.0, "max_iterations": 4})

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.site.post(path, body, token="")

    async def process(self, instance: dict[str, Any], job_id: str | None = None, **params: Any) -> Answer:
        body: dict[str, Any] = {"instance": instance, "sampling_params": {**self.params, **params}}
        return await self.post("/process", body if job_id is None else {**body, "job_id": job_id})

    async def waited_for(self, count: int) -> None:
        """Until so many calls wait in /process."""
        async with asyncio.timeout(90):
            while (await self.site.get("/status", token="")).body["pending_jobs"] != count:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def open_trainer(folder: Path, engine: ScriptedEngine, **values: Any) -> AsyncGenerator[Trainer, None]:
    """Started, with one engine, as its own trainer would have it."""
    chosen = {"prorl": True, "prorl_tokenizer": str(tokenizer_dir()), "trainer_tokens": [], **values}
    async with open_site(folder, **chosen) as site:
        trainer = Trainer(site)
        assert (await trainer.post("/add_llm_server", {"address": engine.url})).status == 200
        await trainer.post("/start")
        yield trainer


def as_trained(messages: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and logprobs of a result, put together as the reference's trainer does."""
    assert messages[-1]["role"] == "assistant"
    ids, mask, logprobs = [], [], []
    for message in messages:
        count = len(message["token_ids"])
        ids += message["token_ids"]
        mask += [int(message["role"] == "assistant")] * count
        logprobs += message["logprobs"] if message.get("logprobs") is not None else [0.0] * count
    assert len(ids) == len(mask) == len(logprobs)
    return ids, mask, logprobs
