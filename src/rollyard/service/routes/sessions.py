"""/v1/sessions: agents that run elsewhere.

A session is a rollout of the environment `session`, submitted as any other. These calls add a key for the gateway when
it is opened, and the reward that ends it. The agent `session` holds the open sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.agents.session import POSTED, LiveSession
from rollyard.core import Rollout, Score, State, check_id, id_of, key_of, new_id
from rollyard.core.failure import Draining, NotFound, SessionConflict
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.openapi import json_body
from rollyard.service.routes.rollouts import cancel_by_id
from rollyard.service.schemas.records import JsonObject, record, reply
from rollyard.service.schemas.requests import SESSION, InRun, RewardBody, RunQuery, SessionBody, read_body
from rollyard.service.security.access import caller_of, require_priority, require_write
from rollyard.service.security.bounds import end_all, while_connected
from rollyard.service.tasks import defaults_of
from rollyard.store.base import ItemKind, Submission

router = APIRouter(prefix="/v1", tags=["sessions"])


class OpenQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    wait_s: float = Field(default=30.0, ge=0, allow_inf_nan=False, description="Longest wait in seconds.")


class WaitQuery(RunQuery):
    wait_s: float = Field(default=30.0, ge=0, allow_inf_nan=False, description="Longest wait in seconds.")


class LookQuery(RunQuery):
    wait_s: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Seconds to wait until it is open.")


@router.post("/sessions", status_code=201, openapi_extra=json_body(SessionBody))
async def open_session(request: Request, query: Annotated[OpenQuery, Query()]) -> Response:
    """Opens a session and returns a URL and a key for an OpenAI or Anthropic client. Returns when it is open, or after
    `wait_s`. The same id with the same body is the same session, with the same key."""
    app_state = app_state_of(request)
    body = await read_body(request, SessionBody)
    if app_state.pipeline.is_draining:
        raise Draining("the service is shutting down")
    run = await app_state.run(caller_of(request), body.run)
    require_write(caller_of(request), run)
    priority = run.priority if body.priority is None else body.priority
    require_priority(caller_of(request), priority)
    task = body.to_task(defaults_of(app_state.resources, run))
    app_state.resources.check(task, run)
    rollout = Rollout(
        id=key_of(run.id, new_id("se") if body.id is None else check_id(body.id, "session id")),
        run=run.id,
        task=task,
        group=None if body.group is None else key_of(run.id, check_id(body.group, "group")),
        index=body.index,
        priority=priority,
    )
    with app_state.pipeline.creating_in(run), app_state.quotas.open_session(run, rollout.id):
        (stored,) = await app_state.pipeline.submit([Submission(rollout, body.identity())])
    stored = await _wait_open(request, stored, query.wait_s)
    live = app_state.sessions.live(stored.id)
    root = f"{request.url.scheme}://{request.headers['host']}"
    door: JsonObject = {
        "key": app_state.keys.make(stored.id, stored.seq),
        "base_url": f"{root}/v1",
        "root_url": root,
        "model": live.gateway.model if live is not None else run.policy,
    }
    return reply({**await _session_object(app_state, stored), **door}, 201)


@router.get("/sessions/{session_id}")
async def get_session(request: Request, session_id: str, query: Annotated[LookQuery, Query()]) -> Response:
    """Returns its state, whether it is open, and turns, tokens and forks so far; never its key."""
    app_state = app_state_of(request)
    rollout = await _session(request, session_id, query.run)
    if query.wait_s:
        rollout = await _wait_open(request, rollout, query.wait_s)
    return reply(await _session_object(app_state, rollout))


@router.post("/sessions/{session_id}/reward", openapi_extra=json_body(RewardBody))
async def give_reward(request: Request, session_id: str, query: Annotated[WaitQuery, Query()]) -> Response:
    """Ends a session with its reward. Returns the record at its end (200), or after `wait_s` (202); the reward is
    durable when the state is `eval` or `ended`. The same reward again is accepted; another one is 409."""
    app_state = app_state_of(request)
    body = await read_body(request, RewardBody)
    rollout = await _session(request, session_id, query.run)
    require_write(caller_of(request), await app_state.store.get_run(rollout.run))
    live = app_state.sessions.live(rollout.id)
    if live is None and rollout.state is not State.ENDED:
        rollout = await _wait_open(request, rollout, query.wait_s)
        live = app_state.sessions.live(rollout.id)
    if live is not None:
        live.give(body.model_dump())
        wait_s = app_state.wait_s(query.wait_s)
        ended = await while_connected(request, app_state.pipeline.wait(rollout.id, wait_s), app_state.closing)
        rollout = ended or await app_state.store.get(rollout.id)
        app_state.require_still_readable(caller_of(request), rollout.run)
    if (live is None or rollout.state is State.ENDED) and not await _has(app_state, rollout, body):
        raise _conflict(rollout)
    return reply(record(rollout), 200 if rollout.state is State.ENDED else 202)


@router.delete("/sessions/{session_id}", status_code=202)
async def cancel_session(request: Request, session_id: str, run: InRun = None) -> Response:
    """Cancels a session, without a reward: model calls end, and sampled tokens are not trained on. An unknown id is
    cancelled when it is submitted."""
    app_state = app_state_of(request)
    try:
        key = await app_state.find(caller_of(request), ItemKind.ROLLOUT, session_id, run)
    except NotFound:
        pass  # it is cancelled when it is submitted
    else:
        _check_kind(await app_state.store.get(key))
    cancelled = await cancel_by_id(request, session_id, run)
    return reply({"id": session_id, "state": cancelled.state if cancelled else "cancelled_before_submit"}, 202)


async def _session(request: Request, session_id: str, run: str | None) -> Rollout:
    app_state = app_state_of(request)
    rollout = await app_state.store.get(await app_state.find(caller_of(request), ItemKind.ROLLOUT, session_id, run))
    _check_kind(rollout)
    return rollout


def _check_kind(rollout: Rollout) -> None:
    if rollout.task.environment != SESSION:
        raise NotFound(f"rollout {id_of(rollout.id)} is not a session")


async def _wait_open(request: Request, rollout: Rollout, wait_s: float) -> Rollout:
    """The session when it is open or has ended, or after `wait_s`."""
    app_state = app_state_of(request)
    wait_s = app_state.wait_s(wait_s)
    if wait_s and rollout.state is not State.ENDED and app_state.sessions.live(rollout.id) is None:
        await while_connected(request, _open_or_ended(app_state, rollout.id, wait_s), app_state.closing)
    app_state.require_still_readable(caller_of(request), rollout.run)
    return await app_state.store.get(rollout.id)


async def _open_or_ended(app_state: AppState, session_id: str, wait_s: float) -> None:
    opened: asyncio.Task[LiveSession] = asyncio.create_task(app_state.sessions.opened(session_id))
    ended: asyncio.Task[Rollout] = asyncio.create_task(app_state.pipeline.wait(session_id, wait_s))
    try:
        await asyncio.wait((opened, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all(opened, ended)


async def _has(app_state: AppState, rollout: Rollout, body: RewardBody) -> bool:
    """Whether the session ended with this reward."""
    trajectory = await app_state.store.trajectory(rollout.id)
    if trajectory is not None:
        posted = trajectory.info.get(POSTED)
        is_same = posted == body.model_dump(exclude={"answer"}) and trajectory.info.get("answer") == body.answer
        return is_same and (rollout.ending is None or rollout.ending.score is not None)
    score = Score(body.reward, body.components, body.metrics)  # its trajectory was acknowledged and deleted
    return rollout.ending is not None and rollout.ending.score == score


def _conflict(rollout: Rollout) -> SessionConflict:
    ending, name = rollout.ending, f"session {id_of(rollout.id)}"
    if ending is None:
        return SessionConflict(f"{name} is in state {rollout.state}: it accepts a reward when it is open")
    outcome = ending.outcome.value
    if ending.score is not None:
        return SessionConflict(f"{name} has ended with another reward", outcome=outcome, reward=ending.score.reward)
    code = ending.failure.code if ending.failure else ""
    what = f"{name} has ended without a reward ({code})"
    return SessionConflict(what, outcome=outcome, reward=None, failure_code=code)


async def _session_object(app_state: AppState, rollout: Rollout) -> JsonObject:
    ending = rollout.ending
    live = app_state.sessions.live(rollout.id)
    turns, sampled_tokens, gateway = 0, 0, {}
    if live is not None:
        turns, sampled_tokens, gateway = live.gateway.turns, live.gateway.sampled_tokens, live.gateway.info()
    elif (trajectory := await app_state.store.trajectory(rollout.id)) is not None:
        turns, sampled_tokens, gateway = trajectory.turns, trajectory.sampled_tokens, trajectory.info.get("gateway")
    elif ending is not None:
        turns, sampled_tokens = ending.summary.turns, ending.summary.sampled_tokens
    forks = gateway.get("forks", {}) if isinstance(gateway, Mapping) else {}
    return {
        "id": id_of(rollout.id),
        "run": rollout.run,
        "state": rollout.state,
        "is_open": live is not None,
        "turns": turns,
        "sampled_tokens": sampled_tokens,
        "forks": forks,
        "limit": live.gateway.failure.code if live is not None and live.gateway.failure is not None else None,
        "outcome": ending.outcome if ending else None,
        "reward": ending.score.reward if ending and ending.score else None,
        "failure": ending.failure if ending else None,
        "metadata": rollout.task.data.get("metadata", {}),
        "created_at": rollout.created_at,
    }
