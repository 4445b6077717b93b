"""One sandbox for a stage: started through the breaker of its runtime and image, and counted."""

from __future__ import annotations

import time

from rollyard.core import RollyardError, Task
from rollyard.core.failure import (
    DiskLimit,
    MemoryLimit,
    PolicyFailure,
    ProcessLimit,
    SandboxEndedByPolicy,
    SandboxStartFailed,
)
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.workshop import Workshop
from rollyard.sandbox.base import Sandbox, SandboxEnd, SandboxSpec

ENDS: dict[str, type[PolicyFailure]] = {
    "ended_inside": SandboxEndedByPolicy,
    "memory": MemoryLimit,
    "processes": ProcessLimit,
    "disk": DiskLimit,
}
"""The ends of a sandbox that are the doing of what runs in it."""


async def start(shop: Workshop, task: Task, spec: SandboxSpec, *, lease_s: float, metrics: Metrics | None) -> Sandbox:
    """A running sandbox, or SandboxStartFailed."""
    runtime = shop.runtime_of(task)
    begun = time.monotonic()
    try:
        with boundary(SandboxStartFailed, "the runtime"), shop.breakers.guard(runtime.name, spec.image):
            sandbox = await runtime.start(spec, lease_s=lease_s)
    except RollyardError as error:
        if metrics is not None:
            metrics.sandbox_failed(runtime.name, error.code)
        raise
    if metrics is not None:
        metrics.sandbox_started(runtime.name, time.monotonic() - begun)
    return sandbox


def ended_by_policy(sandbox: Sandbox | None) -> PolicyFailure | None:
    """Why it is gone, if what ran in it did that."""
    end: SandboxEnd | None = sandbox.end if sandbox is not None else None
    if end is None or end.reason not in ENDS:
        return None
    kind = ENDS[end.reason]
    detail = "the agent ended its own sandbox" if kind is SandboxEndedByPolicy else f"the sandbox's {end.reason} limit"
    return kind(f"{detail}: {end.detail}" if end.detail else detail)
