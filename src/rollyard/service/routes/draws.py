"""/v1/draws: dynamic sampling. A stream of useful groups, handed out in numbered batches.

What was delivered stays as it is: asking again, after a dropped connection or a restart of either side, gives the same
groups in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Batch, Group, check_id, key_of, new_id
from rollyard.core.failure import Draining
from rollyard.sampling.draw_runner import DrawRunner
from rollyard.service import arrow, sse
from rollyard.service.access import caller_of, require_manage, require_priority
from rollyard.service.app_state import AppState, house_of
from rollyard.service.bounds import while_wanted
from rollyard.service.draw_models import BatchBody, DrawAckBody, DrawBody, RewindBody, TasksBody, parse_place
from rollyard.service.group_pages import (
    batch_object,
    cursor,
    draw_object,
    groups_page,
    groups_stream,
    load_group,
)
from rollyard.service.models import Count, InRun, RunQuery, WaitS, read_body
from rollyard.service.openapi import json_body
from rollyard.service.records import reply
from rollyard.store.base import ItemKind

router = APIRouter(prefix="/v1/draws", tags=["draws"])

MOST_GROUPS = 256  # on one page


class WaitQuery(RunQuery):
    wait_s: WaitS = Field(default=0.0, description="Answer when the batch is closed, or after so long.")


class GroupsQuery(RunQuery):
    after: str | None = Field(default=None, description="The `next` of the page before.")
    batch: Count | None = Field(default=None, description="Only groups of that batch.")
    limit: int = Field(default=16, ge=1, le=MOST_GROUPS)
    wait_s: WaitS = Field(default=0.0, description="Wait so long for the first group, or for the batch to close.")
    include: Literal["traces", "records"] = "traces"


@router.post("", status_code=201, openapi_extra=json_body(DrawBody))
async def create(request: Request) -> Response:
    """Makes a draw; its tasks are read, checked and copied first. The same id with the same body is the same draw."""
    house = house_of(request)
    body = await read_body(request, DrawBody)
    if house.yard.is_draining:
        raise Draining("the service is shutting down")
    run = await house.run(caller_of(request), body.run)
    require_manage(caller_of(request), run)
    name = new_id("d") if body.id is None else check_id(body.id, "draw id")
    config = body.to_config(run)
    require_priority(caller_of(request), config.priority)
    key = key_of(run.id, name)
    keeper = await house.sampler.create(key, run, config, body.source.tasks or (), body.identity())
    return reply(draw_object(keeper.draw, keeper.drawing), 201)


@router.get("")
async def list_draws(request: Request) -> Response:
    """All draws, in the order in which they were made."""
    house = house_of(request)
    runs = {run.id for run in house.readable(caller_of(request))}
    found = [await house.sampler.keeper(draw.id) for draw in await house.store.list_draws() if draw.run in runs]
    return reply({"draws": [draw_object(keeper.draw, keeper.drawing) for keeper in found]})


@router.get("/{draw_id}")
async def get_draw(request: Request, draw_id: str, run: InRun = None) -> Response:
    """How a draw stands, with its figures."""
    keeper = await _keeper(request, draw_id, run)
    return reply(draw_object(keeper.draw, keeper.drawing))


@router.delete("/{draw_id}", status_code=202)
async def close(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Ends a draw: what is at work for it is cancelled, what was delivered stays."""
    keeper = await _mine(request, draw_id, run)
    await keeper.close()
    return reply(draw_object(keeper.draw, keeper.drawing), 202)


@router.post("/{draw_id}/batches", openapi_extra=json_body(BatchBody))
async def ask(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Opens the next batch. Its groups come by `GET …/groups?batch=`, as they become ready."""
    keeper = await _mine(request, draw_id, run)
    body = await read_body(request, BatchBody)
    return reply(batch_object(await keeper.ask(body.want, body.number)))


@router.get("/{draw_id}/batches/{number}")
async def get_batch(request: Request, draw_id: str, number: Count, query: Annotated[WaitQuery, Query()]) -> Response:
    """How a batch stands, at once or when it is closed."""
    house = house_of(request)
    keeper = await _keeper(request, draw_id, query.run)
    wait_s = house.wait_s(query.wait_s)
    batch = await while_wanted(request, keeper.batch(number, wait_s), house.closing) if wait_s else None
    if batch is None:
        batch = await keeper.found(number)
    return reply(batch_object(batch))


@router.get("/{draw_id}/groups", response_class=Response)
async def get_groups(request: Request, draw_id: str, query: Annotated[GroupsQuery, Query()]) -> Response:
    """Delivered groups in order, with their traces: JSON, Arrow (`Accept: application/vnd.apache.arrow.stream`), or,
    without traces, a stream of events (`Accept: text/event-stream`)."""
    house = house_of(request)
    keeper = await _keeper(request, draw_id, query.run)
    accept = request.headers.get("accept", "")
    if sse.MEDIA_TYPE in accept:
        after = query.after or request.headers.get("last-event-id")
        return sse.EventStream(_frames(house, keeper, parse_place(after), query), house.closing)
    after = parse_place(query.after)
    wait_s = house.wait_s(query.wait_s)
    found = await while_wanted(request, _page(house, keeper, after, query, wait_s), house.closing) if wait_s else None
    groups, batch = found or await _look(house, keeper, after, query)
    with_traces = query.include == "traces"
    loaded = [await load_group(house.store, group, with_traces=with_traces) for group in groups]
    last = groups[-1].place if groups else None
    next_cursor = cursor(after if last is None else last)
    if arrow.MEDIA_TYPE in accept:
        data = await asyncio.to_thread(groups_stream, loaded, next_cursor, batch)
        return Response(data, media_type=arrow.MEDIA_TYPE)
    return reply(groups_page(loaded, next_cursor, batch, with_traces=with_traces))


@router.post("/{draw_id}/tasks", status_code=202, openapi_extra=json_body(TasksBody))
async def push(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Adds tasks to a draw whose source is pushed."""
    keeper = await _mine(request, draw_id, run)
    body = await read_body(request, TasksBody)
    names = [None] * len(body.tasks) if body.ids is None else [check_id(name, "task id") for name in body.ids]
    total = await keeper.push(list(zip(names, body.tasks, strict=True)), close=body.close)
    return reply({"accepted": len(body.tasks), "total": total}, 202)


@router.post("/{draw_id}/ack", openapi_extra=json_body(DrawAckBody))
async def acknowledge(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Says that all batches up to that one are safe with the trainer: their traces may be deleted."""
    keeper = await _mine(request, draw_id, run)
    body = await read_body(request, DrawAckBody)
    deleted = await keeper.acknowledge(body.batch)
    return reply({"acked": keeper.draw.progress.acked, "deleted": deleted})


@router.post("/{draw_id}/rewind", openapi_extra=json_body(RewindBody))
async def rewind(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Undoes the batches after that one: for a trainer that has gone back to an earlier checkpoint."""
    key = (await _mine(request, draw_id, run)).draw.id
    body = await read_body(request, RewindBody)
    keeper = await house_of(request).sampler.rewind(key, body.batch, body.version, body.policy_version)
    return reply(draw_object(keeper.draw, keeper.drawing))


async def _keeper(request: Request, draw_id: str, run: str | None) -> DrawRunner:
    house = house_of(request)
    return await house.sampler.keeper(await house.find(caller_of(request), ItemKind.DRAW, draw_id, run))


async def _mine(request: Request, draw_id: str, run: str | None) -> DrawRunner:
    keeper = await _keeper(request, draw_id, run)
    require_manage(caller_of(request), keeper.run)
    return keeper


async def _look(house: AppState, keeper: DrawRunner, after: int, query: GroupsQuery) -> tuple[list[Group], Batch | None]:
    """What there is now. The batch is read first: a group that came later is simply not told yet."""
    batch = None if query.batch is None else await house.store.get_batch(keeper.draw.id, query.batch)
    start = after if batch is None else max(after, batch.after)
    groups = await house.store.delivered_groups(keeper.draw.id, start, query.limit)
    return [group for group in groups if query.batch in (None, group.batch)], batch


async def _page(
    house: AppState, keeper: DrawRunner, after: int, query: GroupsQuery, wait_s: float
) -> tuple[list[Group], Batch | None]:
    """The same, as soon as there is something to tell."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                heard = keeper.bell.next()
                groups, batch = await _look(house, keeper, after, query)
                is_over = not batch.is_open if batch is not None else not keeper.draw.is_active
                if groups or is_over:
                    return groups, batch
                await heard
    return await _look(house, keeper, after, query)


async def _frames(house: AppState, keeper: DrawRunner, after: int, query: GroupsQuery) -> AsyncGenerator[bytes, None]:
    """Groups as they are delivered, batches as they close, and the draw's end."""
    told = 0  # batches
    while True:
        heard = keeper.bell.next()
        is_active = keeper.draw.is_active
        groups, batch = await _look(house, keeper, after, query)
        for group in groups:
            loaded = await load_group(house.store, group, with_traces=False)
            after = group.place or after
            body = groups_page([loaded], cursor(after), None, with_traces=False)["groups"][0]
            yield sse.frame("group", body, cursor(after))
            closed = await house.store.get_batch(keeper.draw.id, group.batch or 0)
            if not closed.is_open and after == closed.after + closed.delivered and closed.number > told:
                told = closed.number
                yield sse.frame("batch", batch_object(closed))
        if groups:
            continue
        if batch is not None and not batch.is_open:
            if batch.number > told:
                yield sse.frame("batch", batch_object(batch))
            return
        if not is_active:
            last = keeper.draw.progress.batch  # it may have closed short, after its last group was told
            if last > told and query.batch is None:
                yield sse.frame("batch", batch_object(await house.store.get_batch(keeper.draw.id, last)))
            yield sse.frame("end", draw_object(keeper.draw, keeper.drawing))
            return
        await heard
