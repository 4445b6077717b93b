"""/v1/status and /v1/pools: the state of the whole service, and the sizes of its pools."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Json, id_of
from rollyard.core.failure import InvalidRequest
from rollyard.core.version import __version__
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.routes.fleet import node_object
from rollyard.service.schemas.policies import policy_object
from rollyard.service.schemas.records import engine_object, layers_object, reply
from rollyard.service.schemas.requests import PoolsBody, read_body
from rollyard.service.security.access import caller_of, require_admin
from rollyard.service.unserved import DEFAULT_POLICY, unserved_policies

router = APIRouter(prefix="/v1", tags=["status"])


@router.get("/status")
async def status(request: Request) -> Response:
    """Returns queues, pools, engines, runtimes, and the available environments and agents."""
    app_state = app_state_of(request)
    recovered, fleet = app_state.store.recovered, app_state.fleet
    caller = caller_of(request)
    readable = {run.id: run for run in app_state.readable(caller)}
    unserved = unserved_policies(app_state.pipeline, app_state.refused_engines)
    # Names of policies that only other tenants' runs have are theirs.
    policies = {*unserved} if caller.is_admin else {DEFAULT_POLICY, *(run.policy for run in readable.values())}
    return reply(
        {
            "version": __version__,
            "epoch": app_state.store.epoch,
            "uptime_s": time.monotonic() - app_state.started_at,
            "is_draining": app_state.pipeline.is_draining,
            "last_event": app_state.pipeline.event_log.last_id,
            "states": await app_state.store.counts(),
            "pools": app_state.pipeline.pools(),
            "nodes": [node_object(node) for node in fleet.nodes.by_name.values()] if fleet is not None else [],
            "unserved_policies": {policy: reason for policy, reason in unserved.items() if policy in policies},
            "ray": _ray(app_state),
            "engines": [
                engine_object(engine, for_operator=caller.sees_all_tenants) for engine in app_state.router.list()
            ],
            "refused_engines": app_state.refused_engines,
            "policies": [
                policy_object(policy, app_state.owners.get(policy.name)) for policy in app_state.router.policies.all()
            ],
            "runtimes": {
                name: {
                    "is_default": name == app_state.resources.default_runtime,
                    "is_isolated": runtime.is_isolated,
                    "features": app_state.runtimes.get(name, {}),
                    "waiting_for_room": runtime.waiting,
                    "layers": layers_object(app_state.resources.layers.get(name)),
                    "breakers": app_state.breakers(caller, name),
                }
                for name, runtime in app_state.resources.runtimes.items()
            },
            "draws": [
                {**draw, "id": id_of(str(draw["id"]))} for draw in app_state.sampler.active() if draw["run"] in readable
            ],
            "environments": app_state.resources.environments.names,
            "agents": app_state.resources.agents.names,
            "recovered": {
                "queued": recovered.queued,
                "requeued": recovered.requeued,
                "evals": len(recovered.evals),
                "failed": recovered.failed,
                "cancelled": recovered.cancelled,
            },
        }
    )


def _ray(app_state: AppState) -> Json:
    """The state of the fleet's Ray cluster; None without one."""
    if app_state.ray is None:
        return None
    nodes: list[Json] = [
        {"name": node.name, "host": node.host, "is_alive": node.is_alive, "error": node.error}
        for node in app_state.ray.nodes()
    ]
    return {"error": app_state.ray.error, "nodes": nodes}


@router.patch("/pools", openapi_extra=json_body(PoolsBody))
async def resize_pools(request: Request) -> Response:
    """Resizes pools, at once. Running rollouts are not affected."""
    require_admin(request)
    pipeline = app_state_of(request).pipeline
    sizes = (await read_body(request, PoolsBody)).model_dump(exclude_none=True)
    if not sizes:
        raise InvalidRequest("name at least one of init, run, eval, ready, live")
    await app_state_of(request).audit(request, "resize_pools", "pools", **sizes)
    pipeline.resize(sizes)
    return reply(pipeline.pools())
