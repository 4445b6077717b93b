import asyncio
import io
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from rollyard.cli import main
from tests.client.served import RunningService, served


@dataclass(frozen=True)
class CliResult:
    """The result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> list:
        return [orjson.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Awaitable[CliResult]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs one command line in a thread, in an empty folder and home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*argv: object, stdin: str = "") -> CliResult:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = await asyncio.to_thread(main, [str(word) for word in argv])
        captured = capsys.readouterr()
        return CliResult(status, captured.out, captured.err)

    return run


@asynccontextmanager
async def command(service: RunningService, *argv: object) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Runs a command line in a process of its own, which ends with the block, also if a check in it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard", *map(str, argv)),
        env={**os.environ, **service.environ()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[RunningService, None]:
    """A service that the command line finds by environment variables."""
    async with served(tmp_path / "service") as running:
        for name, value in running.environ().items():
            monkeypatch.setenv(name, value)
        yield running
