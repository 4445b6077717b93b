"""/v1/status and /v1/pools: how the whole stands, and its sizes."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard import __version__
from rollyard.core import Json, id_of
from rollyard.core.failure import InvalidRequest
from rollyard.fleet.head import HeadPipeline
from rollyard.service.access import caller_of, require_admin
from rollyard.service.app_state import AppState, house_of
from rollyard.service.models import PoolsBody, read_body
from rollyard.service.openapi import json_body
from rollyard.service.policy_models import policy_object
from rollyard.service.records import engine_object, layers_object, reply, without_password
from rollyard.service.routes.fleet import node_object

router = APIRouter(prefix="/v1", tags=["status"])


@router.get("/status")
async def status(request: Request) -> Response:
    """Queues, pools, engines, runtimes, and what can be used here."""
    house = house_of(request)
    recovered = house.store.recovered
    readable = {run.id for run in house.readable(caller_of(request))}
    return reply(
        {
            "version": __version__,
            "epoch": house.store.epoch,
            "uptime_s": time.monotonic() - house.started_at,
            "is_draining": house.yard.is_draining,
            "states": await house.store.counts(),
            "pools": house.yard.pools(),
            "nodes": [node_object(node) for node in house.yard.nodes.by_name.values()]
            if isinstance(house.yard, HeadPipeline)
            else [],
            "unserved_policies": {name: without_password(why) for name, why in house.yard.unserved.items()}
            if isinstance(house.yard, HeadPipeline)
            else {},
            "ray": _ray(house),
            "engines": [engine_object(engine) for engine in house.router.list()],
            "refused_engines": house.refused_engines,
            "policies": [
                policy_object(policy, house.owners.get(policy.name)) for policy in house.router.policies.all()
            ],
            "runtimes": {
                name: {
                    "is_default": name == house.shop.default_runtime,
                    "is_isolated": runtime.is_isolated,
                    "features": house.runtimes.get(name, {}),
                    "waiting_for_room": runtime.waiting,
                    "layers": layers_object(house.shop.layers.get(name)),
                    "breakers": house.shop.breakers.status(name),
                }
                for name, runtime in house.shop.runtimes.items()
            },
            "draws": [
                {**draw, "id": id_of(str(draw["id"]))} for draw in house.sampler.active() if draw["run"] in readable
            ],
            "environments": house.shop.environments.names,
            "agents": house.shop.agents.names,
            "recovered": {
                "queued": recovered.queued,
                "requeued": recovered.requeued,
                "evals": len(recovered.evals),
                "failed": recovered.failed,
                "cancelled": recovered.cancelled,
            },
        }
    )


def _ray(house: AppState) -> Json:
    """How the Ray cluster of a fleet stands; None without one."""
    if house.ray is None:
        return None
    nodes: list[Json] = [
        {"name": node.name, "host": node.host, "is_alive": node.is_alive, "error": node.error}
        for node in house.ray.nodes()
    ]
    return {"error": house.ray.error, "nodes": nodes}


@router.patch("/pools", openapi_extra=json_body(PoolsBody))
async def resize_pools(request: Request) -> Response:
    """New sizes for stages, at once. Nothing that runs is thrown out."""
    require_admin(request)
    yard = house_of(request).yard
    sizes = (await read_body(request, PoolsBody)).model_dump(exclude_none=True)
    if not sizes:
        raise InvalidRequest("name at least one of init, run, eval, ready, live")
    await house_of(request).audit(request, "resize_pools", "pools", **sizes)
    yard.resize(sizes)
    return reply(yard.pools())
