"""/v1/draws: dynamic sampling. A stream of useful groups, delivered in numbered batches.

Delivered groups do not change: a request that is repeated after a dropped connection, or a restart of either side,
returns the same groups in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Batch, Group, check_id, key_of, new_id
from rollyard.core.failure import Draining
from rollyard.sampling.draw_runner import DrawRunner
from rollyard.service import sse
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.body import Count
from rollyard.service.schemas.draws import BatchBody, DrawAckBody, DrawBody, RewindBody, TasksBody, parse_place
from rollyard.service.schemas.group_pages import (
    LoadedGroup,
    batch_object,
    cursor,
    draw_object,
    groups_page,
    json_page,
    load_group,
    load_groups,
)
from rollyard.service.schemas.records import ARROW, JsonObject, reply
from rollyard.service.schemas.requests import InRun, RunQuery, WaitS, parse_number, read_body
from rollyard.service.security.access import caller_of, require_manage, require_priority
from rollyard.service.security.bounds import while_connected
from rollyard.store.base import ItemKind

router = APIRouter(prefix="/v1/draws", tags=["draws"])

MOST_GROUPS = 256  # on one page


class WaitQuery(RunQuery):
    wait_s: WaitS = Field(default=0.0, description="Seconds to wait for the batch to close.")


class BatchesQuery(RunQuery):
    after: str | None = Field(default=None, max_length=40, description="The `next` of the previous page.")
    limit: int = Field(default=50, ge=1, le=200)


class GroupsQuery(RunQuery):
    after: str | None = Field(default=None, description="The `next` of the previous page.")
    batch: Count | None = Field(default=None, description="Only groups of this batch.")
    limit: int = Field(default=16, ge=1, le=MOST_GROUPS)
    wait_s: WaitS = Field(default=0.0, description="Seconds to wait for a group, or for the batch to close.")
    include: Literal["traces", "records"] = "traces"


@router.post("", status_code=201, openapi_extra=json_body(DrawBody))
async def create(request: Request) -> Response:
    """Creates a draw, after its tasks have been read, checked and copied. The same id with the same body is the same
    draw."""
    app_state = app_state_of(request)
    body = await read_body(request, DrawBody)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    run = await app_state.run(caller_of(request), body.run)
    require_manage(caller_of(request), run)
    name = new_id("d") if body.id is None else check_id(body.id, "draw id")
    config = body.to_config(run)
    require_priority(caller_of(request), config.priority)
    key = key_of(run.id, name)
    with app_state.pipeline.creating_in(run), app_state.quotas.active_draw(caller_of(request), run, key):
        runner = await app_state.sampler.create(key, run, config, body.source.tasks or (), body.identity())
    return reply(draw_object(runner.draw, runner.draw_state), 201)


@router.get("")
async def list_draws(request: Request) -> Response:
    """Returns all draws, in order of creation. `keep_rate` is null for a draw that ended long ago."""
    app_state = app_state_of(request)
    caller = caller_of(request)
    runs = None if caller.is_admin else [run.id for run in app_state.readable(caller)]
    listed: list[JsonObject] = []
    for draw in await app_state.store.list_draws(runs):
        runner = app_state.sampler.loaded(draw.id)
        listed.append(draw_object(draw, None) if runner is None else draw_object(runner.draw, runner.draw_state))
    return reply({"draws": listed})


@router.get("/{draw_id}")
async def get_draw(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Returns a draw with its figures."""
    runner = await _runner(request, draw_id, run)
    return reply(draw_object(runner.draw, runner.draw_state))


@router.delete("/{draw_id}", status_code=202)
async def close(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Ends a draw. Its running rollouts are cancelled; delivered groups stay."""
    runner = await _mine(request, draw_id, run)
    await runner.close()
    return reply(draw_object(runner.draw, runner.draw_state), 202)


@router.post("/{draw_id}/batches", openapi_extra=json_body(BatchBody))
async def ask(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Opens the next batch. `GET …/groups?batch=` returns its groups as they become ready."""
    body = await read_body(request, BatchBody)
    runner = await _mine(request, draw_id, run)
    return reply(batch_object(await runner.ask(body.want, body.number)))


@router.get("/{draw_id}/batches")
async def list_batches(request: Request, draw_id: str, query: Annotated[BatchesQuery, Query()]) -> Response:
    """Returns the batches of a draw, newest first, and whether each was acknowledged."""
    app_state = app_state_of(request)
    runner = await _runner(request, draw_id, query.run)
    before = parse_number(query.after, "b")
    batches = await app_state.store.list_batches(runner.draw.id, before, query.limit)
    acked = runner.draw.progress.acked
    return reply(
        {
            "batches": [
                {
                    **batch_object(batch),
                    "created_at": batch.created_at,
                    "closed_at": batch.closed_at,
                    "acked": batch.number <= acked,
                }
                for batch in batches
            ],
            "next": f"b:{batches[-1].number}" if len(batches) == query.limit and batches[-1].number > 1 else None,
        }
    )


@router.get("/{draw_id}/batches/{number}")
async def get_batch(request: Request, draw_id: str, number: Count, query: Annotated[WaitQuery, Query()]) -> Response:
    """Returns a batch, at once or when it is closed."""
    app_state = app_state_of(request)
    runner = await _runner(request, draw_id, query.run)
    wait_s = app_state.wait_s(query.wait_s)
    batch = await while_connected(request, runner.batch(number, wait_s), app_state.closing) if wait_s else None
    if batch is None:
        batch = await runner.found(number)
    app_state.require_still_readable(caller_of(request), runner.run.id)
    return reply(batch_object(batch))


@router.get("/{draw_id}/groups", response_class=Response)
async def get_groups(request: Request, draw_id: str, query: Annotated[GroupsQuery, Query()]) -> Response:
    """Returns delivered groups in order, with their traces: as JSON, as Arrow (`Accept:
    application/vnd.apache.arrow.stream`), or without traces as a stream of events (`Accept: text/event-stream`). A page
    may have fewer groups than `limit`."""
    app_state = app_state_of(request)
    runner = await _runner(request, draw_id, query.run)
    accept = request.headers.get("accept", "")
    if sse.MEDIA_TYPE in accept:
        after = query.after or request.headers.get("last-event-id")
        frames = _frames(app_state, runner, parse_place(after), query)
        of_run = _of_run(request, runner.run.id, frames)
        return sse.EventStream(of_run, app_state.closing, is_admitted=app_state.admission(request))
    after = parse_place(query.after)
    wait_s = app_state.wait_s(query.wait_s)
    page = (
        await while_connected(request, _page(app_state, runner, after, query, wait_s), app_state.closing)
        if wait_s
        else None
    )
    groups, batch = page or await _look(app_state, runner, after, query)
    app_state.require_still_readable(caller_of(request), runner.run.id)
    with_traces = query.include == "traces"
    loaded = await load_groups(app_state.store, groups, with_traces=with_traces)
    last = loaded[-1].group.place if loaded else None
    next_cursor = cursor(after if last is None else last)
    if ARROW in accept:
        return Response(await asyncio.to_thread(_arrow_page, loaded, next_cursor, batch), media_type=ARROW)
    page_json = await json_page(loaded, next_cursor, batch, with_traces=with_traces)
    return Response(page_json, media_type="application/json")


def _arrow_page(groups: Sequence[LoadedGroup], next_cursor: str, batch: Batch | None) -> bytes:
    from rollyard.service.schemas.arrow import groups_stream  # the first time 0.15 s

    return groups_stream(groups, next_cursor, batch)


@router.post("/{draw_id}/tasks", status_code=202, openapi_extra=json_body(TasksBody))
async def push(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Adds tasks to a draw whose source is push."""
    body = await read_body(request, TasksBody)
    runner = await _mine(request, draw_id, run)
    names = [None] * len(body.tasks) if body.ids is None else [check_id(name, "task id") for name in body.ids]
    total = await runner.push(list(zip(names, body.tasks, strict=True)), close=body.close)
    return reply({"accepted": len(body.tasks), "total": total}, 202)


@router.post("/{draw_id}/ack", openapi_extra=json_body(DrawAckBody))
async def acknowledge(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Acknowledges all batches up to this one: the trainer has saved them, and their traces may be deleted."""
    body = await read_body(request, DrawAckBody)
    runner = await _mine(request, draw_id, run)
    deleted = await runner.acknowledge(body.batch)
    return reply({"acked": runner.draw.progress.acked, "deleted": deleted})


@router.post("/{draw_id}/rewind", openapi_extra=json_body(RewindBody))
async def rewind(request: Request, draw_id: str, run: InRun = None) -> Response:
    """Undoes the batches after this one, for a trainer that has returned to an earlier checkpoint."""
    app_state = app_state_of(request)
    body = await read_body(request, RewindBody)
    runner = await _mine(request, draw_id, run)
    with app_state.quotas.active_draw(caller_of(request), runner.run, runner.draw.id):  # it may have ended
        runner = await app_state.sampler.rewind(runner.draw.id, body.batch, body.version, body.policy_version)
    return reply(draw_object(runner.draw, runner.draw_state))


async def _runner(request: Request, draw_id: str, run: str | None) -> DrawRunner:
    app_state = app_state_of(request)
    return await app_state.sampler.runner(await app_state.find(caller_of(request), ItemKind.DRAW, draw_id, run))


async def _mine(request: Request, draw_id: str, run: str | None) -> DrawRunner:
    """The runner of a draw that the caller may change. Read the body first: while it arrives, the run may be deleted,
    and its name and that of the draw may become another tenant's."""
    runner = await _runner(request, draw_id, run)
    require_manage(caller_of(request), runner.run)
    return runner


async def _look(
    app_state: AppState, runner: DrawRunner, after: int, query: GroupsQuery
) -> tuple[list[Group], Batch | None]:
    """The groups delivered so far. The batch is read first: a group delivered after that is returned next time."""
    batch = None if query.batch is None else await app_state.store.get_batch(runner.draw.id, query.batch)
    start = after if batch is None else max(after, batch.after)
    groups = await app_state.store.delivered_groups(runner.draw.id, start, query.limit)
    return [group for group in groups if query.batch in (None, group.batch)], batch


async def _page(
    app_state: AppState, runner: DrawRunner, after: int, query: GroupsQuery, wait_s: float
) -> tuple[list[Group], Batch | None]:
    """As `_look`, but waits until there are groups or the batch is closed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                change = runner.notifier.next()
                groups, batch = await _look(app_state, runner, after, query)
                is_over = not batch.is_open if batch is not None else not runner.draw.is_active
                if groups or is_over:
                    return groups, batch
                await change
    return await _look(app_state, runner, after, query)


async def _of_run(request: Request, run_id: str, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The frames, until the run is deleted: the next run of that name may have a draw with this id."""
    app_state, caller = app_state_of(request), caller_of(request)
    async with aclosing(frames):
        async for data in frames:
            if not app_state.is_still_readable(caller, run_id):
                return
            yield data


async def _frames(
    app_state: AppState, runner: DrawRunner, after: int, query: GroupsQuery
) -> AsyncGenerator[bytes, None]:
    """Frames of groups as they are delivered, of batches as they close, and of the draw's end."""
    last_sent = 0  # number of the last batch sent
    while True:
        change = runner.notifier.next()
        is_active = runner.draw.is_active
        groups, batch = await _look(app_state, runner, after, query)
        for group in groups:
            loaded = await load_group(app_state.store, group, with_traces=False)
            after = group.place or after
            body = groups_page([loaded], cursor(after), None, with_traces=False)["groups"][0]
            yield sse.frame("group", body, cursor(after))
            closed = await app_state.store.get_batch(runner.draw.id, group.batch or 0)
            if not closed.is_open and after == closed.after + closed.delivered and closed.number > last_sent:
                last_sent = closed.number
                yield sse.frame("batch", batch_object(closed))
        if groups:
            continue
        if batch is not None and not batch.is_open:
            if batch.number > last_sent:
                yield sse.frame("batch", batch_object(batch))
            return
        if not is_active:
            last = runner.draw.progress.batch  # it may have closed short, after its last group was sent
            if last > last_sent and query.batch is None:
                yield sse.frame("batch", batch_object(await app_state.store.get_batch(runner.draw.id, last)))
            yield sse.frame("end", draw_object(runner.draw, runner.draw_state))
            return
        await change
