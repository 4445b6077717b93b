"""Slots for work of several owners: those that wait get them in turn, one owner after the other.

Invariants. At most `slots` are taken. No one waits while a slot is free. Of one owner, the first is served first.
A slot that was just granted to a waiter that is cancelled goes to the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairSlots:
    """`acquire` and `release` come in pairs."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner: the next one first

    async def acquire(self, owner: str = "") -> None:
        if self._free:  # then no one waits
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            waiters = self._waiting.pop(owner)
            while waiters and waiters[0].done():  # it gave up, which costs its owner no turn
                waiters.popleft()
            if not waiters:
                continue
            granted = waiters.popleft()
            if waiters:
                self._waiting[owner] = waiters  # behind the other owners
            granted.set_result(None)
            return
        self._free += 1
