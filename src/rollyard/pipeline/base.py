"""The door between the yard and the attempts that it lets through."""

from __future__ import annotations

from typing import Protocol

from rollyard.core import Ending, Failure, Rollout
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline.pool import Pool
from rollyard.pipeline.settings import PipelineSettings
from rollyard.pipeline.workshop import Workshop
from rollyard.store.base import Stale, Store


class Shutdown(Exception):
    """The server goes down: give the work back, nobody is to blame."""


Verdict = Ending | Failure | Shutdown | Stale
"""How an attempt came out of its stages."""


class YardDoor(Protocol):
    """What an attempt needs of the one who started it."""

    store: Store
    shop: Workshop
    settings: PipelineSettings
    init_pool: Pool
    run_pool: Pool
    eval_pool: Pool
    ready: int
    unseated: int
    metrics: Metrics
    tracer: Tracer

    def publish(self, rollout: Rollout) -> None: ...

    def requeued(self, rollout: Rollout, delay_s: float) -> None: ...

    def wake(self) -> None: ...

    def seated(self, policy: str) -> None:
        """A rollout that was admitted has its seat, or needs none."""
        ...
