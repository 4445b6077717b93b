"""The registry of hostile cases and what they share; `sandbox_hostile` is the door to it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollyard.core.failure import PolicyFailure
from rollyard.sandbox.base import ExecResult, Runtime, Sandbox, SandboxLimits, SandboxSpec

SECONDS = 20.0
"""Bounds whatever should take a moment."""

LONG_S = 45.0
"""Bounds an attack on a limit that may be watched only now and then, and a gigabyte on two busy cores."""

LIMIT_BYTES = 64 << 20
LIMIT_PROCESSES = 64
LIMIT_FILES = 2000
"""What the sandboxes under attack may have. Every attack stops by itself at four times that."""

LIMITS = SandboxLimits(
    memory_bytes=LIMIT_BYTES,
    processes=LIMIT_PROCESSES,
    disk_bytes=LIMIT_BYTES,
    open_files=256,
    files=LIMIT_FILES,
)
"""All of them at once: a runtime's `limits_in_force` for these is what the cases on limits go by."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack from inside a sandbox. `run` raises AssertionError if it succeeds."""

    name: str
    run: Callable[[Runtime], Awaitable[None]]
    is_on_root: bool
    """What the root is made of (the host's /usr, an image) can change its outcome."""

    @property
    def control(self) -> str:
        """What keeps the attack from succeeding, in a sentence."""
        return " ".join((self.run.__doc__ or "").split())


CASES: list[Case] = []
ON_ROOT = ("_files", "_host", "_ends")
"""Ends of the names of the modules whose cases attack files and what the host shows. The others attack limits, the
kernel, the shell and the doorway, which are the same on every root."""


def hostile(function: Callable[[Runtime], Awaitable[None]]) -> Callable[[Runtime], Awaitable[None]]:
    @functools.wraps(function)
    async def run(runtime: Runtime) -> None:
        if not runtime.is_isolated:
            raise ValueError(f"{runtime.name} isolates nothing: an attack from it would hit this machine")
        await function(runtime)

    CASES.append(Case(function.__name__, run, is_on_root=function.__module__.endswith(ON_ROOT)))
    return run


@asynccontextmanager
async def started(runtime: Runtime, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
    """A sandbox that is ended, proven, whatever was done in it."""
    sandbox = await runtime.start(spec or SandboxSpec(owner="hostile"), lease_s=120.0)
    try:
        yield sandbox
    finally:
        await sandbox.kill()


def limited(
    *,
    memory: bool = False,
    processes: bool = False,
    disk: bool = False,
    files: bool = False,
    has_doorway: bool = False,
) -> SandboxSpec:
    """Only the limits that a case is about: another one would end its attack first."""
    limits = SandboxLimits(
        memory_bytes=LIMIT_BYTES if memory else None,
        processes=LIMIT_PROCESSES if processes else None,
        disk_bytes=LIMIT_BYTES if disk else None,
        open_files=256,
        files=LIMIT_FILES if files else None,
    )
    return SandboxSpec(limits=limits, has_doorway=has_doorway, owner="hostile")


async def python(sandbox: Sandbox, script: str, *arguments: str, timeout_s: float = SECONDS) -> ExecResult:
    return await sandbox.exec(["python3", "-c", script, *arguments], timeout_s=timeout_s)


async def script_output(sandbox: Sandbox, script: str, *arguments: str, timeout_s: float = SECONDS) -> str:
    """What a Python script printed; it must succeed."""
    result = await python(sandbox, script, *arguments, timeout_s=timeout_s)
    assert result.status == 0, result
    return result.stdout.decode()


async def answers(sandbox: Sandbox) -> None:
    """The sandbox still runs commands."""
    result = await sandbox.exec(["echo", "on"], timeout_s=SECONDS)
    assert (result.status, result.stdout) == (0, b"on\n"), result


async def lives_or_was_ended_by_its_owner(sandbox: Sandbox) -> None:
    """Whatever an agent does to its own sandbox: never an infrastructure failure, which would be tried again."""
    with contextlib.suppress(PolicyFailure):
        await sandbox.exec("true", timeout_s=SECONDS)
    assert sandbox.end is None or sandbox.end.reason not in ("lost", "killed", "lease"), sandbox.end
