"""/v1/evals: k samples of each task by one weight version of a policy, and pass@k at the end."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core.failure import Draining, Forbidden
from rollyard.sampling.eval_tasks import tasks_of
from rollyard.sampling.evals import EvalPlan
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.evals import EvalBody, eval_object
from rollyard.service.schemas.records import JsonObject, reply
from rollyard.service.schemas.requests import InRun, RunQuery, WaitS, parse_number, read_body
from rollyard.service.security.access import caller_of, owns_policy, require_new_run, require_priority, require_write
from rollyard.service.security.bounds import while_connected
from rollyard.store.base import EvalRecord, ItemKind

router = APIRouter(prefix="/v1/evals", tags=["evals"])


class EvalQuery(RunQuery):
    wait_s: WaitS = Field(default=0.0, description="Seconds to wait for its end.")


class TasksQuery(RunQuery):
    after: str | None = Field(default=None, max_length=40, description="The `next` of the previous page.")
    limit: int = Field(default=200, ge=1, le=1000)


@router.post("", status_code=201, openapi_extra=json_body(EvalBody))
async def create(request: Request) -> Response:
    """Starts an evaluation, after its tasks have been read, checked and copied. The same id with the same body is the
    same evaluation, whether it is running or has ended."""
    app_state = app_state_of(request)
    body = await read_body(request, EvalBody)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    plan = _plan(request, body)
    is_new = app_state.pipeline.run_of(plan.run) is None
    with app_state.quotas.new_run(caller_of(request), plan.run) if is_new else nullcontext():
        record = await app_state.sampler.evals.create(plan, body.source.tasks or (), body.identity())
    created = app_state.pipeline.run_of(record.run)
    if created is not None and not caller_of(request).reads(created):  # another caller has just created it
        raise _taken(plan.run)
    return reply(_to_object(app_state, record), 201)


@router.get("")
async def list_evals(request: Request) -> Response:
    """Returns all evaluations, in order of creation."""
    app_state = app_state_of(request)
    runs = {run.id for run in app_state.readable(caller_of(request))}
    return reply(
        {
            "evals": [
                _to_object(app_state, record) for record in await app_state.store.list_evals() if record.run in runs
            ]
        }
    )


@router.get("/{eval_id}")
async def get_eval(request: Request, eval_id: str, query: Annotated[EvalQuery, Query()]) -> Response:
    """Returns the evaluation, at once or at its end: `done` of `total` samples, and at the end its result."""
    app_state = app_state_of(request)
    key = await app_state.find(caller_of(request), ItemKind.EVAL, eval_id, query.run)
    wait_s = app_state.wait_s(query.wait_s)
    record = None
    if wait_s:
        record = await while_connected(request, app_state.sampler.evals.wait(key, wait_s), app_state.closing)
    if record is None:
        record = await app_state.store.get_eval(key)
    app_state.require_still_readable(caller_of(request), record.run)
    return reply(_to_object(app_state, record))


@router.get("/{eval_id}/tasks")
async def get_tasks(request: Request, eval_id: str, query: Annotated[TasksQuery, Query()]) -> Response:
    """Returns the tasks that have started, in order: samples with a reward, how many passed, and how many are missing.
    A page may have fewer tasks than `limit`."""
    app_state = app_state_of(request)
    key = await app_state.find(caller_of(request), ItemKind.EVAL, eval_id, query.run)
    first = parse_number(query.after, "t") or 0
    tasks, after = await tasks_of(app_state.store, await app_state.store.get_eval(key), first, query.limit)
    return reply({"tasks": tasks, "next": None if after is None else f"t:{after}"})


@router.delete("/{eval_id}", status_code=202)
async def cancel(request: Request, eval_id: str, run: InRun = None) -> Response:
    """Cancels an evaluation and all its rollouts; it has no result. One that has ended is not changed."""
    app_state = app_state_of(request)
    caller = caller_of(request)
    record = await app_state.store.get_eval(await app_state.find(caller, ItemKind.EVAL, eval_id, run))
    require_write(caller, await app_state.store.get_run(record.run))
    return reply(_to_object(app_state, await app_state.sampler.evals.cancel(record.id)), 202)


def _plan(request: Request, body: EvalBody) -> EvalPlan:
    """The plan of the evaluation. Raises `Forbidden` if the caller may not create it."""
    app_state, caller = app_state_of(request), caller_of(request)
    if not caller.can_write:
        raise Forbidden(f"a {caller.access} token cannot start evaluations")
    plan = body.to_plan(caller)
    require_priority(caller, plan.priority)
    known = app_state.pipeline.run_of(plan.run)
    if known is None:
        require_new_run(caller, plan.run, plan.policy, app_state.tokens.callers)
    elif not caller.reads(known):
        raise _taken(plan.run)
    if plan.on_update == "hold" and not owns_policy(caller, plan.policy, app_state.owners, app_state.tokens.callers):
        raise Forbidden(
            f'only its owner and admins may hold back new weights of policy {plan.policy!r}: use "on_update": "fail"'
        )
    return plan


def _taken(run_id: str) -> Forbidden:
    return Forbidden(f"the run name {run_id!r} is taken")


def _to_object(app_state: AppState, record: EvalRecord) -> JsonObject:
    return eval_object(record, app_state.sampler.evals.done(record))
