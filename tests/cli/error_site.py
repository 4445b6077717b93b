"""A service in a thread, for tests that run the real program beside it, and what such a program printed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.client.served import RunningService, served

T = TypeVar("T")

TIMEOUT_S = 120  # a guard against a hang
CONTEXT = 2048  # tokens of the engine without logprobs


class Background:
    """An event loop in a thread. Each manager is entered and left in a task of its own."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background", daemon=True)
        self._thread.start()
        self._held: list[tuple[asyncio.Event, Future[None]]] = []
        return self

    def __exit__(self, *_: object) -> None:
        for stop, holding in reversed(self._held):
            self._loop.call_soon_threadsafe(stop.set)
            holding.result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enters the manager, until the block of this object ends."""
        opened: Future[T] = Future()
        stop = asyncio.Event()

        async def hold() -> None:
            try:
                async with manager as value:
                    opened.set_result(value)
                    await stop.wait()
            except BaseException as error:
                if opened.done():
                    raise
                opened.set_exception(error)

        self._held.append((stop, asyncio.run_coroutine_threadsafe(hold(), self._loop)))
        return opened.result(TIMEOUT_S)


@dataclass(frozen=True)
class Printed:
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class ErrorSite:
    """A service, an engine that it does not have, and a folder in which commands run."""

    service: RunningService
    engine: ScriptedEngine
    folder: Path

    def run(self, *argv: str, **environ: str) -> Printed:
        """Runs `rollyard ARGV` in the folder; it finds the service by environment variables."""
        return self.run_program(sys.executable, "-m", "rollyard", *argv, **environ)

    def run_program(self, *argv: str, **environ: str) -> Printed:
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env={**os.environ, "HOME": str(self.folder / "home"), **self.service.environ(), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Printed(done.returncode, done.stdout, done.stderr)

    def write(self, name: str, *lines: dict[str, Any] | str) -> str:
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        (self.folder / name).write_text("".join(f"{text}\n" for text in texts))
        return name


@contextmanager
def error_site(folder: Path) -> Generator[ErrorSite, None, None]:
    """One service with one scripted engine; beside it an engine with a short context and without logprobs."""
    mute = Rules(default=(Reply("Hello.", fault="no_logprobs"),))
    with Background() as background:
        service = background.open(served(folder / "service"))
        tokenizer = FolderTokenizer(tokenizer_dir())
        engine = background.open(ScriptedEngine(mute, tokenizer=tokenizer, max_context=CONTEXT))
        yield ErrorSite(service, engine, folder)
