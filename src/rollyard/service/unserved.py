"""Policies that no engine serves: their rollouts wait, and every view of the service says so.

A policy counts if a rollout of it is queued or running. A service without any engine reports the policy `default` as
well, before the first rollout. A policy that is paused for a weight update is served.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.core.engine import Role
from rollyard.engines import EngineStatus, Health
from rollyard.fleet.head import FleetHead
from rollyard.pipeline import Pipeline
from rollyard.service.schemas.records import without_password

DEFAULT_POLICY = "default"
AWAY = ("cannot be reached", "its health check failed")  # in the error of an engine that does not answer


def unserved_policies(pipeline: Pipeline, refused: Mapping[str, str]) -> dict[str, str]:
    """Each such policy, with the reason and what to do. `refused`: the engines that could not be added, and why."""
    statuses = [status for status in pipeline.resources.router.list() if status.spec.role is Role.POLICY]
    policies = {attempt.run.policy for attempt in pipeline.live.values()}
    waiting = pipeline.scheduler.queued_runs | {*pipeline.starting.values()}
    policies |= {run.policy for run_id in waiting if (run := pipeline.run_of(run_id))}
    if not statuses:
        policies.add(DEFAULT_POLICY)
    served = {status.spec.policy for status in statuses if status.health is Health.UP}
    executor = pipeline.executor
    on_nodes = executor.unserved if isinstance(executor, FleetHead) else {}
    reasons = {policy: f"no node serves policy {policy}: {why}" for policy, why in on_nodes.items()}
    for policy in policies - served:
        own = [status for status in statuses if status.spec.policy == policy]
        reasons[policy] = f"no engine serves policy {policy}: {_why(policy, own, refused)}"
    return {policy: without_password(reason) for policy, reason in sorted(reasons.items())}


def _why(policy: str, own: list[EngineStatus], refused: Mapping[str, str]) -> str:
    if any(status.health is Health.QUARANTINED for status in own):
        return f"the weights of its engines are unknown; set them with `rollyard policies resume {policy} VERSION`"
    if own:
        reasons = "; ".join(f"engine {status.spec.id} is {status.health}{_error(status)}" for status in own)
        is_away = any(text in status.stats.last_error for status in own for text in AWAY)
        return reasons + ("; start it, or add another with `rollyard engines add URL`" if is_away else "")
    if refused:
        return "; ".join(f"engine {name} was refused ({reason})" for name, reason in refused.items())
    return f"add one with `rollyard engines add URL{'' if policy == DEFAULT_POLICY else f' --policy {policy}'}`"


def _error(status: EngineStatus) -> str:
    return f" ({status.stats.last_error})" if status.stats.last_error else ""
