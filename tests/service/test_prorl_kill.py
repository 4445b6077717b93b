"""kill -9 of `rollyard serve --prorl` during a /process call: the same call afterwards is the same rollout."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.testing.script import Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.prorl_parts import good, work
from tests.service.site import scripted

pytestmark = pytest.mark.slow


class Served:
    """The command, which can be started repeatedly; it prints its URL on stderr."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> None:
        values = {"DATA_DIR": str(self._folder / "data"), "RUNTIMES": "local", "LOG_LEVEL": "error"}
        environ = {**os.environ, **{f"ROLLYARD_{name}": value for name, value in values.items()}}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard", "serve", "--prorl", "--port", "0", "--tokenizer", str(tokenizer_dir())),
            env=environ,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        while not (line := (await self._process.stderr.readline()).decode()).startswith("rollyard "):
            assert line, "it ended"
        self.url = line.split(" at ")[1].split(",")[0].strip()

    async def end(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.communicate()


async def ask(http: aiohttp.ClientSession, url: str, body: Any = None) -> tuple[int, Any]:
    async with http.post(url, json=body) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_jobs_survive_a_killed_service(tmp_path: Path) -> None:
    """A job with a `job_id`, and one without."""
    engine: ScriptedEngine = scripted(Reply(good()[0], stall_after=3, tokens_per_s=1000), good()[1])
    service = Served(tmp_path)
    params = {"max_iterations": 4}
    bodies = [
        {"instance": work(), "sampling_params": params},
        {"instance": work(trajectory_id=1), "sampling_params": params, "job_id": "job-1"},
    ]
    async with engine, aiohttp.ClientSession() as http:
        await service.start()
        assert (await ask(http, f"{service.url}/add_llm_server", {"address": engine.url}))[0] == 200
        assert (await ask(http, f"{service.url}/start"))[0] == 200
        calls = [asyncio.create_task(ask(http, f"{service.url}/process", body)) for body in bodies]
        while engine.running < 2:
            await asyncio.sleep(0.01)
        await service.end(signal.SIGKILL)
        for broken in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(broken, aiohttp.ClientError)
        engine.script = scripted(*good()).script
        await service.start()
        for body in bodies:  # without /start and /add_llm_server: both are stored
            async with asyncio.timeout(90):  # the start does not wait for a slow probe of the stored engine
                while (answer := await ask(http, f"{service.url}/process", body))[0] == 503:
                    await asyncio.sleep(0.05)
            status, result = answer
            assert (status, result["resolved"], result["error"]) == (200, True, None)
            about = result["rollyard"]
            assert (about["attempt"], about["outcome"]) == (2, "completed")  # the same rollout, started again
            assert (await ask(http, f"{service.url}/process", body))[1] == result
        token = (tmp_path / "data" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        async with http.get(f"{service.url}/v1/rollouts?run=prorl", headers=headers) as answer:
            assert len((await answer.json())["rollouts"]) == 2
        await service.end(signal.SIGTERM)
