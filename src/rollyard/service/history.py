"""The last hour of the service in numbers, and when the versions of engines changed: in memory, for the dashboard.

Counters that exist anyway are sampled every `STEP_S`; nothing is recorded on the path of a rollout. With a fleet,
nodes make the model calls: turns and tokens are then those of rollouts that ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from rollyard.core import Json
from rollyard.engines.routing.router import Router
from rollyard.fleet.head import FleetHead
from rollyard.pipeline import Pipeline
from rollyard.service.security.bounds import end_all

STEP_S = 10.0
STEPS = 360

LOOK_S = 2.0
"""Interval at which engines' versions are read."""

MOST_CHANGES = 5000
"""Of one engine: a day with a change every 17 s."""

MOST_ENGINES = 1000
"""Removed ones included; the first of them are dropped."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals since the start, and the rollouts beyond the queue at that time."""

    turns: int
    tokens: int
    ended: int
    live: int


@dataclass(slots=True)
class EngineVersions:
    policy: str
    changes: deque[tuple[float, int]] = field(default_factory=lambda: deque[tuple[float, int]](maxlen=MOST_CHANGES))


class History:
    """Samples a pipeline and its router. `async with` starts and ends that."""

    def __init__(self, pipeline: Pipeline, router: Router, now: Callable[[], float] = time.time) -> None:
        self._pipeline = pipeline
        self._router = router
        self._now = now
        self._steps: deque[Sample] = deque(maxlen=STEPS)  # differences, except live
        self._last = self._read()
        self._engines: dict[str, EngineVersions] = {}
        self._end_at = now()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.sample_versions()
        self._task = asyncio.create_task(self._run(), name="history")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await end_all(self._task)

    def sample(self) -> None:
        """Ends a step."""
        read, last = self._read(), self._last
        self._steps.append(
            Sample(read.turns - last.turns, read.tokens - last.tokens, read.ended - last.ended, read.live)
        )
        self._last, self._end_at = read, self._now()

    def sample_versions(self) -> None:
        """Records versions that have changed."""
        for status in self._router.list():
            engine = self._engines.get(status.spec.id)
            if engine is None or engine.policy != status.spec.policy:
                while len(self._engines) >= MOST_ENGINES:
                    del self._engines[next(iter(self._engines))]
                engine = self._engines[status.spec.id] = EngineVersions(status.spec.policy)
            if not engine.changes or engine.changes[-1][1] != status.version:
                engine.changes.append((self._now(), status.version))

    def steps(self) -> dict[str, Json]:
        """The last hour, oldest first; None before the start."""
        missing: list[Json] = [None] * (STEPS - len(self._steps))
        return {
            "step_s": STEP_S,
            "end_at": self._end_at,
            "turns": [*missing, *(step.turns for step in self._steps)],
            "tokens": [*missing, *(step.tokens for step in self._steps)],
            "ended": [*missing, *(step.ended for step in self._steps)],
            "live": [*missing, *(step.live for step in self._steps)],
        }

    def versions(self, policy: str, since: float) -> dict[str, list[tuple[float, int]]]:
        """When the versions of the policy's engines changed, by engine; first the version that it had at `since`."""
        found: dict[str, list[tuple[float, int]]] = {}
        for name, engine in self._engines.items():
            if engine.policy != policy:
                continue
            changes = [*engine.changes]
            first = max((index for index, (at, _) in enumerate(changes) if at <= since), default=0)
            found[name] = changes[first:]
        return found

    def _read(self) -> Sample:
        totals = self._pipeline.metrics.totals
        is_fleet = isinstance(self._pipeline.executor, FleetHead)
        return Sample(
            turns=totals.ended_turns if is_fleet else totals.calls,
            tokens=totals.ended_tokens if is_fleet else totals.sampled_tokens,
            ended=totals.ended,
            live=len(self._pipeline.live),
        )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + STEP_S
        while True:
            await asyncio.sleep(LOOK_S)
            self.sample_versions()
            if loop.time() >= due:
                self.sample()
                due = max(due + STEP_S, loop.time())
