"""/v1/overview: what the first page of the dashboard shows, in one call."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Json, State
from rollyard.core.version import __version__
from rollyard.engines.pool.pool import Health
from rollyard.engines.weights.state import PolicyState
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.routes.fleet import node_object
from rollyard.service.schemas.policies import policy_object
from rollyard.service.schemas.records import JsonObject, encode, engine_object, without_password
from rollyard.service.security.access import Caller, caller_of
from rollyard.service.unserved import DEFAULT_POLICY, unserved_policies

router = APIRouter(prefix="/v1", tags=["overview"])

CACHED_S = 1.0
"""Open pages ask every two seconds or so: those of one caller share an answer."""

MOST_CACHED = 64

FAILURES_S = 3600.0

Alert = dict[str, Json]


@router.get("/overview")
async def overview(request: Request) -> Response:
    """Returns the flow of rollouts, pools, the last hour, failures, alerts, engines, policies and nodes. Of a reply,
    `failures` are those of runs that the token may read."""
    app_state, caller = app_state_of(request), caller_of(request)
    now = time.monotonic()
    cache = app_state.overviews
    key = "" if caller.is_admin else caller.name
    cached = cache.get(key)
    if cached is None or cached[0] < now:
        if len(cache) >= MOST_CACHED:
            cache.clear()
        cached = cache[key] = (time.monotonic() + CACHED_S, encode(await _body(app_state, caller)))
    return Response(cached[1], media_type="application/json")


async def _body(app_state: AppState, caller: Caller) -> JsonObject:
    pipeline, fleet = app_state.pipeline, app_state.fleet
    states = Counter(attempt.state for attempt in pipeline.live.values())
    runs = None if caller.is_admin else [run.id for run in app_state.readable(caller)]
    failures = await app_state.catalog.failures(runs, time.time() - FAILURES_S, caller=caller.name)
    return {
        "at": time.time(),
        "version": __version__,
        "uptime_s": time.monotonic() - app_state.started_at,
        "is_draining": pipeline.is_draining,
        "flow": {
            "queued": len(pipeline.scheduler) + states[State.QUEUED],
            **{state.value: states[state] for state in (State.INIT, State.READY, State.RUN, State.EVAL)},
            "ended": pipeline.metrics.totals.ended,
        },
        "pools": pipeline.pools(),
        "waiting_for_room": sum(runtime.waiting for runtime in app_state.resources.runtimes.values()),
        "history": app_state.history.steps(),
        "failures": failures,
        "alerts": [*_alerts(app_state, caller)],
        "engines": [engine_object(engine, for_operator=caller.sees_all_tenants) for engine in app_state.router.list()],
        "policies": [
            policy_object(policy, app_state.owners.get(policy.name)) for policy in app_state.router.policies.all()
        ],
        "nodes": [node_object(node) for node in fleet.nodes.by_name.values()] if fleet is not None else [],
    }


def _alerts(app_state: AppState, caller: Caller) -> Iterator[Alert]:
    """What a person should look at, worst kinds first."""
    if app_state.pipeline.is_draining:
        yield _alert("draining", "service", "the service is shutting down and accepts no work", "warn")
    unserved = unserved_policies(app_state.pipeline, app_state.refused_engines)
    # As in /v1/status: names of policies that only other tenants' runs have are theirs.
    policies = {*unserved} if caller.is_admin else {DEFAULT_POLICY, *(run.policy for run in app_state.readable(caller))}
    for policy, reason in unserved.items():
        if policy in policies:
            yield _alert("unserved_policy", policy, reason, "bad")
    for status in app_state.router.list():
        if status.health is not Health.UP:
            kind = "quarantined_engine" if status.health is Health.QUARANTINED else "engine_down"
            why = status.stats.last_error_words if caller.sees_all_tenants else status.stats.last_error
            yield _alert(kind, status.spec.id, without_password(why), "bad")
    for engine, reason in app_state.refused_engines.items():
        yield _alert("refused_engine", engine, without_password(reason), "bad")
    for policy in app_state.router.policies.all():
        if policy.state is not PolicyState.RUNNING:
            severity = "bad" if policy.state is PolicyState.ABANDONED else "warn"
            holder = f" by {policy.holder}" if policy.holder else ""
            yield _alert("paused_policy", policy.name, f"{policy.state.value}{holder}", severity)
    for runtime in app_state.resources.runtimes:
        for breaker in app_state.breakers(caller, runtime):
            if breaker["state"] != "closed":
                what = f"{runtime}: {breaker['image'] or 'no image'}"
                yield _alert("open_breaker", what, str(breaker["last_error"]), "bad")
    for name, runtime in app_state.resources.runtimes.items():
        if runtime.waiting:
            detail = f"{runtime.waiting} sandboxes wait because the machine is short of memory or disk"
            yield _alert("waiting_for_room", name, detail, "warn")


def _alert(kind: str, what: str, detail: str, severity: str) -> Alert:
    return {"kind": kind, "what": what, "detail": detail, "severity": severity}
