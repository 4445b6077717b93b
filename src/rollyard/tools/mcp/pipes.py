"""An MCP server that runs in a sandbox: connects its pipes to the streams of a client session.

The program belongs to the task, and a model may have changed it: its output is untrusted.

Invariants. Its standard output is read only while a request waits for its response, and then at most FLOOD_BYTES of it;
otherwise its pipe fills up. A line that is not a message is dropped. A line longer than MESSAGE_BYTES is skipped, and
the waiting request gets an error. The beginning and the end of standard error are kept, to report when the program
dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from rollyard.sandbox.base import Process, Sandbox
from rollyard.tools._output import Output

MESSAGE_BYTES = 4 << 20
"""The maximum of one message. The model sees far less; a picture may be this large."""

FLOOD_BYTES = 32 << 20
"""The maximum of all messages during one call, including notifications."""

FLOOD_LINES = 50_000
"""The same in lines: a million tiny lines have as many bytes as one picture and take a minute to process."""

STDERR_BYTES = 4096
STDERR_PAUSE_S = 0.05
"""The pause after each full read: it limits a flood to a megabyte a second, so that it cannot occupy the event loop."""

CHUNK_BYTES = 64 << 10
EXIT_S = 2.0  # how long to wait for the exit status after the output has ended


class LineSplitter:
    """Splits a stream into lines. A line that is longer than the limit yields None once and is not stored."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._partial = bytearray()
        self._is_skipping = False

    def feed(self, data: bytes) -> Generator[bytes | None, None, None]:
        *ends, rest = data.split(b"\n")
        for end in ends:
            if not self._is_skipping and len(self._partial) + len(end) <= self._limit_bytes:
                yield bytes(self._partial) + end
            elif not self._is_skipping:
                yield None
            self._partial.clear()
            self._is_skipping = False
        if self._is_skipping:
            return
        self._partial += rest
        if len(self._partial) > self._limit_bytes:
            self._partial.clear()
            self._is_skipping = True
            yield None


class McpProgram:
    """The server's process and the host's ends of its pipes. Created by `running`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fds: list[int] = []
        inside_in, self._stdin = self._pipe()
        self._stdout, inside_out = self._pipe()
        self._stderr, inside_err = self._pipe()
        self._inside = {0: inside_in, 1: inside_out, 2: inside_err}
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        self._process: Process | None = None
        self._errors = Output(STDERR_BYTES)
        self._awaited: object = None  # the id of the request that waits for a response
        self._is_asked = asyncio.Event()
        self._received_bytes = self._received_lines = 0
        self.is_writing = False
        self.trouble = ""  # why the server was abandoned

    def _pipe(self) -> tuple[int, int]:
        try:
            pair = os.pipe2(os.O_CLOEXEC)
        except OSError:
            self.close()
            raise
        self._fds += pair
        return pair

    async def start(self, sandbox: Sandbox, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = await sandbox.spawn(command, fds=self._inside, env=env)
        for fd in self._inside.values():
            os.close(fd)
            self._fds.remove(fd)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
        while self._fds:
            os.close(self._fds.pop())

    @property
    def is_dead(self) -> bool:
        """Whether no process has the other end of its output open."""
        if not self._fds:
            return True
        poll = select.poll()
        poll.register(self._stdout, 0)
        return bool(poll.poll(0))

    async def exit_reason(self) -> str:
        """Returns how it ended, and its standard error."""
        how = self.trouble or "its output ended"
        if self._process is not None and not self.trouble:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    how = f"it exited with status {await self._process.wait()}"
        self._read_stderr()
        errors, _ = self._errors.text()
        return f"{how}; on standard error: {errors.strip()}" if errors.strip() else how

    # --- pipes

    async def _ready(self, fd: int, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        ready = self._loop.create_future()
        add(fd, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            remove(fd)

    async def _read(self) -> bytes:
        while True:
            await self._ready(self._stdout, self._loop.add_reader, self._loop.remove_reader)
            with contextlib.suppress(BlockingIOError):
                return os.read(self._stdout, CHUNK_BYTES)

    async def _write(self, data: bytes) -> None:
        remaining = memoryview(data)
        self.is_writing = True
        while remaining:
            try:
                remaining = remaining[os.write(self._stdin, remaining) :]
            except BlockingIOError:
                await self._ready(self._stdin, self._loop.add_writer, self._loop.remove_writer)
        self.is_writing = False

    def _read_stderr(self) -> int:
        try:
            data = os.read(self._stderr, CHUNK_BYTES)
        except OSError:
            return 0
        self._errors.feed(data)
        return len(data)

    async def errors(self) -> None:
        """Reads standard error continuously, so that the server does not block on it."""
        while True:
            await self._ready(self._stderr, self._loop.add_reader, self._loop.remove_reader)
            read_bytes = self._read_stderr()
            if not read_bytes:
                return
            if read_bytes == CHUNK_BYTES:
                await asyncio.sleep(STDERR_PAUSE_S)

    # --- messages

    async def listen(self, deliver: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Passes its output to the session, until either ends."""
        lines = LineSplitter(MESSAGE_BYTES)
        with deliver, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await self._is_asked.wait()
                data = await self._read()
                self._received_bytes += len(data)
                self._received_lines += data.count(b"\n")
                if self._received_bytes > FLOOD_BYTES or self._received_lines > FLOOD_LINES:
                    self.trouble = f"it wrote more than {FLOOD_BYTES} bytes or {FLOOD_LINES} lines during one call"
                if not data or self.trouble:
                    return
                for line in lines.feed(data):
                    message = self._too_long() if line is None else _message(line)
                    if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id == self._awaited:
                        self._settle()
                    if message is not None:
                        await deliver.send(SessionMessage(message))

    async def send_messages(self, messages: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Writes the session's messages to its input. If the program has closed its input, it is detected by a timeout
        or its end."""
        with messages:
            async for item in messages:
                message = item.message
                if isinstance(message, JSONRPCRequest):
                    self._awaited, self._received_bytes, self._received_lines = message.id, 0, 0
                    self._is_asked.set()
                elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
                    self._settle()
                text = message.model_dump_json(by_alias=True, exclude_unset=True)
                with contextlib.suppress(BrokenPipeError):
                    await self._write(text.encode("utf-8", "replace") + b"\n")

    def _settle(self) -> None:
        self._awaited = None
        self._is_asked.clear()

    def _too_long(self) -> JSONRPCError | None:
        """Returns an error for the waiting request: the message is most likely its response, and an error avoids
        waiting for the timeout."""
        if not isinstance(self._awaited, int | str):
            return None
        what = f"the server sent a message of more than {MESSAGE_BYTES} bytes; it was dropped"
        error = ErrorData(code=INTERNAL_ERROR, message=what)
        return JSONRPCError(jsonrpc="2.0", id=self._awaited, error=error)


def _message(line: bytes) -> JSONRPCRequest | JSONRPCNotification | JSONRPCResponse | JSONRPCError | None:
    if b'"jsonrpc"' not in line:  # forty times faster than the library's check
        return None
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:  # other output of the program
        return None


Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


@asynccontextmanager
async def running(
    sandbox: Sandbox, command: Sequence[str], env: Mapping[str, str]
) -> AsyncGenerator[tuple[McpProgram, Streams], None]:
    """Starts a server and yields it with a session's streams. Leaving the block kills it."""
    program = McpProgram()
    try:
        await program.start(sandbox, command, env)
        deliver, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, messages = anyio.create_memory_object_stream[SessionMessage](0)
        with read, write:
            async with anyio.create_task_group() as group:
                group.start_soon(program.listen, deliver)
                group.start_soon(program.send_messages, messages)
                group.start_soon(program.errors)
                try:
                    yield program, (read, write)
                finally:
                    group.cancel_scope.cancel()
    finally:
        program.close()
