"""Repeated kill -9 of the whole service while rollouts run: no rollout is lost or invented.

The processes are real: `rollyard serve` with bubblewrap, a scripted engine in its own process, and a client that keeps
submitting and reading across the kills. The script determines each reward.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rollyard import AsyncClient
from rollyard.client import Record, ServiceUnreachable
from rollyard.core import Json
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.worker import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MARK = "ROLLYARD_KILL_TEST"


def call(name: str, **arguments: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SCRIPT: dict[str, Json] = {
    "rules": [
        {"if": "write good", "turns": [call("shell", command="echo good > out.txt"), call("finish")]},
        {"if": "write bad", "turns": [call("shell", command="echo bad > out.txt"), call("finish")]},
    ],
    "default": ["ok"],
}


def task(number: int) -> dict[str, Json]:
    word = "good" if number % 3 else "bad"
    data: dict[str, Json] = {"instruction": f"write {word}", "checks": ['test "$(cat out.txt)" = good']}
    return {"environment": "shell", "data": data}


def reward(number: int) -> float:
    return 1.0 if number % 3 else 0.0


@asynccontextmanager
async def engine(folder: Path, script: dict[str, Json] = SCRIPT) -> AsyncGenerator[str, None]:
    (folder / "script.json").write_text(json.dumps(script))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard.testing.scripted_engine", "--latency-s", "0.05"),
        *("--script", str(folder / "script.json"), "--tokenizer", str(tokenizer_dir())),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["url"]
    finally:
        process.terminate()
        await process.wait()


class Service:
    """`rollyard serve` on one data folder and one port, started as often as it is killed."""

    def __init__(self, folder: Path, engine_url: str) -> None:
        self._folder = folder
        self._engine = engine_url
        self._process: asyncio.subprocess.Process | None = None
        self.port = free_port()

    async def start(self) -> None:
        settings = {
            "DATA_DIR": str(self._folder / "data"),
            "PORT": str(self.port),
            "MAX_ATTEMPTS": "100",
            "RUN_SLOTS": "24",
            "INIT_SLOTS": "8",
            "EVAL_SLOTS": "8",
            "LOG_LEVEL": "error",
            "ENGINES": json.dumps([{"url": self._engine, "tokenizer": str(tokenizer_dir())}]),
        }
        url_file = self._folder / "data" / "url"
        url_file.unlink(missing_ok=True)
        environment = dict(os.environ) | {f"ROLLYARD_{key}": value for key, value in settings.items()} | {MARK: "1"}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollyard", "serve", env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        while not url_file.exists():
            await asyncio.sleep(0.05)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        await self._process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self._folder / "data" / "token").read_text().strip()


def sandboxes_below(folder: Path) -> list[str]:
    """Returns the command lines of processes that name a sandbox folder of this test: bwrap and its children."""
    processes: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in line and "serve" not in line and "scripted_engine" not in line:
                    processes.append(f"{entry.name}: {line}")
    return processes


async def test_nothing_is_lost_or_invented_when_the_service_is_killed(tmp_path: Path):
    await killed_service(tmp_path, rollouts=50, kills=3)


async def killed_service(folder: Path, *, rollouts: int, kills: int) -> dict[str, int]:
    """Raises AssertionError if a rollout was lost, ended twice or got another reward, or a sandbox is left."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with engine(folder) as engine_url:
        service = Service(folder, engine_url)
        await service.start()
        ids = [f"r{number}" for number in range(rollouts)]
        try:
            submit = asyncio.create_task(_submit_all(service, ids))
            for _ in range(kills):
                await _some_run(service)
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                await service.kill()
                await service.start()
            await submit
            records = await _read_all(service, rollouts)
        finally:
            await service.stop()
    assert sorted(record.id for record in records) == sorted(ids), "each has exactly one terminal record"
    wrong = [
        (record.id, record.outcome, record.reward, record.failure)
        for record in records
        if record.outcome != "completed" or record.reward != reward(int(record.id[1:]))
    ]
    assert not wrong
    assert max(record.attempt for record in records) > 1, "the kills hit something"
    async with asyncio.timeout(90):
        while sandboxes_below(folder):
            await asyncio.sleep(0.1)
    return {"rollouts": len(records), "kills": kills, "attempts": sum(record.attempt for record in records)}


async def _some_run(service: Service) -> None:
    """Waits until rollouts are in RUN, or all submitted ones have ended, so that a kill interrupts something."""
    async with AsyncClient(service.url, service.token, retry_s=30) as client:
        while True:
            states = (await client.status())["states"]
            if states["run"] or (states["ended"] and not sum(states.values()) - states["ended"]):
                return
            await asyncio.sleep(0.02)


async def _submit_all(service: Service, ids: list[str]) -> None:
    """Submits in small lots, each repeated until it is answered: the ids make that idempotent."""
    for start in range(0, len(ids), 25):
        lot = ids[start : start + 25]
        while True:
            try:
                async with AsyncClient(service.url, service.token) as client:
                    await client.submit([task(int(name[1:])) for name in lot], ids=lot)
                break
            except ServiceUnreachable:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.2)


async def _read_all(service: Service, count: int) -> list[Record]:
    """Reads the terminal records page by page, until all submitted rollouts have ended."""
    records: list[Record] = []
    after: str | None = None
    async with AsyncClient(service.url, service.token) as client:
        while len(records) < count:
            page = await client.list(state="ended", after=after, limit=200, wait_s=10)
            records += page.rollouts
            after = page.next or after
    return records
