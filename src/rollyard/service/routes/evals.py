"""/v1/evals: k samples of each task by one version of a policy, and pass@k at the end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import check_id
from rollyard.core.failure import Draining
from rollyard.service.auth import caller_of, require_mine
from rollyard.service.bounds import while_wanted
from rollyard.service.eval_models import EvalBody, eval_object
from rollyard.service.house import House, house_of
from rollyard.service.models import WaitS, read_body
from rollyard.service.openapi import json_body
from rollyard.service.records import JsonObject, reply
from rollyard.store.base import EvalRecord

router = APIRouter(prefix="/v1/evals", tags=["evals"])


class EvalQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait_s: WaitS = Field(default=0.0, description="Answer when it has ended, or after so long.")


@router.post("", status_code=201, openapi_extra=json_body(EvalBody))
async def create(request: Request) -> Response:
    """Begins an evaluation; its tasks are read, checked and copied first. The same id with the same body is the same
    one, whether it still runs or has ended."""
    house = house_of(request)
    body = await read_body(request, EvalBody)
    if house.yard.is_draining:
        raise Draining("the service is shutting down")
    plan = body.to_plan(caller_of(request).name)
    record = await house.sampler.evals.create(plan, body.source.tasks or (), body.identity())
    return reply(_told(house, record), 201)


@router.get("")
async def list_evals(request: Request) -> Response:
    """All evaluations, in the order in which they were made."""
    house = house_of(request)
    return reply({"evals": [_told(house, record) for record in await house.store.list_evals()]})


@router.get("/{eval_id}")
async def get_eval(request: Request, eval_id: str, query: Annotated[EvalQuery, Query()]) -> Response:
    """How it stands, at once or at its end: `done` of `total` samples, and then the result."""
    house = house_of(request)
    check_id(eval_id, "evaluation")
    wait_s = house.wait_s(query.wait_s)
    record = None
    if wait_s:
        record = await while_wanted(request, house.sampler.evals.wait(eval_id, wait_s), house.closing)
    if record is None:
        record = await house.store.get_eval(eval_id)
    return reply(_told(house, record))


@router.delete("/{eval_id}", status_code=202)
async def cancel(request: Request, eval_id: str) -> Response:
    """Ends it with all its rollouts, and without a result. One that has ended stays as it is."""
    house = house_of(request)
    record = await house.store.get_eval(check_id(eval_id, "evaluation"))
    require_mine(caller_of(request), await house.store.get_run(record.run))
    return reply(_told(house, await house.sampler.evals.cancel(eval_id)), 202)


def _told(house: House, record: EvalRecord) -> JsonObject:
    return eval_object(record, house.sampler.evals.done(record))
