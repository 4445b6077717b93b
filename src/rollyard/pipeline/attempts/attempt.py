"""One attempt of one rollout: from its INIT slot through READY, RUN and EVAL to its end.

Each live rollout is one asyncio task; the pools decide when it continues. However an attempt ends (done, failed,
cancelled, stalled, service shutdown), it leaves through the last lines of `main`: first the sandbox is proven gone,
then `Settlement` writes the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from rollyard.core import (
    Blame,
    Deadline,
    DeadlineExpired,
    Ending,
    Failure,
    Json,
    Position,
    Rollout,
    RollyardError,
    Run,
    Score,
    State,
    Summary,
    Timings,
)
from rollyard.core.failure import (
    EvalDeadline,
    InternalError,
    PolicyFailure,
    SandboxEndedByPolicy,
    SandboxLost,
    SandboxStuck,
)
from rollyard.core.semaphore import Rank
from rollyard.engines.pool.seats import Seat
from rollyard.envs.findings import Findings
from rollyard.observe.spans import rollout_span, stage_span
from rollyard.pipeline import retry
from rollyard.pipeline.attempts.evaluation import CheckKilled
from rollyard.pipeline.attempts.progress import AttemptProgress
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.pipeline.attempts.sandbox_start import ENDS
from rollyard.pipeline.attempts.settlement import Settlement
from rollyard.pipeline.attempts.stages import RunObserver, RunResult, Workspace
from rollyard.pipeline.base import AttemptHost, MessagePage, Shutdown, Snapshot, Verdict
from rollyard.pipeline.message_page import page_of
from rollyard.store.base import Stale
from rollyard.tokens import verify

log = logging.getLogger("rollyard.pipeline")

MOST_OVERRUNS = 2
"""Tries of an EVAL that exceeds its deadline, loses its sandbox or has a command killed. After that, what is evaluated
is taken to be the cause, not the verifier or the host."""

OVERRUNS = (DeadlineExpired, EvalDeadline, *ENDS.values())


class Attempt:
    """Takes one rollout through the stages. `main` is the task's body; `stop` ends it from outside, with a reason."""

    def __init__(self, pipeline: AttemptHost, rollout: Rollout, run: Run, order: int, queued_s: float = 0.0) -> None:
        self.pipeline = pipeline
        self._order = order  # of admission
        self.last_beat = pipeline.clock()
        self.clock = Deadline()  # of the current stage
        self.quarantined = 0  # its sandboxes that could not be proven gone
        self.is_seated = rollout.state is State.EVAL  # has a seat or needs none
        self._runner = StageRunner(
            pipeline.resources, rollout, run, lease_s=pipeline.settings.lease_s, metrics=pipeline.metrics
        )
        self._seat: Seat | None = None  # at its policy's engines, from just before RUN to its end
        self._progress = AttemptProgress(
            rollout,
            run,
            Summary(node=pipeline.settings.node),
            queued_s=queued_s,
            running=self._runner.state,
            ledger=self._runner.ledger,
        )
        self._stop: RollyardError | Shutdown | Stale | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_settling = False
        self._closing: asyncio.Future[None] | None = None

    # --- called from outside --------------------------------------------------------------------------

    @property
    def rollout(self) -> Rollout:
        return self._progress.rollout

    @property
    def run(self) -> Run:
        return self._progress.run

    @property
    def state(self) -> State:
        return self._progress.state

    def stop(self, reason: RollyardError | Shutdown | Stale) -> None:
        """Ends the attempt at its next await, after clean-up. The first reason counts.

        Has no effect once the attempt is writing its end.
        """
        if self._stop is None and not self._is_settling:
            self._stop = reason
            if self._task is not None:
                self._task.cancel()

    def beat(self) -> None:
        self.last_beat = self.pipeline.clock()

    def tick(self, now: float) -> float | None:
        """Renews the sandbox leases. Returns the seconds without progress in RUN while its clock runs, else None.

        `now` is the pipeline's clock. INIT and EVAL need no stall check: the deadline of each covers the whole stage.
        """
        self._runner.renew()
        if not self.clock.is_running:
            self.last_beat = now  # Rollyard stopped the clock (a paused policy, for example): not a stall
        return now - self.last_beat if self.state is State.RUN and self.clock.is_running else None

    async def page(self, after: int) -> MessagePage:
        return page_of(self._snapshot(), after, is_live=True)

    def _snapshot(self) -> Snapshot:
        progress, running = self._progress, self._progress.running
        attempt = self.rollout.attempt
        if (done := progress.trajectory) is not None:
            return Snapshot.of(done, running.conversation_number)
        if running.conversation is None:
            return Snapshot(attempt)
        return Snapshot(
            attempt,
            running.conversation.messages,
            running.turns,
            running.sampled_tokens,
            running.conversation_number,
            running.message_turns,
        )

    def timings(self) -> Timings:
        return self._progress.timings()

    async def calls(self) -> Mapping[str, Json]:
        progress = self._progress
        if progress.trajectory is not None:
            return progress.trajectory.info
        return progress.running.call_log.info(is_over=False) if progress.running.call_log is not None else {}

    async def requests(self) -> bytes:
        progress = self._progress
        return progress.trajectory.requests if progress.trajectory is not None else progress.running.requests

    # --- stages ---------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Runs the attempt. It holds an INIT slot when it starts, unless it resumes in EVAL."""
        self._task = asyncio.current_task()
        self._progress.span = rollout_span(self.pipeline.tracer, self.rollout)
        verdict: Verdict
        try:
            verdict = await self._stages()
        except asyncio.CancelledError:
            if self._stop is None:
                await self._dispose()
                self._forget()
                raise
            if self._task is not None and self._task.cancelling():
                self._task.uncancel()
            verdict = self._stopped(self._stop)
        except _Ended as ended:
            verdict = ended.failure
        except Stale as stale:
            verdict = stale
        except SandboxStuck as stuck:  # from INIT or EVAL; if the attempt was stopped, that reason counts
            self._quarantine(stuck)
            verdict = self._stopped(self._stop or stuck)
        except RollyardError as error:
            verdict = error.failure(self.state)
        except Exception as error:
            log.exception("attempt raised an unexpected error", extra={"rollout": self.rollout.id})
            verdict = InternalError(f"{type(error).__name__}: {error}").failure(self.state)
        self._is_settling = True
        await self._dispose()
        self._forget()
        self.pipeline.metrics.egress_used(
            self._progress.ledger.verdicts, self._progress.ledger.sent_bytes, self._progress.ledger.received_bytes
        )
        await Settlement(self.pipeline, self._progress).settle(verdict)

    def _stopped(self, reason: RollyardError | Shutdown | Stale) -> Failure | Shutdown | Stale:
        return reason.failure(self.state) if isinstance(reason, RollyardError) else reason

    def _check_stop(self) -> None:
        if self._stop is not None:  # stopped before its first step: there was no task to cancel
            raise asyncio.CancelledError

    async def _stages(self) -> Ending:
        if self.state is State.EVAL:
            self._check_stop()
            failure, is_sandbox_gone = await self._restore()
        else:
            await self._init()
            failure, is_sandbox_gone = await self._run()
        return await self._eval(failure, is_sandbox_gone=is_sandbox_gone)

    async def _init(self) -> None:
        pipeline, progress = self.pipeline, self._progress
        try:
            self._check_stop()
            progress.mark("init")
            self._move(State.INIT)
            self.clock = Deadline(self.rollout.task.limits.init_s, pipeline.clock)
            with stage_span(progress.span, "init"):
                workspace = await self._runner.init(self.clock)
            progress.mark("ready")
            self._move(State.READY)
            pipeline.ready += 1
        except SandboxEndedByPolicy as error:  # the policy has not sampled anything yet
            raise SandboxLost(f"the sandbox ended before the agent started: {error.detail}") from error
        finally:
            pipeline.init_pool.release()
        sandbox, lease = workspace.sandbox, workspace.lease
        if sandbox is not None:
            progress.summary = replace(progress.summary, limits_in_force=dict(sandbox.limits_in_force))
        if lease is not None:
            progress.summary = replace(progress.summary, layer="found" if lease.is_found else "made")
            progress.prepare_s = lease.made_s or 0.0

    async def _run(self) -> tuple[Failure | None, bool]:
        """Executes RUN. Returns its failure, if any, and whether the policy ended its own sandbox."""
        pipeline, progress = self.pipeline, self._progress
        try:
            await self._take_seat()  # before the slot: a policy that is full must not hold RUN slots of others
            await pipeline.run_pool.acquire(self._rank)
        except BaseException:
            self._leave_seat()
            raise
        finally:
            pipeline.ready -= 1
            pipeline.wake()
        try:
            progress.mark("run")
            self._move(State.RUN)
            self.clock = Deadline(self.rollout.task.limits.run_s, pipeline.clock)
            self.beat()
            with stage_span(progress.span, "run", agent=self._runner.resolved.agent.name) as span:
                ran = await self._runner.run(self.clock, RunObserver(self.beat, span, pipeline.metrics))
            progress.ran(ran)
            pipeline.metrics.run_ended(ran.trajectory)
            verify(ran.trajectory)
            if ran.failure is not None and ran.failure.blame is not Blame.POLICY:
                raise _Ended(ran.failure)
            ran = await self._save(ran)
            progress.mark("eval_wait")
            return ran.failure, ran.is_sandbox_gone
        finally:
            try:
                await self._dispose()
            finally:
                self._leave_seat()
                pipeline.run_pool.release()

    async def _take_seat(self) -> None:
        """Acquires a seat at the policy if the agent needs a model. Until then it is READY and no clock runs."""
        pipeline = self.pipeline
        if self._runner.resolved.agent.needs_model:
            seats = pipeline.resources.router.seats(self.run.policy)
            self._seat = seats.try_acquire()
            if self._seat is None:
                pipeline.unseated += 1
                pipeline.wake()
                try:
                    self._seat = await seats.acquire(self._rank)
                finally:
                    pipeline.unseated -= 1
        self.is_seated = True
        pipeline.seated(self.run.policy)

    def _leave_seat(self) -> None:
        if self._seat is not None:
            self._seat.close()

    async def _save(self, ran: RunResult) -> RunResult:
        """Moves from RUN to EVAL: saves the artifacts, then writes one durable row with everything that EVAL needs."""
        progress, rollout, plan = self._progress, self.rollout, self._runner.resolved.plan
        try:
            ran = await self._runner.collect(ran)
        except SandboxStuck as stuck:
            raise SandboxLost(stuck.detail) from stuck  # the clean-up that follows counts it as stuck
        progress.trajectory = ran.trajectory
        progress.is_reevaluable = plan.is_reevaluable and plan.eval_mode == "fresh"
        info: dict[str, Json] = {
            "is_reevaluable": progress.is_reevaluable,
            "eval_mode": plan.eval_mode,
            "is_sandbox_gone": ran.is_sandbox_gone,
            "failure": msgspec.to_builtins(ran.failure),
            "summary": msgspec.to_builtins(progress.with_egress(progress.summary)),
            "timings": msgspec.to_builtins(progress.timings()),
        }
        at = rollout.position
        saving = asyncio.ensure_future(self.pipeline.store.save_run(rollout.id, at, ran.trajectory, info))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await saving  # a started write completes; the state here must match the store
            self._at(at.to(State.EVAL))
            raise
        self._at(at.to(State.EVAL))
        return ran

    async def _restore(self) -> tuple[Failure | None, bool]:
        """Loads an attempt that an earlier process brought as far as EVAL."""
        progress = self._progress
        saved = await self.pipeline.store.saved_run(self.rollout.id)
        if saved is None:
            raise InternalError("the rollout is in EVAL, but RUN's saved result is missing")
        progress.trajectory, info = saved
        progress.summary = msgspec.convert(info["summary"], Summary)
        progress.before = msgspec.convert(info["timings"], Timings)
        progress.mark("eval_wait")
        return msgspec.convert(info["failure"], Failure | None), bool(info.get("is_sandbox_gone"))

    # --- scoring --------------------------------------------------------------------------------------

    async def _eval(self, failure: Failure | None, *, is_sandbox_gone: bool) -> Ending:
        pipeline, progress = self.pipeline, self._progress
        failing_score = self._runner.resolved.plan.failing_score
        if is_sandbox_gone:
            return progress.scored(failing_score, failure)
        broken, overruns = 0, 0  # separate: a host failure does not show that the checks are slow
        while True:
            try:
                return progress.scored(await self._score(is_last=overruns + 1 >= MOST_OVERRUNS), failure)
            except OVERRUNS as error:
                overruns += 1
                if overruns >= MOST_OVERRUNS:
                    return progress.scored(failing_score, self._eval_failure(error, failure))
                progress.note(f"EVAL was tried again: {getattr(error, 'code', 'its deadline fired')}")
            except CheckKilled as killed:
                overruns += 1
                progress.note(f"EVAL was tried again: {killed}")
            except RollyardError as error:
                broken += 1
                if not error.retryable or broken >= pipeline.settings.eval_attempts or self._stop is not None:
                    raise
                if isinstance(error, SandboxStuck):  # else `main` counts it
                    self._quarantine(error)
                progress.note(f"EVAL was tried again: {error.code}")
                again_s = error.data.get("retry_after_s")  # from a breaker
                least_s = again_s * random.uniform(1.0, 1.25) if isinstance(again_s, int | float) else 0.0
                await asyncio.sleep(max(least_s, retry.Backoff(first_s=0.2).delay_s(broken)))

    async def _score(self, *, is_last: bool) -> Score:
        """Runs EVAL once, in a slot of EVAL's pool."""
        pipeline, progress = self.pipeline, self._progress
        assert progress.trajectory is not None
        async with pipeline.eval_pool.slot(self._rank):
            progress.mark("eval")
            self.clock = Deadline(self.rollout.task.limits.eval_s, pipeline.clock)
            self.beat()
            progress.findings = Findings()
            with stage_span(progress.span, "eval"):
                return await self._runner.evaluate(
                    progress.trajectory, self.clock, is_last=is_last, findings=progress.findings
                )

    def _eval_failure(self, error: Exception, failure: Failure | None) -> Failure:
        """Returns the failure of an EVAL that exceeded its deadline, or ended its sandbox, in every try."""
        if isinstance(error, PolicyFailure) and not isinstance(error, EvalDeadline):
            eval_failure = error.failure("eval")
        else:
            detail = f"EVAL was not done in {self.clock.budget_s:g} s, twice, each time in a fresh sandbox"
            eval_failure = EvalDeadline(detail).failure("eval")
        if failure is not None:
            self._progress.note(f"RUN had ended with {failure.code}")
            if not self._progress.may_train(failure):
                eval_failure = replace(eval_failure, trainable=False)
        return eval_failure

    # --- cleaning up ----------------------------------------------------------------------------------

    async def _dispose(self) -> None:
        """Closes everything the attempt holds, or reports it as stuck. A cancel does not interrupt it."""
        if self._runner.workspace is not None and self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._runner.workspace))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def _forget(self) -> None:
        """Releases the shared layer and deletes RUN's files. Call it once no sandbox uses them."""
        self._runner.forget()

    async def _close(self, workspace: Workspace) -> None:
        try:
            await workspace.close()
        except SandboxStuck as stuck:
            self._quarantine(stuck)
        except Exception as error:  # most likely from a tool; the rollout still has to end
            log.exception("clean-up failed", extra={"rollout": self.rollout.id})
            detail = f"clean-up failed: {type(error).__name__}: {error}"
            if workspace.sandbox is not None and workspace.sandbox.end is None:
                self._quarantine(SandboxStuck(detail))
            else:
                self._progress.note(detail)

    def _quarantine(self, stuck: SandboxStuck) -> None:
        self.quarantined += 1
        self._progress.note(stuck.detail)
        log.error("sandbox stuck", extra={"rollout": self.rollout.id, "detail": stuck.detail})

    # --- moving ---------------------------------------------------------------------------------------

    @property
    def _rank(self) -> Rank:
        return (-self.rollout.priority, self._order)

    def _move(self, state: State) -> None:
        """Writes the move in order, without waiting. Stops the attempt if the store reports another owner."""
        at = self.rollout.position
        to = at.to(state)
        self.pipeline.store.move(self.rollout.id, at, to).add_done_callback(self._moved)
        self._at(to)

    def _moved(self, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self.stop(error if isinstance(error, Stale) else Stale(str(error)))

    def _at(self, position: Position) -> None:
        self._progress.rollout = replace(self.rollout, position=position)
        self.beat()
        self.pipeline.publish(self.rollout)


class _Ended(Exception):
    """Carries a failure that RUN returned out of `_stages`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure
