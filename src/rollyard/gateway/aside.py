"""Rendering that takes long, apart from the event loop.

Tokenizing a megabyte takes about a second. Whoever is in a sandbox may send that, and may not hold up anybody else: so
what is long goes to a few threads that all sessions share, one piece at a time for each session. The tokenizer gives
up the GIL while it works.

A client that goes away does not stop its piece; the session's next one still waits for it, so nobody can pile them up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollyard.core import Json, Message

LONG_CHARS = 32 << 10
"""About 30 ms of tokenizing."""

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="render")

A = TypeVar("A")
R = TypeVar("R")


class Aside:
    """One session's way there."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size: int, work: Callable[[A], R], what: A) -> R:
        """What is short is done here and now."""
        if size <= LONG_CHARS:
            return work(what)
        await self._turn.acquire()
        job = asyncio.get_running_loop().run_in_executor(_THREADS, work, what)
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    def _ended(self, job: asyncio.Future[R]) -> None:
        self._turn.release()
        if not job.cancelled():
            job.exception()  # looked at, whether or not somebody still waits for it


def text_size(messages: Sequence[Message]) -> int:
    """Roughly how much there is to tokenize: the strings in it."""
    return sum(_size(value) for message in messages for value in message.values())


def _size(value: Json) -> int:
    """Without recursion: what it is given may be nested as deeply as JSON can be."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return total
