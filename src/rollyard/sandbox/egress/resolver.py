"""Names looked up by this machine's own resolver, in threads of their own: a slow zone holds up nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

THREADS = 32
"""A proxy looks up two names at a time: many sandboxes have to ask for names that never come to use up all of them."""


class SystemResolver:
    """`Resolve` by getaddrinfo. It makes its threads when it is first asked."""

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
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
