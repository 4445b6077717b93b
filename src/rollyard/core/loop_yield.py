"""Lets the event loop run between the steps of work whose cost a client decides."""

from __future__ import annotations

import asyncio
import time

AFTER_S = 0.005


class LoopYield:
    """Yields to the event loop whenever the steps since the last time took `AFTER_S`."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def step(self) -> None:
        """To be called after each step."""
        if time.monotonic() - self._since >= AFTER_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()
