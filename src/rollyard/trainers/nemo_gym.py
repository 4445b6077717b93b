"""An agent server for NeMo Gym, with which NeMo RL trains on Rollyard's rollouts.

    POST /run                    a row of a dataset → a rollout → the row with `response` and `reward`
    POST /v1/responses           one reply of the policy, without an environment and without a reward
    POST /aggregate_metrics      means over the rows of an evaluation
    GET  /                       a health check

`rollyard gym-agent` serves it; `create_app` returns it as a Starlette app for other servers. It keeps no state: every
row is a rollout of a Rollyard service, which `rollyard.client` finds as usual.

Invariants. A row that the trainer named (`_ng_rollout_id`, `_ng_attempt_index`) is one rollout of this agent's run,
however often it is sent, and continues if its caller disconnects. A row without a name cannot be requested again: it is
cancelled when its caller disconnects. Failures are returned as described in `_nemo_gym_rows`, never as a good row. With
`failures="status"`, an infrastructure failure is a 503 instead, for trainers that retry such calls themselves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard.client import AsyncClient, Record, Trajectory
from rollyard.core import RollyardError, new_id
from rollyard.core.failure import Gone, NotFound
from rollyard.trainers._nemo_gym_rows import SERVER, TASK, refused, result, rollout_id, task_of

__all__ = ["SERVER", "TASK", "GymAgent", "create_app"]

log = logging.getLogger("rollyard.trainers")

CALL_S = 600.0  # for one reply of the policy in /v1/responses
TASK_INDEX = "_ng_task_index"


class Failed503(Exception):
    """Infrastructure failed a row, and `failures` is "status"."""


@dataclass(slots=True)
class GymAgent:
    """Runs rows as rollouts. `run` is created if it does not exist; by default it is new with every start of the agent,
    since trainers restart their counters with each start. `server` is the resources server of rows that name none."""

    client: AsyncClient
    run: str = field(default_factory=lambda: new_id("gym"))
    server: str = ""
    policy: str | None = None
    defaults: Mapping[str, Any] | None = None
    failures: Literal["row", "status"] = "row"

    async def open(self) -> None:
        try:
            await self.client.get_run(self.run)
        except NotFound:
            await self.client.create_run(self.run, policy=self.policy, defaults=self.defaults)

    async def play(self, row: Mapping[str, Any], disconnected: Awaitable[object] | None = None) -> dict[str, Any]:
        """Returns the result of a row, also if it fails. `disconnected` ends when its caller disconnects."""
        try:
            name, is_named = rollout_id(row, self.run)
            body = task_of(row, self.server)
            await self.client.submit([body], run=self.run, ids=[name])
            try:
                record = await _unless_disconnected(self.client.wait(name, run=self.run), disconnected)
            except asyncio.CancelledError:
                if not is_named:
                    await self._cancel(name)
                raise
            return self._result_or_failure(row, await self._trajectory(record))
        except RollyardError as error:
            if self.failures == "status" and error.status >= 500:
                raise Failed503(error.detail) from error
            return refused(row, error)

    async def respond(self, params: Mapping[str, Any]) -> tuple[int, bytes]:
        """Returns one reply of the policy, in its own session without a reward."""
        names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
        sampling = {
            sampling_name: params[gym_name]
            for gym_name, sampling_name in names.items()
            if params.get(gym_name) is not None
        }
        async with (
            self.client.session(run=self.run, sampling=sampling or None) as session,
            aiohttp.ClientSession() as http,
        ):
            body = {**params, "model": session.model, "stream": False}
            headers = {"Authorization": f"Bearer {session.key}"}
            timeout = aiohttp.ClientTimeout(total=CALL_S)
            async with http.post(f"{session.base_url}/responses", json=body, headers=headers, timeout=timeout) as reply:
                return reply.status, await reply.read()

    def _result_or_failure(self, row: Mapping[str, Any], trajectory: Trajectory) -> dict[str, Any]:
        failure = trajectory.record.failure or {}
        if self.failures == "status" and trajectory.record.reward is None and failure.get("blame") == "infra":
            raise Failed503(f"{failure.get('code')}: {failure.get('detail')}")
        return result(row, trajectory)

    async def _trajectory(self, record: Record) -> Trajectory:
        try:
            return await self.client.trajectory(record.id, run=record.run)
        except (NotFound, Gone):
            return Trajectory(record)

    async def _cancel(self, name: str) -> None:
        with suppress(RollyardError):
            await self.client.cancel(name, run=self.run)


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns means per task and over all. Failure rows are counted, but are in no mean."""
    scored: dict[Any, list[float]] = defaultdict(list)
    failures = 0
    for row in rows:
        reward = row.get("reward")
        if row.get("_ng_failure_class") is not None or isinstance(reward, bool) or not isinstance(reward, int | float):
            failures += 1
        elif math.isfinite(reward):
            scored[row.get(TASK_INDEX, 0)].append(float(reward))
    everything = [reward for rewards in scored.values() for reward in rewards]
    groups = [{TASK_INDEX: task, **_reward_statistics(scored[task])} for task in sorted(scored, key=str)]
    agent = {**_reward_statistics(everything), "rollouts": len(rows), "failures": failures, "tasks": len(scored)}
    return {
        "group_level_metrics": groups,
        "agent_metrics": agent,
        "key_metrics": {name: value for name, value in agent.items() if name.startswith("mean/")},
    }


def _reward_statistics(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean/reward": statistics.fmean(values),
        "max/reward": max(values),
        "min/reward": min(values),
        "median/reward": statistics.median(values),
        "std/reward": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


# --- HTTP ---------------------------------------------------------------------------------------------


def create_app(agent: GymAgent) -> ASGIApp:
    """Returns the agent's ASGI app, which opens and closes its client."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        async with agent.client:
            await agent.open()
            yield

    async def run(request: Request) -> Response:
        row = await _object(request)
        if row is None:
            return _reply({"detail": "expected a row of a dataset, an object"}, 422)
        disconnected = asyncio.create_task(_disconnected(request.receive))
        try:
            return _reply(await agent.play(row, disconnected))
        except Failed503 as error:
            return _reply({"detail": str(error)}, 503)
        except asyncio.CancelledError:
            if not disconnected.done():
                raise
            return Response(status_code=499)
        finally:
            disconnected.cancel()
            await asyncio.gather(disconnected, return_exceptions=True)

    async def responses(request: Request) -> Response:
        params = await _object(request)
        if params is None:
            return _reply({"detail": "expected the parameters of a response, an object"}, 422)
        try:
            status, body = await agent.respond(params)
        except (RollyardError, aiohttp.ClientError, TimeoutError) as error:
            return _reply({"detail": f"the policy did not answer: {error}"}, 502)
        return Response(body, status, media_type="application/json")

    async def aggregate(request: Request) -> Response:
        body = await _object(request) or {}
        rows = body.get("verify_responses")
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            return _reply({"detail": "verify_responses: expected a list of rows"}, 422)
        return _reply(metrics_of(rows))

    async def alive(_: Request) -> Response:
        return _reply({"status": "ok", "run": agent.run})

    routes = [
        Route("/run", run, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/aggregate_metrics", aggregate, methods=["POST"]),
        Route("/", alive, methods=["GET"]),
    ]
    return _NoPages(Starlette(routes=routes, lifespan=lifespan))


class _NoPages:
    """ASGI: refuses requests of web pages. The agent has a token of the service, but requires none itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"]):
            await _reply({"detail": "requests with an Origin header, from web pages, are refused"}, 403)(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)


async def _unless_disconnected(work: Awaitable[Record], disconnected: Awaitable[object] | None) -> Record:
    """Returns the record. Raises CancelledError as soon as the caller disconnects."""
    task = asyncio.ensure_future(work)
    other = asyncio.ensure_future(disconnected) if disconnected is not None else None
    try:
        await asyncio.wait([task, *([other] if other else [])], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise asyncio.CancelledError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _object(request: Request) -> dict[str, Any] | None:
    try:
        body = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _reply(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
