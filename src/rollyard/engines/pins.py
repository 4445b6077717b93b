"""Who needs a policy's weights to stay as they are for now: an evaluation, which samples from one version.

A pin holds off the pause with which a change of weights begins, and only that: a resume that names a version always
goes, for then the weights have changed already. Pins are in memory; who still needs one after a restart takes it again.
"""

from __future__ import annotations

import asyncio

from rollyard.core.failure import PolicyPinned


class Pins:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, None]] = {}  # by policy
        self._waiting: set[asyncio.Event] = set()

    def pin(self, policy: str, who: str) -> None:
        self._held.setdefault(policy, {})[who] = None

    def unpin(self, policy: str, who: str) -> None:
        held = self._held.get(policy)
        if held is None or who not in held:
            return
        del held[who]
        if not held:
            del self._held[policy]
            for event in self._waiting:
                event.set()

    def held(self, policy: str) -> tuple[str, ...]:
        return tuple(self._held.get(policy, ()))

    async def free(self, policy: str, within_s: float | None) -> float | None:
        """When nobody holds it any more; what is left of the time. PolicyPinned when that is over."""
        loop = asyncio.get_running_loop()
        until = None if within_s is None else loop.time() + within_s
        try:
            async with asyncio.timeout_at(until):
                while self.held(policy):
                    event = asyncio.Event()
                    self._waiting.add(event)
                    try:
                        await event.wait()
                    finally:
                        self._waiting.discard(event)
        except TimeoutError:
            names = ", ".join(self.held(policy))
            raise PolicyPinned(
                f"policy {policy!r} keeps its weights until {names} has ended", evaluations=list(self.held(policy))
            ) from None
        return None if until is None else max(0.0, until - loop.time())
