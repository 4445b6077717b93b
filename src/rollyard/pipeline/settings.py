"""The pipeline's sizes and bounds. What a person sets is in `service.settings`; this is what the pipeline needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    init_slots: int = 16
    run_slots: int = 256
    eval_slots: int = 32
    ready_slots: int = 16  # set-up rollouts that may wait for RUN
    max_live: int | None = None  # budget of live sandboxes, INIT to EVAL; None: the sum of all the slots above
    max_queued: int = 100_000  # beyond it submit answers 429
    max_attempts: int = 3
    eval_attempts: int = 3  # tries at scoring one attempt when infrastructure fails
    lease_s: float = 300.0  # of a sandbox; renewed every tick
    tick_s: float = 1.0  # of leases and the stall watch
    drain_s: float = 60.0
    retain_s: float = 7 * 86_400.0
    node: str = "local"
