"""Who needs a policy's weights to stay as they are for now: an evaluation, which samples from one version.

A pin holds off the pause with which a change of weights begins, and only that: a resume that names a version always
goes, for then the weights have changed already. Pins are in memory; who still needs one after a restart takes it again.

It holds while an engine has that version, or may still come up with it. Once all are quarantined or gone there is
nothing left to keep, and the pause may be that of the one who writes these very weights again, for whom the evaluation
waits: held off, neither would ever go on. The pin itself stays, and holds again when a resume has named its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollyard.core.failure import PolicyPinned
from rollyard.engines.routing.pool import EnginePool, Health


class VersionPins:
    """See the module. Who waits is woken by the pool, as its engines come and go."""

    def __init__(self, pool_of: Callable[[str], EnginePool]) -> None:
        self._pool_of = pool_of
        self._pinned: dict[str, dict[str, int]] = {}  # by policy: who, and the version

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

    def held(self, policy: str) -> tuple[str, ...]:
        """Who holds off a pause now."""
        pool = self._pool_of(policy)
        return tuple(who for who, version in self._pinned.get(policy, {}).items() if _may_serve(pool, version))

    async def free(self, policy: str, within_s: float | None) -> float | None:
        """When nobody holds it any more; what is left of the time. PolicyPinned when that is over."""
        loop = asyncio.get_running_loop()
        until = None if within_s is None else loop.time() + within_s
        pool = self._pool_of(policy)
        try:
            async with asyncio.timeout_at(until):
                while self.held(policy):
                    await pool.gates_moved()
        except TimeoutError:
            if held := self.held(policy):
                raise PolicyPinned(
                    f"policy {policy!r} keeps its weights until {', '.join(held)} has ended", evaluations=list(held)
                ) from None
        return None if until is None else max(0.0, until - loop.time())


def _may_serve(pool: EnginePool, version: int) -> bool:
    """One that is down may come back with its weights, and one that has never been up is given the policy's."""
    return any(
        member.health in (Health.UP, Health.DOWN) and (member.version == version or not member.is_joined)
        for member in pool.members.values()
    )
