"""The pipeline's sizes and bounds. The operator's settings are in `service.settings`; these are derived from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    init_slots: int = 16
    run_slots: int = 256
    eval_slots: int = 32
    ready_slots: int = 16  # set-up rollouts that may wait for RUN
    max_live: int | None = None  # budget of live rollouts, INIT to EVAL; None: the sum of all the slots above
    max_queued: int = 100_000  # beyond it submit returns 429
    max_attempts: int = 3
    eval_attempts: int = 3  # tries of EVAL per attempt when infrastructure fails
    lease_s: float = 300.0  # of a sandbox; renewed every tick
    tick_s: float = 1.0  # between lease renewals and stall checks
    drain_s: float = 60.0
    retain_s: float = 7 * 86_400.0
    node: str = "local"
