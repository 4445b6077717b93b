"""/v1/rollouts/{id}/…: what people look at in one rollout: its timeline, an agent program's requests, its artifacts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Artifact, Json, Rollout, Trajectory, id_of
from rollyard.core.failure import ArtifactLost, ArtifactTooLarge, Gone, NotFound
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.schemas.records import reply
from rollyard.service.schemas.requests import InRun
from rollyard.service.security.access import caller_of
from rollyard.service.timeline import LiveView, timeline
from rollyard.store.base import ItemKind

router = APIRouter(prefix="/v1", tags=["rollouts"])

MOST_ARTIFACT_BYTES = 16 << 20
"""The size of an artifact in one reply, which is held in memory."""

NO_REQUESTS = b'{"requests":[],"dropped":0,"is_complete":true}'
UNKNOWN_REQUESTS = b'{"requests":[],"dropped":0,"is_complete":false}'

HOSTILE = {
    "content-security-policy": "sandbox; default-src 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""An artifact has whatever the agent wrote: no browser may show or run it."""


@router.get("/rollouts/{rollout_id}/timeline")
async def get_timeline(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Returns when each stage, model call and tool call started and ended, in seconds since the submission, also while
    the rollout runs. A part that runs has no `end_s`. Calls are known of the last attempt; while it runs on a node
    that does not send them, they are not known yet."""
    app_state = app_state_of(request)
    rollout = await _find(request, rollout_id, run)
    live = app_state.pipeline.live.get(rollout.id)
    info: Mapping[str, Json] = {}
    view: LiveView | None = None
    if live is not None and rollout.ending is None:
        info = await live.calls()
        if app_state.pipeline.live.get(rollout.id) is live:
            rollout, view = live.rollout, LiveView(live.state, live.timings())
        else:  # it ended, or was given back, while its node was asked
            rollout, info = await app_state.store.get(rollout.id), {}
            app_state.require_still_readable(caller_of(request), rollout.run)
    if not info.get("calls") and (trajectory := await app_state.store.trajectory(rollout.id)) is not None:
        info = trajectory.info
    return await asyncio.to_thread(_timeline, rollout, view, info)  # 2,000 calls take 30 ms


def _timeline(rollout: Rollout, view: LiveView | None, info: Mapping[str, Json]) -> Response:
    return reply(timeline(rollout, view, info, time.time()))


@router.get("/rollouts/{rollout_id}/requests")
async def get_requests(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Returns the requests of an agent program as it sent them, each as the difference to the one that it extends; none
    for other agents. Bounded: `dropped` requests of the middle are left out, and long texts are cut. `is_complete` is
    false then, and if the node that runs the agent does not answer."""
    app_state = app_state_of(request)
    rollout = await _find(request, rollout_id, run)
    live = app_state.pipeline.live.get(rollout.id)
    body = await live.requests() if live is not None else b""
    if not body:
        trajectory = await app_state.store.trajectory(rollout.id)
        if trajectory is not None:
            body = trajectory.requests or NO_REQUESTS
        else:
            _check_kept(rollout)
    app_state.require_still_readable(caller_of(request), rollout.run)  # the node may have taken a while
    return Response(body or UNKNOWN_REQUESTS, media_type="application/json")


@router.get("/rollouts/{rollout_id}/artifacts")
async def list_artifacts(request: Request, rollout_id: str, run: InRun = None) -> Response:
    """Returns the files that RUN left for EVAL. `available` is false for one that was deleted or stayed at its node."""
    app_state = app_state_of(request)
    rollout = await _find(request, rollout_id, run)
    trajectory = await app_state.store.trajectory(rollout.id)
    if trajectory is None:
        _check_kept(rollout)
        return reply({"artifacts": []})
    folder = app_state.resources.artifacts
    listed = [
        {
            "name": artifact.name,
            "path": artifact.path,
            "bytes": artifact.bytes,
            "kind": artifact.kind,
            "available": await folder.has(artifact, rollout.id, trajectory.attempt),
        }
        for artifact in trajectory.artifacts
    ]
    return reply({"artifacts": listed})


@router.get("/rollouts/{rollout_id}/artifacts/{name}")
async def get_artifact(request: Request, rollout_id: str, name: str, run: InRun = None) -> Response:
    """Returns an artifact as it was saved: a file, or a tar archive of a folder."""
    app_state = app_state_of(request)
    rollout = await _find(request, rollout_id, run)
    trajectory = await app_state.store.trajectory(rollout.id)
    if trajectory is None:
        _check_kept(rollout)
    artifact = _named(trajectory, name)
    if artifact is None:
        raise NotFound(f"rollout {rollout_id} has no artifact {name[:100]!r}")
    assert trajectory is not None
    if artifact.bytes > MOST_ARTIFACT_BYTES:
        raise ArtifactTooLarge(
            f"artifact {artifact.name} has {artifact.bytes} bytes; at most {MOST_ARTIFACT_BYTES} are sent"
        )
    data = await _read(app_state, rollout, trajectory, artifact)
    file_name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{rollout_id}-{artifact.name}"[:150])
    suffix = ".tar" if artifact.kind == "tar" else ""
    disposition = f'attachment; filename="{file_name}{suffix}"'
    headers = {**HOSTILE, "content-disposition": disposition}
    return Response(data, media_type="application/octet-stream", headers=headers)


def _named(trajectory: Trajectory | None, name: str) -> Artifact | None:
    artifacts = trajectory.artifacts if trajectory is not None else ()
    return next((artifact for artifact in artifacts if artifact.name == name), None)


async def _read(app_state: AppState, rollout: Rollout, trajectory: Trajectory, artifact: Artifact) -> bytes:
    folder = app_state.resources.artifacts
    try:
        path: Path = await folder.load(artifact, rollout.id, trajectory.attempt)
        return await asyncio.to_thread(path.read_bytes)
    except (ArtifactLost, OSError):
        raise Gone(
            f"artifact {artifact.name} of rollout {id_of(rollout.id)} was deleted, or stayed at its node"
        ) from None


def _check_kept(rollout: Rollout) -> None:
    """Raises Gone if the rollout had a trajectory, which was deleted."""
    if rollout.ending is not None and rollout.ending.summary.traces:
        raise Gone(f"the trajectory of rollout {id_of(rollout.id)} has been deleted")


async def _find(request: Request, rollout_id: str, run: str | None) -> Rollout:
    app_state = app_state_of(request)
    key = await app_state.find(caller_of(request), ItemKind.ROLLOUT, rollout_id, run)
    return await app_state.store.get(key)
