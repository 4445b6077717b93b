"""The processes of `rollyard bench gateway`: the scripted engine, the gateway, and a proxy to compare it with."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.processes import module_argv
from rollyard.cli._deadline import within
from rollyard.cli.rig import START_S, Meter, engine_process, stop
from rollyard.core import Json


@dataclass(frozen=True)
class GatewayProcess:
    """The gateway's process. `recorded` is what it recorded and verified, set at the end."""

    process: asyncio.subprocess.Process
    urls: list[str]
    recorded: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def meter(self) -> Meter:
        return Meter(self.process.pid)

    async def stall_ms(self) -> float:
        """Returns the longest time that its event loop was blocked since the last call."""
        self.process.send_signal(signal.SIGUSR1)
        stall = (await _line(self.process))["stall_ms"]
        assert isinstance(stall, float)
        return stall


@asynccontextmanager
async def engine(script: dict[str, Json], *, max_context: int | None = None) -> AsyncGenerator[tuple[Meter, str], None]:
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        async with engine_process(folder, 0.0, max_context=max_context) as (pid, url):
            yield Meter(pid), url


@asynccontextmanager
async def gateway(engine_url: str, sessions: int) -> AsyncGenerator[GatewayProcess, None]:
    async with _process("_gateway_server", engine_url, str(sessions)) as process:
        ready = await _line(process)
        server = GatewayProcess(process, list(ready["urls"]))  # type: ignore[arg-type]
        yield server
        with suppress(ProcessLookupError):
            process.terminate()
        server.recorded.update(await _line(process))  # type: ignore[arg-type]
        await process.wait()


@asynccontextmanager
async def proxy(engine_url: str) -> AsyncGenerator[tuple[Meter, str], None]:
    async with _process("_proxy", engine_url) as process:
        yield Meter(process.pid), str((await _line(process))["url"])


@asynccontextmanager
async def _process(module: str, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    argv = module_argv(module, *arguments)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            await stop(process)


async def _line(process: asyncio.subprocess.Process) -> dict[str, Json]:
    assert process.stdout is not None
    async with within(START_S, "a process of the bench", "a line on standard output"):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the bench ended without output")
    return json.loads(line)
