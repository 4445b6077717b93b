"""/v1/groups: n rollouts of one task, with one record at the end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Group, GroupState, Json, Task, check_id, id_of, key_of, new_id
from rollyard.core.failure import InvalidRequest
from rollyard.core.loop_yield import LoopYield
from rollyard.sampling.groups import new_group
from rollyard.sampling.open_group import rollouts_of
from rollyard.service.app_state import app_state_of
from rollyard.service.json_body import read_json
from rollyard.service.openapi import json_body
from rollyard.service.schemas.body import check_body, field_path
from rollyard.service.schemas.draws import GroupBody, GroupsBody, SingleGroupBody
from rollyard.service.schemas.group_pages import group_object
from rollyard.service.schemas.records import reply
from rollyard.service.schemas.requests import InRun, RunQuery, WaitS, parse_number
from rollyard.service.schemas.task import check_merged
from rollyard.service.security.access import caller_of, require_priority, require_write
from rollyard.service.security.bounds import while_connected
from rollyard.service.tasks import checked_task
from rollyard.store.base import ItemKind

router = APIRouter(prefix="/v1", tags=["groups"])


class GroupsQuery(RunQuery):
    draw: str | None = Field(default=None, description="Only groups of this draw.")
    state: GroupState | None = None
    after: str | None = Field(default=None, max_length=40, description="The `next` of the previous page.")
    limit: int = Field(default=50, ge=1, le=200)


class GroupQuery(RunQuery):
    wait_s: WaitS = Field(default=0.0, description="Seconds to wait for the end of its members.")


@router.post("/groups", status_code=202, openapi_extra=json_body(GroupsBody, SingleGroupBody))
async def create(request: Request) -> Response:
    """Submits one or many groups, durably and atomically. Rollout k of group G is `G-k`."""
    app_state = app_state_of(request)
    raw = await read_json(request)
    if isinstance(raw, dict) and "groups" in raw:
        many = check_body(raw, GroupsBody)
        run_id, bodies, is_single = many.run, many.groups, False
    else:
        one = check_body(raw, SingleGroupBody)
        run_id, bodies, is_single = one.run, list[GroupBody]([one]), True
    run = await app_state.run(caller_of(request), run_id)
    require_write(caller_of(request), run)
    check_merged(run.defaults, len(bodies))
    version, loop_yield = app_state.router.version(run.policy), LoopYield()
    submissions: list[tuple[Group, Task, dict[str, Json]]] = []
    for number, body in enumerate(bodies):
        path = ("task",) if is_single else ("groups", number, "task")
        task = checked_task(app_state.resources, body.task, run, path)
        name = new_id("g") if body.id is None else check_id(body.id, field_path((*path[:-1], "id")))
        priority = run.priority if body.priority is None else body.priority
        require_priority(caller_of(request), priority)
        group = new_group(key_of(run.id, name), run.id, body.size, body.spares, body.min_members, priority, version)
        submissions.append((group, task, body.identity()))
        await loop_yield.step()
    with app_state.pipeline.creating_in(run):
        groups = await app_state.sampler.groups.put(submissions)
    return reply({"groups": [group_object(group) for group in groups]}, 202)


@router.get("/groups")
async def list_groups(request: Request, query: Annotated[GroupsQuery, Query()]) -> Response:
    """Returns groups without their members, newest first."""
    app_state, caller = app_state_of(request), caller_of(request)
    if query.run is not None:
        runs = [(await app_state.run(caller, query.run)).id]
    else:
        runs = None if caller.is_admin else [run.id for run in app_state.readable(caller)]
    draw = None if query.draw is None else await app_state.find(caller, ItemKind.DRAW, query.draw, query.run)
    before = parse_number(query.after, "g")
    groups, after = await app_state.store.list_groups(
        runs=runs, draw=draw, state=query.state, before=before, limit=query.limit
    )
    objects = [{name: value for name, value in group_object(group).items() if name != "members"} for group in groups]
    return reply({"groups": objects, "next": None if after is None else f"g:{after}"})


@router.get("/groups/{group_id}")
async def get_group(request: Request, group_id: str, query: Annotated[GroupQuery, Query()]) -> Response:
    """Returns the group with its members, at once or when they have ended."""
    app_state = app_state_of(request)
    key = await app_state.find(caller_of(request), ItemKind.GROUP, group_id, query.run)
    wait_s = app_state.wait_s(query.wait_s)
    group = None
    if wait_s:
        group = await while_connected(request, app_state.sampler.groups.wait(key, wait_s), app_state.closing)
    if group is None:
        group = await app_state.store.get_group(key)
    app_state.require_still_readable(caller_of(request), group.run)
    return reply(group_object(group, await rollouts_of(app_state.store, group)))


@router.delete("/groups/{group_id}", status_code=202)
async def cancel(request: Request, group_id: str, run: InRun = None) -> Response:
    """Cancels a group and its rollouts. A group of a draw cannot be cancelled."""
    app_state = app_state_of(request)
    caller = caller_of(request)
    group = await app_state.store.get_group(await app_state.find(caller, ItemKind.GROUP, group_id, run))
    require_write(caller, await app_state.store.get_run(group.run))
    if group.draw is not None:
        raise InvalidRequest(
            f"group {group_id!r} belongs to the draw {id_of(group.draw)!r}: close that, or cancel its rollouts"
        )
    group = await app_state.sampler.groups.cancel(group.id)
    return reply({"id": group_id, "state": group.state}, 202)
