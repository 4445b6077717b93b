"""The paths, with ProRL Agent's bodies, responses and statuses.

    400   /start if the intake is open; an instance without a handler
    409   /start while another holder has the policy paused
    503   /stop, /status, /cancel, /process if the intake is closed; /process without an engine; the service is closing
    504   /process took longer than `prorl_timeout_s`: the rollout continues, and the same call waits for it again

Other errors have the statuses of the rest of this service. Every error's body has a `detail`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import State, id_of
from rollyard.core.failure import EngineExists, InvalidRequest, NotFound, TaskInvalid, UnknownEnvironment
from rollyard.engines.clients.prorl import kind_at
from rollyard.engines.clients.transport import open_http
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.engine_address import check_reachable
from rollyard.service.json_body import SMALL_BYTES, decode
from rollyard.service.prorl.jobs import ProrlJob, ProrlJobs
from rollyard.service.prorl.results import result_of
from rollyard.service.schemas.body import check_body
from rollyard.service.schemas.engine import EngineBody, engine_id
from rollyard.service.schemas.records import reply
from rollyard.service.security.access import caller_of, require_admin
from rollyard.service.security.bounds import while_connected
from rollyard.service.settings import Settings

router = APIRouter(tags=["prorl"])

PATHS = frozenset({"/start", "/stop", "/status", "/process", "/cancel", "/add_llm_server", "/clear_llm_server"})

ENGINE_PREFIX = "prorl-"  # prefix of the ids of engines added here; only those are cleared here


def mount(app: FastAPI, app_state: AppState) -> None:
    app.state.prorl = ProrlJobs(app_state)
    app.include_router(router)


def open_paths(settings: Settings) -> frozenset[str]:
    """The paths that need no token (see the package's docstring). With configured tokens, all paths need one."""
    has_tokens = bool(settings.admin_tokens or settings.trainer_tokens)
    return PATHS if settings.prorl and settings.is_loopback and not has_tokens else frozenset()


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")  # as ProRL Agent does


class ProcessBody(_Body):
    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: str | None = None


class CancelBody(_Body):
    job_id: str


class ServerBody(_Body):
    """ProRL Agent sends only the address; the other fields are additions."""

    address: Annotated[str, Field(pattern=r"^https?://[^/\s]+")]
    tokenizer: str = ""
    trust_tokenizer: bool = False
    renderer: str = ""
    model: str = ""
    kind: str = ""


# --- the intake ---------------------------------------------------------------------------------------


@router.post("/start")
async def start(request: Request) -> Response:
    """Opens the intake, for one batch of the trainer. It sets a version of the weights: as under /v1/policies, only the
    policy's owner and admins may do that, and not while another holder has it paused."""
    app_state, jobs = app_state_of(request), _jobs(request)
    if jobs.has_engine:
        await app_state.own_policy(request, jobs.policy)
    if not await jobs.start(caller_of(request).name):
        return _refused(400, "Server is already running")
    return reply({"status": "Server started successfully"})


@router.post("/stop")
async def stop(request: Request) -> Response:
    """Closes the intake and cancels all jobs that have not ended, because the trainer's engines are about to sleep.
    Waiting /process calls return a result that reports it."""
    jobs = _jobs(request)
    if not await jobs.intake.end():
        return _not_running()
    await jobs.cancel_all()
    return reply({"status": "Server stopped successfully"})


@router.get("/status")
async def status(request: Request) -> Response:
    """Jobs by stage."""
    jobs = _jobs(request)
    if not jobs.intake.now.is_open:
        return _not_running()
    return reply({"status": "running", "pending_jobs": jobs.waiting, **jobs.counts()})


# --- jobs ---------------------------------------------------------------------------------------------


@router.post("/process")
async def process(request: Request) -> Response:
    """Runs one instance and returns its result. The same call again waits for the same rollout."""
    app_state, jobs = app_state_of(request), _jobs(request)
    body = await _read(request, ProcessBody)
    if not jobs.intake.now.is_open or app_state.pipeline.is_draining:
        return _not_running()
    if not jobs.has_engine:
        return _refused(503, "No LLM server addresses configured. Please add at least one LLM server address.")
    job = ProrlJob(body.instance, body.sampling_params, body.job_id, caller_of(request))
    try:
        rollout = await jobs.begin(job)
    except (UnknownEnvironment, TaskInvalid) as error:
        return _refused(400, f"Invalid dataset type or instance: {error.detail}")
    ended = await while_connected(request, jobs.ended(rollout, app_state.settings.prorl_timeout_s), app_state.closing)
    jobs.require_use(caller_of(request))  # the run may be another tenant's by now
    if ended is None:
        return _refused(503, f"the service is closing; the job is stored as rollout {id_of(rollout.id)}")
    if ended.state is not State.ENDED:
        return _refused(504, f"Processing timed out; the job continues as rollout {id_of(rollout.id)}: repeat the call")
    trajectory = await app_state.store.trajectory(ended.id)
    result = result_of(
        ended,
        body.instance,
        trajectory,
        git_patch=await jobs.patch_of(trajectory),
        with_all_input_ids=body.sampling_params.get("all_input_ids") is True,
    )
    return reply(result)


@router.post("/cancel")
async def cancel(request: Request) -> Response:
    """Cancels a job, even one that has not arrived yet. Calls that wait for it return a result that reports it."""
    jobs = _jobs(request)
    body = await _read(request, CancelBody)
    if not jobs.intake.now.is_open:
        return _not_running()
    await jobs.cancel(body.job_id, caller_of(request))
    return reply({"status": f"Cancel requested for job {body.job_id}"})


# --- engines ------------------------------------------------------------------------------------------


@router.post("/add_llm_server")
async def add_llm_server(request: Request) -> Response:
    """Adds an engine of the kind that it responds as: vLLM, SGLang, or ProRL Agent's own protocol."""
    require_admin(request)
    app_state = app_state_of(request)
    body = await _read(request, ServerBody)
    kind = body.kind
    if not kind:
        async with open_http() as http:
            kind = await kind_at(body.address, http)
    raw = {
        "id": f"{ENGINE_PREFIX}{engine_id(body.address)}"[:128],
        "url": body.address,
        "kind": str(kind),
        "policy": _jobs(request).policy,
        "model": body.model,
        "tokenizer": body.tokenizer or app_state.settings.prorl_tokenizer,
        # cannot be verified by that protocol: naming it in the settings means to trust it
        "trust_tokenizer": body.trust_tokenizer or bool(app_state.settings.prorl_tokenizer and not body.tokenizer),
        "renderer": body.renderer,
    }
    spec = check_body(raw, EngineBody).to_spec()
    check_reachable(spec, app_state.settings)
    try:
        await app_state.engines.add(spec)
    except EngineExists:
        return reply({"status": f"LLM server address {body.address} has already been added"})
    return reply({"status": f"Added LLM server address: {body.address}"})


@router.post("/clear_llm_server")
async def clear_llm_server(request: Request) -> Response:
    """Removes the engines that were added here, and starts a new period. Engines of the settings stay."""
    require_admin(request)
    app_state = app_state_of(request)
    await _jobs(request).intake.renew()
    added = [status.spec.id for status in app_state.router.list() if status.spec.id.startswith(ENGINE_PREFIX)]
    async with asyncio.TaskGroup() as group:
        for name in added:
            group.create_task(_remove(app_state, name))
    return reply({"status": "Cleared all LLM server addresses"})


async def _remove(app_state: AppState, name: str) -> None:
    with suppress(NotFound):  # removed by a concurrent call
        await app_state.engines.remove(name)


# --- what they share ----------------------------------------------------------------------------------


def _jobs(request: Request) -> ProrlJobs:
    """The jobs. If tokens are required, they belong to one tenant: the first that submitted one."""
    jobs: ProrlJobs = request.app.state.prorl
    jobs.require_use(caller_of(request))
    return jobs


def _refused(status: int, detail: str) -> Response:
    return reply({"detail": detail}, status)


def _not_running() -> Response:
    return _refused(503, "Server is not running. Please start the server first.")


async def _read(request: Request, model: type[BaseModel]) -> Any:
    """The body. Tables contain NaN for missing values, which is not JSON; it is read as null."""
    data = await request.body()
    raw = _decoded(data) if len(data) <= SMALL_BYTES else await asyncio.to_thread(_decoded, data)
    return check_body(raw, model)


def _decoded(data: bytes) -> object:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _lenient(data)


def _lenient(data: bytes) -> Mapping[str, Any]:
    try:
        raw = json.loads(data, parse_constant=lambda _: None)
        msgspec.json.encode(raw)  # raises for lone surrogates, which cannot be stored
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}" if data else "the body is empty") from error
    return raw
