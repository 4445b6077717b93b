"""/v1/rollouts: submit, list, wait for, cancel and rescore rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import (
    DEFAULT_RUN,
    DeadlineExpired,
    Json,
    Rollout,
    RollyardError,
    Run,
    State,
    Trajectory,
    check_id,
    id_of,
    key_of,
    new_id,
)
from rollyard.core.failure import (
    Draining,
    EvalDeadline,
    Gone,
    InvalidRequest,
    NotFound,
    RequestError,
    TaskFailure,
)
from rollyard.core.loop_yield import LoopYield
from rollyard.pipeline import MessagePage, Pipeline, Snapshot, page_of
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.schemas.records import ARROW, JsonObject, record, reply, traces, trajectory_object
from rollyard.service.schemas.requests import (
    CheckBody,
    InRun,
    RunQuery,
    SingleBody,
    SubmitBody,
    WaitS,
    read_body,
    read_submit,
)
from rollyard.service.schemas.task import check_merged
from rollyard.service.security.access import caller_of, require_priority, require_write
from rollyard.service.security.bounds import while_connected
from rollyard.service.tasks import checked_task
from rollyard.service.token_texts import token_texts
from rollyard.store.base import ItemKind, Page, Submission

router = APIRouter(prefix="/v1", tags=["rollouts"])

MOST_PROBLEMS = 100  # tasks whose problems are returned; the others are counted


class GetQuery(RunQuery):
    wait_s: WaitS = Field(default=0.0, description="Seconds to wait for the rollout's end.")
    include: Literal["trajectory"] | None = None


class MessagesQuery(RunQuery):
    after: int = Field(default=0, ge=0, description="The number of messages that the client has: `next` of its last.")


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: State | None = None
    run: str | None = None
    group: str | None = None
    after: str | None = Field(default=None, description="The `next` of the previous page.")
    limit: int = Field(default=100, ge=1, le=1000)
    order: Literal["oldest", "newest"] = Field(default="oldest", description="Which rollouts come first.")
    wait_s: WaitS = Field(default=0.0, description="With state=ended: seconds to wait for a rollout.")


@router.post("/rollouts", status_code=202, openapi_extra=json_body(SubmitBody, SingleBody))
async def submit(request: Request) -> Response:
    """Submits one or many rollouts, durably and atomically. The same id with the same body is the same rollout."""
    app_state = app_state_of(request)
    run_id, bodies = await read_submit(request)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    caller = caller_of(request)
    run = await app_state.run(caller, run_id)
    require_write(caller, run)
    check_merged(run.defaults, len(bodies))
    submissions: list[Submission] = []
    loop_yield = LoopYield()
    for number, body in enumerate(bodies):
        priority = run.priority if body.priority is None else body.priority
        require_priority(caller, priority)
        path = ("task",) if isinstance(body, SingleBody) else ("rollouts", number, "task")
        task = checked_task(app_state.resources, body.task, run, path)
        rollout = Rollout(
            id=key_of(run.id, new_id("ro") if body.id is None else check_id(body.id, "rollout id")),
            run=run.id,
            task=task,
            group=None if body.group is None else key_of(run.id, check_id(body.group, "group")),
            index=body.index,
            priority=priority,
        )
        submissions.append(Submission(rollout, body.identity()))
        await loop_yield.step()
    with app_state.pipeline.creating_in(run):
        stored = await app_state.pipeline.submit(submissions)
    return reply({"rollouts": [record(rollout) for rollout in stored]}, 202)


@router.post("/tasks/check", openapi_extra=json_body(CheckBody))
async def check_tasks(request: Request) -> Response:
    """Checks tasks as a submit does, and stores nothing. Returns the number of those that would be refused, and what is
    wrong with the first of them."""
    app_state, caller = app_state_of(request), caller_of(request)
    body = await read_body(request, CheckBody)
    run = await app_state.run(caller, body.run)
    require_write(caller, run)
    check_merged(run.defaults, len(body.tasks))
    bad, loop_yield = 0, LoopYield()
    problems: list[dict[str, Json]] = []
    for index, raw in enumerate(body.tasks):
        error = _refusal(app_state, raw, run)
        if error is not None:
            bad += 1
            if len(problems) < MOST_PROBLEMS:
                problems.append({"index": index, "code": error.code, "details": _details(error)})
            request.app.state.plugin_errors.log(error)
        await loop_yield.step()
    return reply({"checked": len(body.tasks), "bad": bad, "problems": problems})


def _refusal(app_state: AppState, raw: Mapping[str, Json], run: Run) -> RollyardError | None:
    try:
        checked_task(app_state.resources, raw, run, ())
    except (RequestError, TaskFailure) as error:
        return error
    return None


def _details(error: RollyardError) -> list[Json]:
    """One text for each invalid field, or one for the error."""
    fields = error.data.get("fields") if isinstance(error, InvalidRequest) else None
    if not isinstance(fields, list):
        return [error.detail]
    return [f"{field['path']}: {field['problem']}".removeprefix(": ") for field in fields if isinstance(field, Mapping)]


@router.get("/rollouts")
async def list_rollouts(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """Returns a page of rollouts: ended ones in the order in which they ended, others in order of submission; with
    order=newest in the reverse order. With state=ended, `unfinished` is whether a rollout of these runs and this group
    has not ended: an empty page without one is the last."""
    app_state = app_state_of(request)
    runs = await _runs(request, query)
    if query.group is not None:
        check_id(query.group, "group")
    is_ended = query.state is State.ENDED
    if query.wait_s and not is_ended:
        raise InvalidRequest("wait_s: only a listing with state=ended can wait")
    if query.wait_s and query.order == "newest":
        raise InvalidRequest("wait_s: a listing with order=newest cannot wait")
    wait_s = app_state.wait_s(query.wait_s)
    page: Page | None = None
    unfinished = await app_state.store.has_unfinished(runs, query.group) if is_ended else None
    if wait_s:
        page = await while_connected(request, _first_ended(request, query, wait_s), app_state.closing)
        runs = await _runs(request, query)  # some may have been deleted meanwhile
    if page is None:
        page = await _list(app_state, query, runs)
    if page.rollouts and unfinished:  # the last one may have ended since; with an empty page, the earlier answer counts
        unfinished = await app_state.store.has_unfinished(runs, query.group)
    after = page.next_cursor
    if is_ended and query.order == "oldest":  # more rollouts will end: continue after the last one
        last = page.rollouts[-1].ended_seq if page.rollouts else None
        after = query.after or "e:0" if last is None else f"e:{last}"
    body: JsonObject = {"rollouts": [record(rollout) for rollout in page.rollouts], "next": after}
    return reply({**body, "unfinished": unfinished} if is_ended else body)


async def _runs(request: Request, query: ListQuery) -> list[str] | None:
    """The runs that are listed; None: all."""
    app_state, caller = app_state_of(request), caller_of(request)
    if query.run is not None:
        return [(await app_state.run(caller, query.run)).id]
    return None if caller.is_admin else [run.id for run in app_state.readable(caller)]


async def _list(app_state: AppState, query: ListQuery, runs: list[str] | None) -> Page:
    return await app_state.store.list(
        state=query.state,
        runs=runs,
        group_named=query.group,
        after=query.after,
        limit=query.limit,
        is_newest_first=query.order == "newest",
    )


async def _first_ended(request: Request, query: ListQuery, wait_s: float) -> Page:
    """The page, as soon as it is not empty. The runs are those that the caller may read then."""
    app_state = app_state_of(request)
    event_log = app_state.pipeline.event_log
    try:
        async with asyncio.timeout(wait_s):
            while True:
                last_id = event_log.last_id
                runs = await _runs(request, query)
                page = await _list(app_state, query, runs)
                if page.rollouts:
                    return page
                async with aclosing(event_log.events(last_id, runs)) as events:
                    async for event in events:
                        if event.kind == "gap" or event.state is State.ENDED:
                            break
    except TimeoutError:
        return await _list(app_state, query, await _runs(request, query))


@router.get("/rollouts/{rollout_id}")
async def get_rollout(request: Request, rollout_id: str, query: Annotated[GetQuery, Query()]) -> Response:
    """Returns the record, at once or at its end, with its trajectory if requested. As Arrow: its traces, and the record
    in the schema's metadata."""
    app_state = app_state_of(request)
    key = await _find(request, rollout_id, query.run)
    wait_s = app_state.wait_s(query.wait_s)
    rollout: Rollout | None = None
    if wait_s:
        rollout = await while_connected(request, app_state.pipeline.wait(key, wait_s), app_state.closing)
    if rollout is None:
        rollout = await app_state.store.get(key)
    app_state.require_still_readable(caller_of(request), rollout.run)
    if _accepts_arrow(request):
        return await _arrow(await _trajectory(app_state, rollout), rollout, with_record=True)
    body = record(rollout)
    if query.include == "trajectory":
        trajectory = await app_state.store.trajectory(key)
        evidence = await app_state.store.evidence(key) if trajectory is not None else b""
        body["trajectory"] = trajectory and trajectory_object(trajectory, rollout, evidence)
    return reply(body)


@router.delete("/rollouts/{rollout_id}", status_code=202)
async def cancel(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Cancels a rollout in any state; can be repeated. An unknown id is cancelled when it is submitted to that run
    (unset: to the default run)."""
    rollout = await cancel_by_id(request, rollout_id, run)
    return reply({"id": rollout_id, "state": rollout.state if rollout else "cancelled_before_submit"}, 202)


@router.get("/rollouts/{rollout_id}/traces")
async def get_traces(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Returns only the traces, as JSON or (`Accept: application/vnd.apache.arrow.stream`) as Arrow."""
    app_state = app_state_of(request)
    rollout = await app_state.store.get(await _find(request, rollout_id, run))
    trajectory = await _trajectory(app_state, rollout)
    if _accepts_arrow(request):
        return await _arrow(trajectory, rollout)
    return reply({"traces": traces(trajectory, rollout)})


@router.get("/rollouts/{rollout_id}/messages")
async def get_messages(request: Request, rollout_id: str, query: Annotated[MessagesQuery, Query()]) -> Response:
    """Returns the conversation so far, also while the rollout runs; of a new attempt it starts again. While it runs, a
    message of more than 1 MB is cut, and of an agent program that has several conversations the longest is returned:
    with another `conversation`, these messages do not continue earlier pages. `available` is false while it runs on a
    node that does not send the messages."""
    app_state = app_state_of(request)
    key = await _find(request, rollout_id, query.run)
    live = app_state.pipeline.live.get(key)
    page = await live.page(query.after) if live is not None else None
    rollout = await app_state.store.get(key)
    app_state.require_still_readable(caller_of(request), rollout.run)
    live = app_state.pipeline.live.get(key)  # its node may have been asked: it may have ended meanwhile
    if page is None or not page.end:
        trajectory = await app_state.store.trajectory(key)
        if trajectory is not None:
            page = page_of(Snapshot.of(trajectory), query.after, is_live=False)
    shown = page or MessagePage(rollout.attempt)
    return reply(
        {
            "id": id_of(key),
            "state": live.state if live is not None else rollout.state,
            "attempt": shown.attempt,
            "conversation": shown.conversation,
            "turns": shown.turns,
            "sampled_tokens": shown.sampled_tokens,
            "messages": msgspec.Raw(shown.messages),
            "message_turns": shown.message_turns,
            "next": shown.end,
            "available": page is not None or live is None,
        }
    )


@router.get("/rollouts/{rollout_id}/texts")
async def get_texts(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Returns the text of each token, one list per trace, for people who look at tokens. Null for a trace whose model
    no engine serves now. A character of several tokens is the text of its last one."""
    app_state = app_state_of(request)
    rollout = await app_state.store.get(await _find(request, rollout_id, run))
    trajectory = await _trajectory(app_state, rollout)
    return reply({"texts": [await token_texts(app_state, trace) for trace in trajectory.traces]})


@router.post("/rollouts/{rollout_id}/rescore")
async def rescore(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Scores the saved artifacts again, without inference. The score is appended to `scores`; the terminal record is
    not changed. While it waits it counts as a queued rollout of its run, then as a live one."""
    app_state = app_state_of(request)
    await request.body()  # unused, but it must be read before a disconnect can be detected
    key = await _find_writable(request, rollout_id, run)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    rollout = await while_connected(request, _rescore(app_state.pipeline, key), app_state.closing)
    if rollout is None:
        raise Draining("the service is shutting down")
    return reply(record(rollout))


async def _find(request: Request, rollout_id: str, run: str | None) -> str:
    return await app_state_of(request).find(caller_of(request), ItemKind.ROLLOUT, rollout_id, run)


async def _find_writable(request: Request, rollout_id: str, run: str | None) -> str:
    app_state, key = app_state_of(request), await _find(request, rollout_id, run)
    rollout = await app_state.store.get(key)
    require_write(caller_of(request), await app_state.store.get_run(rollout.run))
    return key


async def cancel_by_id(request: Request, rollout_id: str, run: str | None) -> Rollout | None:
    """Cancels a rollout. Returns None if it is unknown; then it is cancelled when it is submitted."""
    app_state, caller = app_state_of(request), caller_of(request)
    try:
        key, coming_run = await _find_writable(request, rollout_id, run), None
    except NotFound:
        into = await app_state.run(caller, run or DEFAULT_RUN)
        require_write(caller, into)
        key, coming_run = key_of(into.id, rollout_id), into.id
    return await app_state.pipeline.cancel(key, run=coming_run)


async def _rescore(pipeline: Pipeline, rollout_id: str) -> Rollout:
    try:
        return await pipeline.rescore(rollout_id)
    except DeadlineExpired as error:
        raise EvalDeadline(f"scoring rollout {id_of(rollout_id)} took longer than its limits.eval_s") from error


async def _trajectory(app_state: AppState, rollout: Rollout) -> Trajectory:
    trajectory = await app_state.store.trajectory(rollout.id)
    if trajectory is not None:
        return trajectory
    if rollout.ending is None:
        raise NotFound(
            f"rollout {id_of(rollout.id)} is in state {rollout.state}: its traces are available when it has ended"
        )
    if rollout.ending.summary.traces:
        raise Gone(f"the traces of rollout {id_of(rollout.id)} have been deleted")
    return Trajectory(rollout.id, rollout.attempt)


def _accepts_arrow(request: Request) -> bool:
    return ARROW in request.headers.get("accept", "")


async def _arrow(trajectory: Trajectory, rollout: Rollout, *, with_record: bool = False) -> Response:
    def encoded() -> bytes:
        from rollyard.service.schemas.arrow import traces_stream  # the first time 0.15 s

        return traces_stream(trajectory, rollout, with_record=with_record)

    return Response(await asyncio.to_thread(encoded), media_type=ARROW)
