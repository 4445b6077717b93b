"""Runs work whose cost grows with the request outside the event loop.

Reading a request, matching its history, rendering and tokenizing it takes up to seconds. A program in a sandbox can
cause that work and must not delay others, so all but small work runs in threads that all sessions share. The tokenizer
releases the interpreter while it works; Python code releases it every 0.5 ms. The caller bounds the size of any C call
that does neither (`intake.py`).

Fair share. A session runs one piece of work at a time, so waiting sessions take turns. Large pieces have threads of
their own: a small piece never waits for a large one.

A piece is not stopped when its client disconnects. The session's next piece waits for it, so pieces cannot accumulate.
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
"""About 10 ms of tokenizing. Longer text is processed in a thread."""

LARGE_BYTES = 512 << 10
"""About half a second of tokenizing. Larger pieces have their own threads."""

SWITCH_S = 0.0005
"""How long a thread that runs Python may hold the interpreter while the event loop waits."""

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
        """Runs a short piece directly, on the event loop, and any other in a thread."""
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
            self._turn.release()  # no job runs that would release it
            raise
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    def _ended(self, job: asyncio.Future[R]) -> None:
        self._turn.release()
        if not job.cancelled():
            job.exception()  # mark it as retrieved: asyncio logs it otherwise if the client has disconnected


def text_size(messages: Sequence[Message]) -> int:
    """Returns roughly how much text there is to tokenize: the length of all strings."""
    return sum(weigh(value)[0] for message in messages for value in message.values())
