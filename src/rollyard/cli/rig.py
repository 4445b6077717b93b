"""Runs a service and a scripted engine for one benchmark, each in its own process on loopback.

CPU and memory are read per process from /proc, so the service's figures contain nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollyard.cli._deadline import within
from rollyard.client import AsyncClient
from rollyard.core import Json
from rollyard.testing.tokenizer_files import tokenizer_dir

START_S = 60.0
STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads the CPU and memory of one process from /proc."""

    pid: int

    def cpu_s(self) -> float:
        return self._times_s(11)

    def children_cpu_s(self) -> float:
        """CPU seconds of its children that have ended."""
        return self._times_s(13)

    def _times_s(self, first: int) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[first]) + int(fields[first + 1])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0


def machine_busy_s() -> float:
    """CPU seconds that all processes of this machine have used, without idle and I/O wait."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Rig:
    client: AsyncClient
    service: Meter
    engine: Meter
    engine_url: str


@asynccontextmanager
async def rig(
    script: Mapping[str, Json], *, latency_s: float = 0.0, settings: Mapping[str, Json] | None = None
) -> AsyncGenerator[Rig, None]:
    """Starts both processes, and stops them at the end. Yields when both are ready."""
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        async with (
            engine_process(folder, latency_s) as (engine_pid, engine_url),
            service(folder, settings or {}) as served,
            AsyncClient(served.url, served.token) as client,
        ):
            await client.add_engine(url=engine_url, kind="vllm", tokenizer=str(tokenizer_dir()), capacity=4096)
            yield Rig(client, Meter(served.process.pid), Meter(engine_pid), engine_url)


@asynccontextmanager
async def engine_process(
    folder: Path, latency_s: float, *, max_context: int | None = None
) -> AsyncGenerator[tuple[int, str], None]:
    """Runs the scripted engine with `script.json` of the folder. Yields its pid and its URL."""
    arguments = ["--port", "0", "--script", str(folder / "script.json"), "--tokenizer", str(tokenizer_dir())]
    if latency_s:
        arguments += ["--latency-s", str(latency_s)]
    if max_context is not None:
        arguments += ["--max-context", str(max_context)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard.testing.scripted_engine", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with within(START_S, "starting the scripted engine", "its address on standard output"):
            line = await process.stdout.readline()
        yield process.pid, json.loads(line)["url"]
    finally:
        await stop(process)


@dataclass(frozen=True, slots=True)
class Served:
    """A running service."""

    process: asyncio.subprocess.Process
    url: str
    token: str


@asynccontextmanager
async def service(folder: Path, settings: Mapping[str, Json]) -> AsyncGenerator[Served, None]:
    """Runs `rollyard serve` on `folder/data` and yields when it is ready. Stops it at the end, if it still runs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ROLLYARD_")}
    all_settings = {"data_dir": str(folder / "data"), "port": 0, "log_level": "warning", "drain_s": 1.0, **settings}
    environment |= {f"ROLLYARD_{key.upper()}": _text(value) for key, value in all_settings.items()}
    url_file = folder / "data" / "url"
    url_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "serve", env=environment, stderr=asyncio.subprocess.PIPE, cwd=folder
    )
    try:
        assert process.stderr is not None
        notes: list[str] = []
        async with within(START_S, "starting the service", lambda: f"{url_file}; it logged: {_end_of(notes)}"):
            while not url_file.exists():  # written before the line that reports it
                line = (await process.stderr.readline()).decode(errors="replace")
                notes.append(line)
                if not line:
                    raise RuntimeError("the service did not start:\n" + "".join(notes))
        echo = asyncio.ensure_future(_echo(process.stderr))
        yield Served(process, url_file.read_text().strip(), (folder / "data" / "token").read_text().strip())
        echo.cancel()
    finally:
        await stop(process)


def _end_of(notes: Sequence[str]) -> str:
    return "".join(notes)[-500:].strip() or "nothing"


async def _echo(stream: asyncio.StreamReader) -> None:
    """Copies the service's log to stderr, so that its pipe does not fill up."""
    async for line in stream:
        sys.stderr.buffer.write(line)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Sends SIGTERM, and SIGKILL if the process does not end within STOP_S."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)
