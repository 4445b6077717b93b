"""Jobs as rollouts of the run `prorl`: finds or creates the rollout of a call, and waits for its end.

A job with a `job_id` is always the rollout of that id. ProRL Agent's trainer sends none with plain batches: then a job
is identified by its content and the period (`intake.py`), so that a repeated call (after a timeout or a restart of the
service) waits for the same rollout. Two calls are one job only if they have a `trajectory_id`: without it, a sibling
cannot be distinguished from a repetition, and each call is a new job. If the rollout of a job without a `job_id` was
lost to infrastructure, the next call starts a new one, because that is why the trainer repeats it.

A `/start` follows a change of weights, so it sets the policy's next version: every token has a version, and prefixes of
the old weights in an engine's cache are not used again.

Invariants. The rollout is durable before a call waits for it. A client that disconnects while waiting, or waits too
long (504), does not affect it. A wait ends at once when the rollout is cancelled, and when the service closes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

import msgspec

from rollyard.core import Json, Rollout, RollyardError, Run, State, Trajectory, check_id, key_of, new_id
from rollyard.core.access import Access
from rollyard.core.engine import Role
from rollyard.core.failure import ArtifactLost, Blame, Forbidden, MalformedId, NotFound, PolicyConflict
from rollyard.service.app_state import AppState
from rollyard.service.prorl.handlers import Choices, task_body
from rollyard.service.prorl.intake import FILE, IntakeFile
from rollyard.service.prorl.sampling import task_fields_of
from rollyard.service.schemas.task import merge, to_task
from rollyard.service.security.access import OPERATOR, Caller, require_new_run
from rollyard.store.base import Submission

log = logging.getLogger("rollyard.service")

RUN = "prorl"
PREFIX = f"{RUN}."  # of rollouts' ids
PATCH = "patch"  # the artifact of `swe`
STOPPED = "the intake was stopped"
AGAIN_S = 0.05  # between two looks for rollouts that have not ended
STOP_S = 20.0  # for sandboxes to end; the trainer waits 30 s for a /stop


@dataclass(frozen=True, slots=True)
class ProrlJob:
    instance: Mapping[str, Json]
    sampling_params: Mapping[str, Json]
    job_id: str | None = None
    caller: Caller = OPERATOR  # its run's owner, if this job creates it

    @property
    def identity(self) -> dict[str, Json]:
        return {RUN: {"instance": self.instance, "sampling_params": self.sampling_params}}


def rollout_id(job_id: str) -> str:
    """The key of a job with a `job_id`. An id that is not valid in Rollyard is hashed."""
    try:
        name = check_id(PREFIX + check_id(job_id))
    except MalformedId:
        name = f"{PREFIX}sha-{hashlib.sha256(job_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
    return key_of(RUN, name)


class ProrlJobs:
    """The jobs and the intake of this service."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self.intake = IntakeFile(app_state.settings.data_dir / FILE)
        self.waiting = 0  # calls that wait for a rollout's end
        self._stops = 0
        self._choices = Choices(app_state.settings.prorl_images, tuple(app_state.settings.mcp_servers))

    async def start(self, holder: str) -> bool:
        """Sets a new version of the weights and opens the intake. Returns False if it was open. Raises
        `PolicyConflict`, and opens nothing, while another than `holder` updates the weights."""
        await self._name_version(holder)
        return await self.intake.begin()

    async def _name_version(self, holder: str) -> None:
        """Sets the next version on the policy's engines. A later version that was set through /v1/policies is left
        unchanged."""
        router, policy, version = self._app_state.router, self.policy, self.intake.now.version
        if not self.has_engine or router.version(policy) > version:
            return
        await self.intake.name_version(version + 1)
        try:
            await router.policies.resume(policy, version + 1, holder=holder)
        except PolicyConflict:
            raise
        except RollyardError as error:  # the engines are quarantined and report why; the next /start retries
            log.warning("a new weight version could not be set", extra={"policy": policy, "detail": error.detail})

    @property
    def policy(self) -> str:
        run = self._app_state.pipeline.run_of(RUN)
        return run.policy if run else "default"

    @property
    def has_engine(self) -> bool:
        specs = [status.spec for status in self._app_state.router.list()]
        return any(spec.role is Role.POLICY and spec.policy == self.policy for spec in specs)

    async def begin(self, job: ProrlJob) -> Rollout:
        """The job's rollout, which is stored when this returns."""
        stops = self._stops
        rollout = await self._begin(job)
        if stops != self._stops:  # it was stored while `cancel_all` was running
            await self._app_state.pipeline.cancel(rollout.id, STOPPED)
        return rollout

    async def _begin(self, job: ProrlJob) -> Rollout:
        if job.job_id is not None:
            return await self._submit(job, rollout_id(job.job_id))
        if job.instance.get("trajectory_id") is None:
            return await self._submit(job, key_of(RUN, new_id(RUN)))
        digest = hashlib.sha256(msgspec.json.encode(job.identity, order="deterministic")).hexdigest()[:24]
        name = key_of(RUN, f"{PREFIX}p{self.intake.now.period}-{digest}")
        for number in count(1):  # ends after at most as many steps as there were calls before
            again = name if number == 1 else f"{name}.{number}"
            try:
                rollout = await self._app_state.store.get(again)
            except NotFound:
                return await self._submit(job, again)
            failure = rollout.ending.failure if rollout.ending else None
            if failure is None or failure.blame is not Blame.INFRA:
                return rollout
        raise AssertionError("count never ends")

    async def ended(self, rollout: Rollout, within_s: float) -> Rollout:
        self.waiting += 1
        try:
            return await self._app_state.pipeline.wait(rollout.id, within_s)
        finally:
            self.waiting -= 1

    async def cancel(self, job_id: str, caller: Caller) -> None:
        run = await self._run(caller)  # the cancel of a job that has not arrived is kept in its run
        await self._app_state.pipeline.cancel(rollout_id(job_id), run=run.id)

    async def cancel_all(self) -> None:
        """Cancels all rollouts that have not ended, and waits up to `STOP_S` for them: then weights may change."""
        self._stops += 1
        newest = (await self._app_state.store.list(runs=[RUN], limit=1, is_newest_first=True)).rollouts
        cancelled, quiet_passes, until = set[tuple[str, int]](), 0, time.monotonic() + STOP_S
        while newest and quiet_passes < 2:  # one pass may miss a rollout that returns to the queue meanwhile
            remaining = await self._cancel_up_to(newest[0].seq, cancelled)  # never interrupted: each end is published
            quiet_passes = 0 if remaining else quiet_passes + 1
            if time.monotonic() >= until:
                return
            await asyncio.sleep(AGAIN_S)

    async def _cancel_up_to(self, seq: int, cancelled: set[tuple[str, int]]) -> int:
        """Cancels those up to that number that have not ended, each attempt once, and returns how many they are."""
        store, remaining = self._app_state.store, 0
        for state in State:
            if state is State.ENDED:
                continue
            after: str | None = None
            while True:
                page = await store.list(state=state, runs=[RUN], after=after, limit=1000)
                for rollout in page.rollouts:
                    attempt = (rollout.id, rollout.attempt)
                    remaining += rollout.seq <= seq
                    if rollout.seq <= seq and attempt not in cancelled:
                        cancelled.add(attempt)
                        await self._app_state.pipeline.cancel(rollout.id, STOPPED)
                after = page.next_cursor
                if after is None or not page.rollouts:
                    break
        return remaining

    def counts(self) -> dict[str, int]:
        """ProRL Agent's counters, for this run only."""
        pipeline = self._app_state.pipeline
        states = [attempt.state for attempt in pipeline.live.values() if attempt.run.id == RUN]
        evals = states.count(State.EVAL)
        eval_queue = min(evals, pipeline.eval_pool.waiting)
        counts = {
            "init_queue": pipeline.queued_of(RUN),
            "run_queue": states.count(State.READY),
            "eval_queue": eval_queue,
            "active_init": states.count(State.INIT),
            "active_run": states.count(State.RUN),
            "active_eval": evals - eval_queue,
        }
        return {**counts, "total": sum(counts.values())}

    async def patch_of(self, trajectory: Trajectory | None) -> str | None:
        """The agent's patch, if the task has one."""
        artifact = next((it for it in trajectory.artifacts if it.name == PATCH), None) if trajectory else None
        if trajectory is None or artifact is None or artifact.kind != "file":
            return None
        try:
            path = await self._app_state.resources.artifacts.load(artifact, trajectory.rollout_id, trajectory.attempt)
            return (await asyncio.to_thread(path.read_bytes)).decode("utf-8", "replace")
        except (ArtifactLost, OSError):
            return None  # it was deleted; the score is still valid

    async def _submit(self, job: ProrlJob, name: str) -> Rollout:
        app_state = self._app_state
        run = await self._run(job.caller)
        body = merge(task_body(job.instance, app_state.resources.environments, self._choices), run.defaults)
        sent = merge(body, task_fields_of(job.sampling_params))
        task = to_task(sent, app_state.resources.ceilings.defaults, ("instance",))
        app_state.resources.check(task, run)
        rollout = Rollout(id=name, run=run.id, task=task, priority=run.priority)
        with app_state.pipeline.creating_in(run):
            (stored,) = await app_state.pipeline.submit([Submission(rollout, job.identity)])
        return stored

    async def _run(self, caller: Caller) -> Run:
        """The run, created on first use. The operator may create it before, with defaults."""
        app_state = self._app_state
        run = app_state.pipeline.run_of(RUN)
        if run is None:
            self.require_use(caller)
            owner = "" if caller.is_admin else caller.name
            with app_state.quotas.new_run(caller, RUN):
                run = await app_state.store.put_run(Run(RUN, created_at=time.time(), owner=owner), {})
                app_state.pipeline.register_run(run)
        self.require_use(caller)  # another caller may have created it meanwhile
        return run

    def require_use(self, caller: Caller) -> None:
        """Raises `Forbidden` unless the caller may submit jobs, or create the run if it does not exist yet."""
        run = self._app_state.pipeline.run_of(RUN)
        if run is None:
            if caller.access not in (Access.ADMIN, Access.TRAINER):
                raise Forbidden(f"the run {RUN!r} does not exist, and a {caller.access} token cannot create runs")
            require_new_run(caller, RUN, self.policy, self._app_state.tokens.callers)
        elif not caller.writes(run):
            raise Forbidden(f"the run {RUN!r} was created with another token")
