"""Looks up names with this machine's resolver, in a separate thread pool: a slow zone delays nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

THREADS = 32
"""A proxy looks up two names at a time, so only many sandboxes with unanswered lookups can occupy all threads."""


class SystemResolver:
    """Implements `Resolve` with getaddrinfo. The first lookup creates its threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="egress-names")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, look_up, host, port)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def look_up(host: str, port: int) -> list[str]:
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
