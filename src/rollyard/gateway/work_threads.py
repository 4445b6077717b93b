"""Runs work whose cost grows with the request apart from the event loop.

To read a request, match its history, render and tokenize it takes up to seconds. A program in a sandbox may cause that
work and must not delay others, so anything that is not small runs in threads that all sessions share. The tokenizer
releases the interpreter while it works; Python code releases it every 0.5 ms. A call of C that does neither is bounded
in size by its caller (`intake.py`).

Fair share. A session has one piece of work in the threads at a time, so sessions that wait take turns. Large pieces
have threads of their own: a small piece never waits for a large one.

A client that disconnects does not stop its piece. The session's next piece still waits for it, so they cannot pile up.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollyard.core import Message
from rollyard.gateway.counts import weigh

LONG_CHARS = 12 << 10
"""About 10 ms of tokenizing: what is longer is done in a thread."""

LARGE_BYTES = 512 << 10
"""About half a second of tokenizing: what is larger has its own threads."""

SWITCH_S = 0.0005
"""For how long a thread that runs Python may keep the interpreter from the event loop."""

_SMALL = ThreadPoolExecutor(2, thread_name_prefix="gateway-small")
_LARGE = ThreadPoolExecutor(2, thread_name_prefix="gateway-large")

A = TypeVar("A")
R = TypeVar("R")


class WorkThreads:
    """Runs the pieces of one session, one at a time."""

    def __init__(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._turn = asyncio.Lock()

    async def run(self, size: int, work: Callable[[A], R], what: A) -> R:
        """Runs a short piece at once, on the event loop; any other in a thread."""
        if size <= LONG_CHARS:
            return work(what)
        return await self.thread(size, work, what)

    async def thread(self, size: int, work: Callable[[A], R], what: A) -> R:
        """Runs a piece in a thread, whatever its size."""
        await self._turn.acquire()
        threads = _SMALL if size <= LARGE_BYTES else _LARGE
        try:
            job = asyncio.get_running_loop().run_in_executor(threads, work, what)
        except BaseException:
            self._turn.release()  # nothing runs that would
            raise
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    def _ended(self, job: asyncio.Future[R]) -> None:
        self._turn.release()
        if not job.cancelled():
            job.exception()  # retrieved, or asyncio logs it when the client has gone


def text_size(messages: Sequence[Message]) -> int:
    """Roughly how much there is to tokenize: the strings in it."""
    return sum(weigh(value)[0] for message in messages for value in message.values())
