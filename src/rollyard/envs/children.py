"""Graders in child processes: code of others that may hang, leak, or take long to import.

A child is a module whose `main` calls `answer_lines`: one JSON value in a line, one JSON value back, over the socket
that is its standard input. Children are started when first needed, reused, and killed when they do not answer.

Invariants. At most `workers` children; more questions wait. A child that was killed, or died, is not used again. A
child whose parent is gone reads the end of its socket and ends. It cannot take more than its memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Json
from rollyard.core.failure import EvalDeadline, VerifierCrashed

WORKERS = 2
START_S = 60.0
"""For a child to be ready: importing sympy takes 1 to 2 s, ten times that on a loaded machine."""
MAX_LINE_BYTES = 64 << 20

_ENVIRONMENT = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
"""All that a child sees of ours: it reads text that a model wrote."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, question: Json) -> Json:
        self.writer.write(json.dumps(question).encode() + b"\n")
        return json.loads(await self._line())

    async def ready(self) -> None:
        await self._line()

    async def _line(self) -> bytes:
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the child closed its socket")
        return line

    async def end(self) -> None:
        self.writer.transport.abort()
        self.process.kill()
        await asyncio.shield(asyncio.to_thread(self.process.wait))


class Children:
    """See the module. `what` names the grader in errors; `command` starts a child, else this Python runs `module`."""

    def __init__(
        self,
        what: str,
        module: str = "",
        *,
        command: Sequence[str] = (),
        workers: int = WORKERS,
        start_s: float = START_S,
    ) -> None:
        self._what = what
        # -P: the folder that we were started in must not be searched for modules
        self._command = tuple(command) or (sys.executable, "-P", "-m", module)
        self._start_s = start_s
        self.idle: list[_Child] = []
        self._slots = asyncio.Semaphore(workers)

    async def ask(self, question: Json, *, answer_s: float, wait_s: float | None = None) -> Mapping[str, Json]:
        """The child's answer, an object. VerifierCrashed if nobody can say, EvalDeadline if that takes more than
        `answer_s`. `wait_s` bounds the wait for a free process, which is no fault of the question's."""
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise VerifierCrashed(f"no {self._what} process was free within {wait_s:g} s") from None
        try:
            reply = await self._asked(question, answer_s)
        finally:
            self._slots.release()
        if not isinstance(reply, Mapping) or isinstance(reply.get("error"), str):
            told = reply["error"] if isinstance(reply, Mapping) else "its process answered something else"
            raise VerifierCrashed(f"{self._what}: {told}")
        return reply

    async def _asked(self, question: Json, answer_s: float) -> Json:
        child = self.idle.pop() if self.idle else await self._start()
        is_usable = False
        try:
            async with asyncio.timeout(answer_s):
                reply = await child.ask(question)
            is_usable = True
            return reply
        except TimeoutError:
            # the question did that, not the grader: as a crash, hanging it would be a way around a reward of 0
            raise EvalDeadline(f"{self._what} did not decide within {answer_s:g} s") from None
        except (EOFError, OSError, ValueError) as error:
            raise VerifierCrashed(f"the {self._what} process died: {error}") from error
        finally:
            if is_usable:
                self.idle.append(child)
            else:
                await child.end()

    async def close(self) -> None:
        while self.idle:
            await self.idle.pop().end()

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (a vfork; nothing is waited for)
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        child = _Child(process, reader, writer)
        is_ready = False
        try:
            async with asyncio.timeout(self._start_s):
                await child.ready()
            is_ready = True
        except (TimeoutError, EOFError, OSError) as error:
            raise VerifierCrashed(f"the {self._what} process did not start: {error!r}") from error
        finally:
            if not is_ready:
                await child.end()
        return child


def answer_lines(answer: Callable[[Json], Json], *, memory_bytes: int = 4 << 30) -> None:
    """A child's whole life: says that it is ready, then answers until its parent is gone. What `answer` raises is told
    as {"error": …}, which the parent takes for a crashed verifier. Import what takes long before this is called."""
    import logging
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    logging.disable(logging.CRITICAL)
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        stream.write(b'{"ready": true}\n')
        stream.flush()
        for line in stream:
            try:
                reply = answer(json.loads(line))
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
            stream.write(json.dumps(reply).encode() + b"\n")
            stream.flush()
