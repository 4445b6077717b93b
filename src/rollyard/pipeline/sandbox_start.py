"""One sandbox for a stage: started through the breaker of its runtime and image, counted, and ended for certain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

from rollyard.core import Deadline, RollyardError, Task
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
from rollyard.pipeline.resources import StageResources
from rollyard.sandbox.base import Sandbox, SandboxEnd, SandboxSpec

ENDS: dict[str, type[PolicyFailure]] = {
    "ended_inside": SandboxEndedByPolicy,
    "memory": MemoryLimit,
    "processes": ProcessLimit,
    "disk": DiskLimit,
    "files": FileLimit,
}
"""The ends of a sandbox that are the doing of what runs in it."""

FAIR_START_S = 30.0
"""A start that is given up counts against its runtime and image only after so long: a task with an init_s of
milliseconds, or the last of one that its set-up has used up, would else close all others out."""


async def start(
    resources: StageResources,
    task: Task,
    spec: SandboxSpec,
    clock: Deadline,
    *,
    lease_s: float,
    metrics: Metrics | None,
) -> Sandbox:
    """A running sandbox, or SandboxStartFailed. The clock is held while the machine has no room for one."""
    runtime = resources.runtime_of(task)
    with clock.held():
        await runtime.room()
    begun = time.monotonic()
    try:
        with boundary(SandboxStartFailed, "the runtime"), resources.breakers.guard(runtime.name, spec.image):
            sandbox = await runtime.start(spec, lease_s=lease_s)
    except RollyardError as error:
        if metrics is not None:
            metrics.sandbox_failed(runtime.name, error.code)
        raise
    except asyncio.CancelledError:
        waited_s = time.monotonic() - begun
        if waited_s >= FAIR_START_S:
            resources.breakers.failed(runtime.name, spec.image, f"it was given up after {waited_s:.0f} s")
        raise
    if metrics is not None:
        metrics.sandbox_started(runtime.name, time.monotonic() - begun)
    return sandbox


def check_whole(sandbox: Sandbox) -> None:
    """Raises SandboxLost if the kernel killed a process of this sandbox because the machine was out of memory."""
    if sandbox.host_kills:
        raise SandboxLost("the machine was short of memory, and the kernel killed a process of this sandbox")


async def to_its_end(work: Callable[[], Coroutine[object, object, None]]) -> None:
    """Work that ends a sandbox, which no cancel cuts short: who goes on after it may rely on its being gone. The cancel
    counts afterwards, unless the work itself has something to say (SandboxStuck)."""
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
    """Why it is gone, if what ran in it did that."""
    end: SandboxEnd | None = sandbox.end if sandbox is not None else None
    if end is None or end.reason not in ENDS:
        return None
    kind = ENDS[end.reason]
    detail = "the agent ended its own sandbox" if kind is SandboxEndedByPolicy else f"the sandbox's {end.reason} limit"
    return kind(f"{detail}: {end.detail}" if end.detail else detail)
