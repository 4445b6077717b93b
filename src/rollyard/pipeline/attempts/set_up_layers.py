"""How the stages use layers: INIT's set-up runs once and is shared, and EVAL `same` runs on the files that RUN left.

The key of a set-up covers what its files depend on: the environment's own key (`Environment.layer_key`), Rollyard's
version, the runtime, the current image, what it may reach, and its limits: a set-up that ignores an error succeeds
under a low limit, too, with less in its files. It covers the owner, because the maker of a layer decides its content:
what was fetched, at what time, and whatever an environment's own key leaves out. So a layer affects only its owner's
rollouts, and one that is found does not reveal what others run. The key does not cover the deadline, which ends the
whole set-up: it decides whether one succeeds, not what it writes. A failure is remembered for tasks with the same
deadline.

Invariants. A rollout's own set-up counts against its init_s; waiting for another's does not. While `prepare` runs, its
sandbox uses the rollout's place in the budget of live sandboxes: it never exists together with the rollout's own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rollyard.core import Deadline, DeadlineExpired, Task
from rollyard.core.failure import (
    EnvironmentBroken,
    PolicyFailure,
    SandboxLost,
    SandboxStartFailed,
    SetupDeadline,
    SetupFailed,
    TaskFailure,
    ToolUnreachable,
)
from rollyard.core.version import __version__
from rollyard.envs.base import EnvContext, Environment, Plan
from rollyard.envs.protected import EVAL_ENV, home_paths, search_paths
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.attempts.sandbox_start import check_whole, start, uninterrupted
from rollyard.pipeline.boundary import boundary
from rollyard.pipeline.resources import ResolvedTask
from rollyard.sandbox.base import Sandbox, SandboxSpec
from rollyard.sandbox.egress import Egress
from rollyard.sandbox.layers import LayerLease

INIT_GRACE_S = 60.0
"""A sandbox of INIT is not renewed: its lease lasts for the stage's deadline plus these seconds."""


async def prepared(
    resolved: ResolvedTask, rollout_id: str, spec: SandboxSpec, clock: Deadline, *, owner: str, metrics: Metrics | None
) -> LayerLease | None:
    """Returns the layer of this task's `prepare`, made or found. None: it is not shared, and `prepare` has not run."""
    task, runtime, layers = resolved.task, resolved.runtime, resolved.layers
    environment = resolved.environment
    with boundary(EnvironmentBroken, f"{task.environment}.layer_key", (environment, EnvironmentBroken)):
        own = environment.layer_key(task)
    if own is None or layers is None:
        return None

    async def make(target: Path) -> None:
        await _make(resolved, rollout_id, spec, clock, target, owner, metrics)

    machine = [__version__, runtime.name, image_identity(spec.image)]
    bounds = [asdict(spec.limits), *_reachable(spec.egress)]
    parts = [owner, task.environment, own, machine, bounds]
    key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()
    try:
        lease = await layers.get(key, make, terms=json.dumps(task.limits.init_s))
    except Exception:
        if metrics is not None:
            metrics.layer_used(runtime.name, "failed")
        raise
    if metrics is not None:
        metrics.layer_used(runtime.name, "found" if lease.is_found else "made")
    return lease


def _reachable(egress: Egress | None) -> list[str]:
    """Returns the part of a key for what can be reached; empty for an offline set-up."""
    if egress is None:
        return []
    mirrors = (f"{name}={url}" for name, url in sorted(egress.mirrors.items()))
    return ["egress", *sorted(map(str, egress.rules)), *egress.methods, *mirrors]


async def _make(
    resolved: ResolvedTask,
    rollout_id: str,
    spec: SandboxSpec,
    clock: Deadline,
    target: Path,
    owner: str,
    metrics: Metrics | None,
) -> None:
    """Runs `prepare` in a sandbox and freezes its files. The sandbox is proven gone, also after a failure."""
    task = resolved.task
    phase = "start"
    try:
        async with clock.counting():
            lease_s = task.limits.init_s + INIT_GRACE_S
            sandbox = await start(resolved, spec, clock, owner=owner, lease_s=lease_s, metrics=metrics)
            try:
                phase = "set-up"
                environment, router = resolved.environment, resolved.resources.router
                with setting_up(environment, "prepare", task, sandbox):
                    await environment.prepare(EnvContext(task, rollout_id, sandbox, router, owner=owner))
                phase = "freeze"
                with boundary(SandboxStartFailed, "freezing the set-up"):
                    await sandbox.freeze(target)
            finally:
                await uninterrupted(sandbox.kill)
    except DeadlineExpired:
        raise late(clock, phase) from None


def late(clock: Deadline, phase: str) -> SetupDeadline | SandboxStartFailed:
    """Returns the failure of an INIT that exceeded its deadline: only a slow set-up is the task's fault."""
    detail = f"INIT was not done in {clock.budget_s:g} s; it was in {phase}"
    return SetupDeadline(detail) if phase == "set-up" else SandboxStartFailed(detail)


@contextmanager
def setting_up(
    environment: Environment, method: str, task: Task, sandbox: Sandbox | None
) -> Generator[None, None, None]:
    """Attributes exceptions of a set-up. No model was called, so a limit that it hits is the task's fault. A killed
    command or a failed network is not: the set-up is tried again, and its failure is not remembered for other tasks."""
    what = f"{task.environment}.{method}"
    with boundary(EnvironmentBroken, what, (environment, EnvironmentBroken)):
        try:
            yield
        except PolicyFailure as error:
            raise SetupFailed(f"{what}: {error.detail}", code=error.code) from error
        except TaskFailure as error:
            if sandbox is not None:
                check_whole(sandbox)
                if sandbox.odd_kills:
                    raise SandboxLost(f"{what}: a command was killed from outside: {error.detail}") from error
                if sandbox.spec.egress is not None and sandbox.spec.egress.ledger.failed_connections:
                    raise ToolUnreachable(f"{what}: a host that it may reach did not answer: {error.detail}") from error
            raise
        if sandbox is not None:
            check_whole(sandbox)


def image_identity(image: str | None) -> str:
    """Returns a string that changes with the image's content, as far as a path shows it; other images have a digest."""
    if image is None:
        return ""
    path = Path(image)
    try:
        stat = path.stat()
    except OSError:
        return image
    return f"{path.resolve()}:{stat.st_dev}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_size}"


def excluded_paths(plan: Plan, spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the paths that EVAL `same` does not take over from RUN: `protected`, the paths in which the sandbox's
    variables make programs look for executables, packages and start-up files, and the targets of the verifier's
    binds."""
    binds = (bind.inside for bind in (*spec.binds, *plan.eval_binds))
    return tuple(dict.fromkeys((*plan.protected, *search_paths(spec.env), *home_paths(spec.env), *binds)))


def eval_spec(spec: SandboxSpec, plan: Plan, layers: Sequence[Path]) -> SandboxSpec:
    """Returns the spec of EVAL's sandbox. With `same`, it is based on RUN's files, and its variables keep programs from
    loading any of them implicitly."""
    spec = replace(spec, binds=(*spec.binds, *plan.eval_binds))
    if plan.eval_mode == "same":
        spec = replace(spec, layers=tuple(layers), env={**spec.env, **EVAL_ENV, **plan.env})
    return spec
