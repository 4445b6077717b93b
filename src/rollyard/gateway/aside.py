"""Work that grows with what was sent, apart from the event loop.

Reading a request, matching its history, rendering and tokenizing it cost up to seconds. Whoever is in a sandbox may ask
for that, and may not hold up anybody else: so what is not small goes to threads that all sessions share. The
tokenizer gives up the interpreter while it works; Python code gives it up every 0.5 ms.

A fair share. A session has one piece of work there at a time, so those who wait take turns. What is large has threads
of its own: it never stands before something small.

A client that goes away does not stop its piece; the session's next one still waits for it, so nobody can pile them up.
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


class Aside:
    """One session's way there."""

    def __init__(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._turn = asyncio.Lock()

    async def run(self, size: int, work: Callable[[A], R], what: A) -> R:
        """What is short is done here and now."""
        if size <= LONG_CHARS:
            return work(what)
        return await self.thread(size, work, what)

    async def thread(self, size: int, work: Callable[[A], R], what: A) -> R:
        """In a thread, whatever its size."""
        await self._turn.acquire()
        threads = _SMALL if size <= LARGE_BYTES else _LARGE
        job = asyncio.get_running_loop().run_in_executor(threads, work, what)
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    def _ended(self, job: asyncio.Future[R]) -> None:
        self._turn.release()
        if not job.cancelled():
            job.exception()  # looked at, whether or not somebody still waits for it


def text_size(messages: Sequence[Message]) -> int:
    """Roughly how much there is to tokenize: the strings in it."""
    return sum(weigh(value)[0] for message in messages for value in message.values())
