"""Graders in child processes: third-party code that may hang, leak, or take long to import.

A child is a module whose `main` calls `answer_lines`: it reads one JSON value per line and writes one back, over the
socket that is its standard input. Children are started on demand, reused, and killed if they do not answer.

Invariants. There are at most `workers` children; further questions wait, and the owners of runs take turns. A child
that was killed or died is not used again. A child exits when its parent is gone (its socket reaches end of file). Its
memory is limited.
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
from rollyard.core.fair_slots import FairSlots

WORKERS = 2
START_S = 60.0
"""The time a child has to start: importing sympy takes 1 to 2 s, ten times that on a loaded machine."""
MAX_LINE_BYTES = 64 << 20

_ENVIRONMENT = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
"""The only variables that a child inherits: it reads text that a model wrote."""


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
    """A pool of grader processes. `what` is the grader's name in errors; `command` starts a child, else this Python
    runs `module`."""

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
        # -P: do not search the current folder for modules
        self._command = tuple(command) or (sys.executable, "-P", "-m", module)
        self._start_s = start_s
        self.idle: list[_Child] = []
        self._slots = FairSlots(workers)

    async def ask(
        self, question: Json, *, answer_s: float, wait_s: float | None = None, owner: str = ""
    ) -> Mapping[str, Json]:
        """Returns the child's answer, an object. Raises VerifierCrashed if the child fails, EvalDeadline if it does not
        answer within `answer_s`. `wait_s` limits the wait for a free process, which is not the question's fault."""
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire(owner)
        except TimeoutError:
            raise VerifierCrashed(f"no {self._what} process was free within {wait_s:g} s") from None
        try:
            reply = await self._asked(question, answer_s)
        finally:
            self._slots.release()
        if not isinstance(reply, Mapping) or isinstance(reply.get("error"), str):
            error = reply["error"] if isinstance(reply, Mapping) else "its process returned an unexpected reply"
            raise VerifierCrashed(f"{self._what}: {error}")
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
            # The question caused it, not the grader. As VerifierCrashed, hanging the grader would avoid a reward of 0.
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
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            process = subprocess.Popen(  # noqa: ASYNC220 (a vfork; it does not wait)
                self._command,
                stdin=child_socket.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        try:
            reader, writer = await asyncio.open_connection(sock=parent_socket, limit=MAX_LINE_BYTES)
        except BaseException:
            parent_socket.close()
            process.kill()
            await asyncio.shield(asyncio.to_thread(process.wait))
            raise
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
    """A child's main loop: reports that it is ready, then answers until its parent is gone. An exception of `answer` is
    returned as {"error": …}, which the parent treats as a crashed verifier. Do slow imports before calling this."""
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
