"""A whole service of real parts on loopback, for tests of the client and the CLI: SQLite, the local runtime, a
scripted engine over HTTP; and a proxy that drops connections between client and service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from rollyard.service import build
from rollyard.service.server import serve
from rollyard.service.settings import Settings, load_settings
from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir


def call(name: str, **arguments: object) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SCRIPT = Rules(
    rules=(
        ("NEVER", (Reply(call("shell", command="true"), latency_s=3600.0),)),
        ("six times seven", (Reply("It is 42."),)),
    ),
    default=(Reply(call("shell", command="echo hello > done")), Reply(call("finish"))),
)
"""Writes `done` in the first turn and ends in the second; a task that contains NEVER gets no response."""


def task(instruction: str = "Write done.", check: str = "test -f done", **fields: object) -> dict[str, Any]:
    return {"environment": "shell", "data": {"instruction": instruction, "checks": [check]}, **fields}


@dataclass
class RunningService:
    """A running service, for tests."""

    url: str
    token: str
    data_dir: Path
    engine: ScriptedEngine

    def environ(self) -> dict[str, str]:
        return {"ROLLYARD_URL": self.url, "ROLLYARD_TOKEN": self.token}


@asynccontextmanager
async def served(folder: Path, **flags: object) -> AsyncGenerator[RunningService, None]:
    """The service, ready, with one engine; opening it again on the same folder is a restart."""
    async with ScriptedEngine(SCRIPT, tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        engines = [{"url": engine.url, "id": "e0", "tokenizer": str(tokenizer_dir())}]
        settings = _settings(folder, {"engines": engines, **flags})
        async with AsyncExitStack() as stack:
            with patch.object(build, "ENGINES_S", 60.0):  # tests use the engine at once
                running = await stack.enter_async_context(serve(settings))
            yield RunningService(running.url, settings.token_path.read_text().strip(), settings.data_dir, engine)


def _settings(folder: Path, flags: dict[str, object]) -> Settings:
    small = {"init_slots": 4, "run_slots": 8, "eval_slots": 4, "ready_slots": 4, "drain_s": 5.0}
    # A proxy in front of it has another port, so its Host is allowed too.
    place = {"port": 0, "hosts": ["127.0.0.1"], "data_dir": folder / "data", "runtimes": ["local"], "runtime": "local"}
    return load_settings({**place, **small, **flags}, {"HOME": str(folder)}).settings


class Proxy:
    """A TCP proxy. The next `cut_replies` connections reach the service, whose response is then dropped."""

    def __init__(self, target: str) -> None:
        self._host, self._port = urlsplit(target).hostname, urlsplit(target).port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.cut_replies = 0
        self.connections = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.break_all()
        await self._server.wait_closed()

    def break_all(self) -> None:
        """Drops every open connection."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        is_cut = self.cut_replies > 0
        self.cut_replies -= is_cut
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, upstream_writer}
        try:
            upload = asyncio.create_task(_carry(reader, upstream_writer))
            await _carry(upstream_reader, writer, is_cut=is_cut)
            upload.cancel()
            await asyncio.wait((upload,))
        finally:
            self._open -= {writer, upstream_writer}
            for end in (writer, upstream_writer):
                end.transport.abort()


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_cut: bool = False) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65_536):
            if is_cut:
                return
            sink.write(data)
            await sink.drain()
