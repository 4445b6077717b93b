"""Runs `math-verify` in child processes, because it may hang.

It bounds itself by SIGALRM, which works only in a main thread and not inside one long arithmetic operation of C
code. So it gets processes of its own, started when first needed, reused, and killed when they do not answer.

Invariants. At most `WORKERS` children; more questions wait. A child that was killed, or died, is not used again.
A child whose parent is gone reads the end of its socket and ends. It cannot take more than 4 GiB.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard.core.failure import EvalDeadline, VerifierCrashed

WORKERS = 2
START_S = 60.0
"""For a child to be ready: importing sympy takes 1 to 2 s, ten times that on a loaded machine."""
ANSWER_S = 30.0
"""math-verify bounds each of its three steps to 5 s; beyond their sum it hangs."""
MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_CHARS = 10_000
"""A longer one is no answer to anything, and would only keep the parser busy."""

_ENVIRONMENT = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
"""All that a child sees of ours: it reads text that a model wrote."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, known: str, answer: str) -> bool:
        self.writer.write(json.dumps([known, answer]).encode() + b"\n")
        reply = json.loads(await self._line())
        if reply.get("error"):
            raise VerifierCrashed(f"math-verify: {reply['error']}")
        return bool(reply["same"])

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


class MathJudge:
    """See the module."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        # by path, and -P: the folder of this file, which has a math.py, must not be searched for modules
        child = str(Path(__file__).parent / "_math_child.py")
        self._command = tuple(command or (sys.executable, "-P", child))
        self._idle: list[_Child] = []
        self._slots = asyncio.Semaphore(WORKERS)
        self.answer_s = ANSWER_S

    async def is_same(self, known: str, answer: str, *, wait_s: float | None = None) -> bool:
        """Whether the two mean the same. VerifierCrashed if nobody can say, EvalDeadline if that takes for ever.

        `wait_s` bounds the wait for a free process, which is no fault of the answer's.
        """
        if len(answer) > MAX_ANSWER_CHARS:
            return False
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire()
        except TimeoutError:
            raise VerifierCrashed(f"no math-verify process was free within {wait_s:g} s") from None
        try:
            child = self._idle.pop() if self._idle else await self._start()
            is_usable = False
            try:
                async with asyncio.timeout(self.answer_s):
                    same = await child.ask(known, answer)
                is_usable = True
                return same
            except VerifierCrashed:
                is_usable = True  # it caught its trouble, and told it
                raise
            except TimeoutError:
                # the answer did that, not the verifier: as a crash, hanging it would be a way around a reward of 0
                raise EvalDeadline(f"math-verify did not decide within {self.answer_s:g} s") from None
            except (EOFError, OSError, ValueError) as error:
                raise VerifierCrashed(f"the math-verify process died: {error}") from error
            finally:
                if is_usable:
                    self._idle.append(child)
                else:
                    await child.end()
        finally:
            self._slots.release()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().end()

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
            async with asyncio.timeout(START_S):
                await child.ready()
            is_ready = True
        except (TimeoutError, EOFError, OSError) as error:
            raise VerifierCrashed(f"the math-verify process did not start: {error!r}") from error
        finally:
            if not is_ready:
                await child.end()
        return child
