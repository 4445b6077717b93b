"""Starts a stage's sandbox through the breaker of its runtime and image, counts it, and ensures that it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from rollyard.core import Deadline, RollyardError
from rollyard.core.failure import (
    DiskLimit,
    FileLimit,
    MemoryLimit,
    PolicyFailure,
    ProcessLimit,
    SandboxEndedByPolicy,
    SandboxLost,
    SandboxStartFailed,
)
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.resources import ResolvedTask
from rollyard.sandbox.base import Sandbox, SandboxEnd, SandboxSpec

ENDS: dict[str, type[PolicyFailure]] = {
    "ended_inside": SandboxEndedByPolicy,
    "memory": MemoryLimit,
    "processes": ProcessLimit,
    "disk": DiskLimit,
    "files": FileLimit,
}
"""The ends of a sandbox that what runs in it causes."""

FAIR_START_S = 30.0
"""An abandoned start counts against its runtime and image only after so long. Otherwise a task with an init_s of
milliseconds, or one whose set-up has used up most of it, would open the breaker for its owner's other tasks."""


async def start(
    resolved: ResolvedTask,
    spec: SandboxSpec,
    clock: Deadline,
    *,
    owner: str,
    lease_s: float,
    metrics: Metrics | None,
) -> Sandbox:
    """Returns a running sandbox or raises SandboxStartFailed. The clock is held while the machine has no room."""
    runtime, breakers = resolved.runtime, resolved.resources.breakers
    with clock.held():
        await runtime.room()
    started_at = time.monotonic()
    try:
        with boundary(SandboxStartFailed, "the runtime"), breakers.guard(runtime.name, spec.image, owner):
            sandbox = await runtime.start(spec, lease_s=lease_s)
    except RollyardError as error:
        if metrics is not None:
            metrics.sandbox_failed(runtime.name, error.code)
        raise
    except asyncio.CancelledError:
        waited_s = time.monotonic() - started_at
        if waited_s >= FAIR_START_S:
            breakers.failed(runtime.name, spec.image, f"the start was abandoned after {waited_s:.0f} s", owner)
        raise
    if metrics is not None:
        metrics.sandbox_started(runtime.name, time.monotonic() - started_at)
    return sandbox


def check_whole(sandbox: Sandbox) -> None:
    """Raises SandboxLost if the kernel killed a process of this sandbox because the machine was out of memory."""
    if sandbox.host_kills:
        raise SandboxLost("the machine was short of memory, and the kernel killed a process of this sandbox")


async def uninterrupted(work: Callable[[], Coroutine[object, object, None]]) -> None:
    """Runs work that ends a sandbox. A cancel does not interrupt it, so the caller can rely on the sandbox being gone.
    The cancel is raised afterwards, unless the work itself raises (SandboxStuck)."""
    task = asyncio.ensure_future(work())
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


def ended_by_policy(sandbox: Sandbox | None) -> PolicyFailure | None:
    """Returns the failure if what ran in the sandbox ended it, else None."""
    end: SandboxEnd | None = sandbox.end if sandbox is not None else None
    if end is None or end.reason not in ENDS:
        return None
    kind = ENDS[end.reason]
    detail = "the agent ended its own sandbox" if kind is SandboxEndedByPolicy else f"the sandbox's {end.reason} limit"
    return kind(f"{detail}: {end.detail}" if end.detail else detail)
