"""/v1/runs: the jobs of trainers."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Run
from rollyard.core.access import Access
from rollyard.core.failure import Draining, Forbidden
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.records import JsonObject, reply, results_object, run_object
from rollyard.service.schemas.requests import AckBody, RunBody, read_body
from rollyard.service.security.access import caller_of, require_manage, require_new_run, require_priority
from rollyard.store.base import RunResults

router = APIRouter(prefix="/v1", tags=["runs"])

DELETE_S = 0.05
"""How long a call waits for the deletion of a run: most runs have little left."""


class RunsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include: Literal["results"] | None = Field(
        default=None, description="Also return the rollouts of each run in numbers, as `results`."
    )


@router.post("/runs", status_code=201, openapi_extra=json_body(RunBody))
async def create_run(request: Request) -> Response:
    """Creates a run. The same id with the same body is the same run (200); with another body it is 409."""
    app_state = app_state_of(request)
    body = await read_body(request, RunBody)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    caller = caller_of(request)
    run = body.to_run(caller.name, time.time())
    require_priority(caller, run.priority)
    known = app_state.pipeline.run_of(run.id)
    if caller.access not in (Access.ADMIN, Access.TRAINER):
        raise Forbidden(f"a {caller.access} token cannot create runs")
    if known is None:
        require_new_run(caller, run.id, run.policy, app_state.tokens.callers)
    elif not caller.reads(known):
        raise _taken(run.id)
    sent = body.model_dump(exclude_unset=True, exclude={"id"})
    with app_state.quotas.new_run(caller, run.id) if known is None else nullcontext():
        stored = await app_state.store.put_run(run, sent)
        app_state.pipeline.register_run(stored)
    if not caller.reads(stored):  # another caller has just created it, with the same body
        raise _taken(run.id)
    return reply(run_object(stored), 200 if known else 201)


def _taken(run_id: str) -> Forbidden:
    return Forbidden(f"the run name {run_id!r} is taken")


@router.get("/runs")
async def list_runs(request: Request, query: Annotated[RunsQuery, Query()]) -> Response:
    """Returns all runs that the token may read, in order of creation. With include=results, each has `results`:
    rollouts per state, those with a reward and their mean, trainable ones, and the time of the last change."""
    app_state, caller = app_state_of(request), caller_of(request)
    runs = app_state.readable(caller)  # in memory: the runs of all tenants would have to be decoded
    if query.include is None:
        return reply({"runs": [run_object(run) for run in runs]})
    results = await app_state.store.results_of(None if caller.is_admin else [run.id for run in runs])
    return reply({"runs": [_with_results(run_object(run), results.get(run.id)) for run in runs]})


@router.get("/runs/{run_id}")
async def get_run(request: Request, run_id: str, query: Annotated[RunsQuery, Query()]) -> Response:
    """Returns one run, with its `results` if requested."""
    app_state = app_state_of(request)
    run = await app_state.run(caller_of(request), run_id)
    body = await _run_object(app_state, run)
    if query.include is not None:
        body = _with_results(body, (await app_state.store.results_of([run.id])).get(run.id))
    return reply(body)


def _with_results(body: JsonObject, results: RunResults | None) -> JsonObject:
    return {**body, "results": results_object(results or RunResults({}))}


async def _run_object(app_state: AppState, run: Run) -> JsonObject:
    if run.id not in app_state.pipeline.cancelling.deleting:
        return run_object(run)
    return {**run_object(run), "state": "deleting", "left": await app_state.store.count_of_run(run.id)}


@router.delete("/runs/{run_id}", status_code=202)
async def delete_run(request: Request, run_id: str) -> Response:
    """Cancels the remaining work of a run, then deletes it and its rollouts. 204: it is deleted. 202: the deletion
    continues without the caller, and after a restart; `GET` returns how many rollouts are left. A trainer's token
    deletes only its own runs."""
    app_state, caller = app_state_of(request), caller_of(request)
    run = await app_state.run(caller, run_id)
    require_manage(caller, run)
    if caller.is_admin:
        await app_state.audit(request, "delete_run", run.id)
    if run.id not in app_state.pipeline.cancelling.deleting and await app_state.sampler.delete_run(run.id, DELETE_S):
        return Response(status_code=204)
    return reply(await _run_object(app_state, run), 202)


@router.post("/runs/{run_id}/ack", openapi_extra=json_body(AckBody))
async def acknowledge(request: Request, run_id: str) -> Response:
    """Acknowledges everything up to a cursor: the trainer has saved it, and its traces and artifacts may be deleted.
    Open groups keep theirs; groups of a draw keep theirs until their batch is acknowledged. A trainer's token
    acknowledges only its own runs, including its default run."""
    app_state, caller = app_state_of(request), caller_of(request)
    body = await read_body(request, AckBody)
    run = await app_state.run(caller, run_id)
    require_manage(caller, run)
    count = await app_state.store.acknowledge(run.id, body.cursor)
    return reply({"acknowledged": count})
