"""Prometheus metrics of the service: each call by its route, and a snapshot of the service's state at each scrape."""

from __future__ import annotations

import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollyard.core import State
from rollyard.engines.pool.pool import Health
from rollyard.engines.routing.router import Router
from rollyard.engines.weights.state import PolicyState
from rollyard.fleet.head import FleetHead
from rollyard.observe.metrics import EngineState, Metrics, NodeState, PolicyWeights, PoolState, Snapshot
from rollyard.pipeline import Pipeline
from rollyard.service.unserved import unserved_policies

NO_ROUTE = "none"
"""The label of unknown paths: paths that strangers request must not become labels."""


class CallCounter:
    """ASGI middleware: counts every call, including refused ones, with its status and duration."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # if nothing is sent: the client has disconnected

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = scope["method"] if route != NO_ROUTE else NO_ROUTE
            self._metrics.http_request(method, route, status, time.perf_counter() - started)


def snapshot(pipeline: Pipeline, router: Router) -> Snapshot:
    """The current state, from memory only."""
    states = Counter(attempt.state.value for attempt in pipeline.live.values())
    states[State.QUEUED.value] += len(pipeline.scheduler)
    pools = pipeline.pools()
    fleet = pipeline.executor if isinstance(pipeline.executor, FleetHead) else None
    nodes = fleet.nodes.by_name.values() if fleet is not None else ()
    return Snapshot(
        rollouts={state.value: states[state.value] for state in State if state is not State.ENDED},
        pools={
            name: PoolState(pools[name]["size"], pools[name]["active"], pools[name]["waiting"])
            for name in ("init", "run", "eval")
        },
        nodes={
            node.name: NodeState(
                len(node.out),
                node.room.want,
                node.heard_s_ago,
                node.is_drained,
                {use.engine: use.is_reachable for use in node.status.engines},
            )
            for node in nodes
        },
        unserved=tuple(unserved_policies(pipeline, {})),
        engines={
            status.spec.id: EngineState(
                status.stats.sessions,
                status.stats.in_flight,
                status.health is Health.UP,
                status.cap,
                status.load.kv_use if status.load else None,
            )
            for status in router.list()
        },
        seats_waiting=router.waiting(),
        policies={
            policy.name: PolicyWeights(policy.version, policy.state is not PolicyState.RUNNING)
            for policy in router.policies.all()
        },
        layer_bytes={name: layers.size_bytes for name, layers in pipeline.resources.layers.items()},
        waiting_for_room={name: runtime.waiting for name, runtime in pipeline.resources.runtimes.items()},
        open_breakers=dict.fromkeys(pipeline.resources.runtimes, 0) | pipeline.resources.breakers.open_by_runtime(),
    )
