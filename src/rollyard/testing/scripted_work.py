"""The timed generations of a scripted engine: their progress, and what ends them early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

How = Literal["done", "abort", "stopped"]

TICK_S = 0.02
"""The minimum time between two events of a stream. Tokens sampled in between are sent together, as real engines do."""


@dataclass(eq=False, slots=True)
class ScriptedGeneration:
    """One generation. After `stall_after` tokens it does not progress."""

    total: int
    latency_s: float = 0.0
    tokens_per_s: float | None = None
    stall_after: int | None = None
    ignores_aborts: bool = False
    versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # (version, first token)
    started: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    ended: asyncio.Future[How] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    frozen_at: float | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def takes_s(self) -> float:
        return self.latency_s + (self.total / self.tokens_per_s if self.tokens_per_s else 0.0)

    @property
    def is_stalling(self) -> bool:
        return self.stall_after is not None or self.ignores_aborts

    @property
    def limit(self) -> int:
        """The number of tokens that it samples unless it is ended."""
        if self.stall_after is not None:
            return min(self.total, self.stall_after)
        return 0 if self.ignores_aborts else self.total

    def sampled(self) -> int:
        """Returns the number of tokens sampled so far."""
        now = asyncio.get_running_loop().time() if self.frozen_at is None else self.frozen_at
        passed_s = now - self.started - self.latency_s
        count = self.limit if passed_s >= 0 else 0
        if count and self.tokens_per_s is not None:
            count = min(count, int(passed_s * self.tokens_per_s))
        return count

    def due_s(self, sent: int) -> float | None:
        """Returns the time until there may be more than `sent` tokens, or None if there will be no more."""
        if sent >= self.limit:
            return None
        wait_s = self.started + self.latency_s - asyncio.get_running_loop().time()
        if self.tokens_per_s:
            wait_s = max(TICK_S, wait_s + (sent + 1) / self.tokens_per_s)
        return max(0.0, wait_s)

    def end(self, how: How) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def arm(self) -> None:
        """Schedules the end. A freeze before that cancels it."""
        self.disarm()
        loop = asyncio.get_running_loop()
        self.timer = loop.call_at(max(loop.time(), self.started + self.takes_s), self.end, "done")

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ScriptedGenerations:
    """All running generations. A generation that takes no time is not added."""

    def __init__(self) -> None:
        self.running: dict[str, ScriptedGeneration] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.busy = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def do(self, name: str, piece: ScriptedGeneration, send: Callable[[], Awaitable[int]] | None = None) -> How:
        """Returns when the generation is complete or is ended. Meanwhile it calls `send` whenever there are new tokens;
        `send` returns how many it has sent in total."""
        if piece.takes_s <= 0 and not piece.is_stalling and self.open.is_set():
            return "done"
        key = f"{name}#{id(piece)}" if not name or name in self.running else name
        self.running[key] = piece
        self.idle.clear()
        self.busy.set()
        try:
            if not self.open.is_set():
                await self._opened_or(piece.ended)
                piece.started = asyncio.get_running_loop().time()
            if not piece.is_stalling:
                piece.arm()
            sent = 0
            while send is not None and not piece.ended.done():
                await asyncio.wait({piece.ended}, timeout=piece.due_s(sent))
                if not piece.ended.done():
                    sent = await send()
            return await piece.ended
        finally:
            piece.disarm()
            del self.running[key]
            if not self.running:
                self.idle.set()
                self.busy.clear()

    def abort(self, names: Iterable[str]) -> None:
        for name in names:
            piece = self.running.get(name)
            if piece is not None and not piece.ignores_aborts:
                piece.end("abort")

    def freeze(self) -> None:
        """Stops sampling; generations in flight keep their progress."""
        for piece in self.running.values():
            if piece.frozen_at is None:
                piece.frozen_at = asyncio.get_running_loop().time()
                piece.disarm()

    def thaw(self) -> None:
        """Resumes all generations."""
        self.open.set()
        for piece in self.running.values():
            if piece.frozen_at is not None:
                piece.started += asyncio.get_running_loop().time() - piece.frozen_at
                piece.frozen_at = None
                if not piece.is_stalling:
                    piece.arm()

    def stop(self) -> None:
        for piece in self.running.values():
            piece.end("stopped")

    def new_version(self, version: str) -> None:
        for piece in self.running.values():
            piece.versions.append((version, piece.sampled()))

    async def _opened_or(self, ended: asyncio.Future[How]) -> None:
        if self.open.is_set():
            return
        opened = asyncio.ensure_future(self.open.wait())
        try:
            await asyncio.wait({opened, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
