"""Pins that keep a policy's weights unchanged, for evaluations, which sample from one version.

A pin delays the pause that starts a weight update, and only that: a resume that names a version always succeeds, since
the weights have changed by then. Pins are in memory; an evaluation that still needs one after a restart pins again.

A pin takes effect while an engine has its version, or may still come up with it. Once all engines are quarantined or
gone there is nothing to keep, and the pause may come from the trainer that writes these weights again, for which the
evaluation waits: delaying it would be a deadlock. The pin remains, and takes effect again when a resume has named its
version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollyard.core.failure import PolicyPinned
from rollyard.engines.pool.pool import EnginePool, Health


class VersionPins:
    """The pins of all policies. The pool wakes waiters when its gates or health change."""

    def __init__(self, pool_of: Callable[[str], EnginePool]) -> None:
        self._pool_of = pool_of
        self._pinned: dict[str, dict[str, int]] = {}  # by policy: its pins, each with its version

    def pin(self, policy: str, who: str, version: int) -> None:
        self._pinned.setdefault(policy, {})[who] = version

    def unpin(self, policy: str, who: str) -> None:
        pinned = self._pinned.get(policy)
        if pinned is None or who not in pinned:
            return
        del pinned[who]
        if not pinned:
            del self._pinned[policy]
        self._pool_of(policy).wake()

    def blocking(self, policy: str) -> tuple[str, ...]:
        """The pins that currently delay a pause."""
        pool = self._pool_of(policy)
        return tuple(who for who, version in self._pinned.get(policy, {}).items() if _may_serve(pool, version))

    async def free(self, policy: str, within_s: float | None) -> float | None:
        """Waits until no pin delays a pause, and returns the remaining time. Raises PolicyPinned after `within_s`."""
        loop = asyncio.get_running_loop()
        until = None if within_s is None else loop.time() + within_s
        pool = self._pool_of(policy)
        try:
            async with asyncio.timeout_at(until):
                while self.blocking(policy):
                    await pool.gates_moved()
        except TimeoutError:
            if blocking := self.blocking(policy):
                raise PolicyPinned(
                    f"policy {policy!r} keeps its weights until {', '.join(blocking)} has ended",
                    evaluations=list(blocking),
                ) from None
        return None if until is None else max(0.0, until - loop.time())


def _may_serve(pool: EnginePool, version: int) -> bool:
    """Whether an engine may serve the version. One that is down may come back with its weights, and one that has never
    been up is given the policy's."""
    return any(
        member.health in (Health.UP, Health.DOWN) and (member.version == version or not member.is_joined)
        for member in pool.members.values()
    )
