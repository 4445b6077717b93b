"""kill -9 of `rollyard serve` during an evaluation: the next process ends it, with the same numbers."""

import asyncio
import os
import signal
import sys
from math import comb
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.testing.script import Reply, Turn
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import finish, scripted, shell
from tests.service.skill import member_of
from tests.service.test_evals import SKILL, solves, tasks

pytestmark = pytest.mark.slow


async def start(folder: Path, engine: str) -> tuple[asyncio.subprocess.Process, str]:
    """Starts the command; it prints its URL on stderr."""
    values = {"DATA_DIR": str(folder / "data"), "RUNTIMES": "local", "LOG_LEVEL": "error"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard", "serve", "--port", "0", "--engine", engine),
        *("--tokenizer", str(tokenizer_dir())),
        env={**os.environ, **{f"ROLLYARD_{name}": value for name, value in values.items()}},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while not (line := (await process.stderr.readline()).decode()).startswith("rollyard "):
        assert line, "it ended"
    return process, line.split(" at ")[1].split(",")[0].strip()


async def test_an_evaluation_survives_a_killed_service(tmp_path: Path) -> None:
    is_slow = True

    def scripted_turn(turn: Turn) -> Reply:
        if "<|im_start|>" not in turn.text:
            return Reply("ok")
        wait_s = 60.0 if is_slow and member_of(turn.session_id)[0] != "e~e.0" else 0.0
        return Reply(
            shell("touch done") if turn.number == 0 and solves(turn.session_id) else finish(), latency_s=wait_s
        )

    async with scripted() as engine, aiohttp.ClientSession() as http:
        engine.script = scripted_turn
        process, url = await start(tmp_path, engine.url)
        token = (tmp_path / "data" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}

        async def call(method: str, path: str, body: Any = None) -> Any:
            async with http.request(method, url + path, json=body, headers=headers) as answer:
                return await answer.json(content_type=None)

        body = {"id": "e", "source": tasks(3), "k": 4}
        try:
            assert (await call("POST", "/v1/evals", body))["state"] == "running"
            async with asyncio.timeout(90):
                while (await call("GET", "/v1/evals/e?wait_s=0.2"))["done"] < 4:
                    pass
        finally:
            process.send_signal(signal.SIGKILL)
            await process.communicate()
        is_slow = False
        process, url = await start(tmp_path, engine.url)
        try:
            async with asyncio.timeout(90):
                while (ended := await call("GET", "/v1/evals/e?wait_s=20"))["state"] == "running":
                    pass
            assert (ended["state"], ended["done"], ended["result"]["missing"]) == ("done", 12, {})
            pass_at = {k: it["mean"] for k, it in ended["result"]["all"]["pass_at"].items()}
            assert pass_at == pytest.approx(
                {str(k): sum(1 - comb(4 - c, k) / comb(4, k) for c in SKILL) / 3 for k in range(1, 5)}, abs=1e-12
            )
            assert await call("POST", "/v1/evals", body) == ended
        finally:
            process.send_signal(signal.SIGTERM)
            await process.communicate()
