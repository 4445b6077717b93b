"""One attempt at one rollout: from its INIT slot through READY, RUN and EVAL to its one end.

One task per live rollout; the pools decide when it goes on. Whatever happens (done, failed, cancelled, stalled,
server going down), it passes through `_settle`: sandbox proven gone first, then exactly one of end, requeue or,
in EVAL at shutdown, nothing (a restart evaluates again from what was saved).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from rollyard.core import (
    Blame,
    Deadline,
    DeadlineExpired,
    Ending,
    Failure,
    Json,
    LostAttempt,
    Mode,
    Outcome,
    Position,
    Rollout,
    RollyardError,
    Run,
    Score,
    State,
    Summary,
    Timings,
    Trajectory,
)
from rollyard.core.failure import (
    Cancelled,
    EvalDeadline,
    InternalError,
    NotFound,
    RunDeadline,
    SandboxEndedByPolicy,
    SandboxStuck,
)
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span, Tracer, end_rollout_span, rollout_span, stage_span
from rollyard.pipeline import retry, stages
from rollyard.pipeline.pool import Pool, Rank
from rollyard.pipeline.settings import PipelineSettings
from rollyard.pipeline.workshop import Workshop
from rollyard.sandbox.base import Sandbox
from rollyard.store.base import Stale, Store, StoreUnusable
from rollyard.tokens import verify

log = logging.getLogger("rollyard.pipeline")


class Shutdown(Exception):
    """The server goes down: give the work back, nobody is to blame."""


class Yard(Protocol):
    """What an attempt needs of the one who started it."""

    store: Store
    shop: Workshop
    settings: PipelineSettings
    init_pool: Pool
    run_pool: Pool
    eval_pool: Pool
    ready: int
    metrics: Metrics
    tracer: Tracer

    def publish(self, rollout: Rollout) -> None: ...

    def requeued(self, rollout: Rollout, delay_s: float) -> None: ...

    def wake(self) -> None: ...


@dataclass(slots=True)
class _Times:
    """When it entered each state."""

    marks: dict[str, float] = field(default_factory=dict[str, float])

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic()

    def between(self, start: str, end: str) -> float:
        begun, done = self.marks.get(start), self.marks.get(end)
        if begun is None:
            return 0.0
        return (done if done is not None else time.monotonic()) - begun


class Attempt:
    """See the module. `main` is the task's body; `stop` ends it from outside, with a reason."""

    def __init__(self, yard: Yard, rollout: Rollout, run: Run) -> None:
        self.yard = yard
        self.rollout = rollout
        self.run = run
        self.last_beat = time.monotonic()
        self.clock = Deadline()  # of the stage it is in
        self.quarantined = 0  # sandboxes of it that could not be proven gone
        self._kit: stages.Kit | None = None
        self._running = stages.Running()
        self._eval_sandbox: Sandbox | None = None
        self._trajectory: Trajectory | None = None
        self._stop: RollyardError | Shutdown | Stale | None = None
        self._task: asyncio.Task[None] | None = None
        self._times = _Times()
        self._summary = Summary(node=yard.settings.node)
        self._restored: Timings | None = None
        self._queued_s = max(0.0, time.time() - rollout.updated_at)
        self._is_settling = False
        self._closing: asyncio.Future[None] | None = None
        self._span: Span = NO_SPAN

    # --- from outside ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self.rollout.state

    @property
    def is_stopping(self) -> bool:
        return self._stop is not None

    def stop(self, reason: RollyardError | Shutdown | Stale) -> None:
        """Ends it as soon as it awaits; the first reason counts. It cleans up before it is done.

        What is already writing its end, ends that way.
        """
        if self._stop is None and not self._is_settling:
            self._stop = reason
            if self._task is not None:
                self._task.cancel()

    def beat(self) -> None:
        self.last_beat = time.monotonic()

    def tick(self, now: float, lease_s: float) -> float | None:
        """Renews what it holds; returns for how long nothing has moved in RUN, while its clock runs.

        INIT and EVAL run against a deadline of their own from end to end: what is slow there is theirs to name."""
        for sandbox in (self._kit.sandbox if self._kit else None, self._eval_sandbox):
            if sandbox is not None:
                sandbox.renew(lease_s)
        return now - self.last_beat if self.state is State.RUN and self.clock.is_running else None

    # --- the way through ------------------------------------------------------------------------------

    async def main(self) -> None:
        """Holds an INIT slot when it starts, unless it resumes in EVAL."""
        self._task = asyncio.current_task()
        self._span = rollout_span(self.yard.tracer, self.rollout)
        verdict: Ending | Failure | Shutdown | Stale
        try:
            verdict = await self._stages()
        except asyncio.CancelledError:
            if self._stop is None:
                await self._dispose()
                raise
            if self._task is not None and self._task.cancelling():
                self._task.uncancel()
            verdict = self._stopped(self._stop)
        except _Ended as ended:
            verdict = ended.failure
        except Stale as stale:
            verdict = stale
        except SandboxStuck as stuck:  # of INIT or EVAL, whatever had ended that
            self._quarantine(stuck)
            verdict = self._stopped(self._stop or stuck)
        except RollyardError as error:
            verdict = error.failure(self.state)
        except Exception as error:
            log.exception("attempt broke", extra={"rollout": self.rollout.id})
            verdict = InternalError(f"{type(error).__name__}: {error}").failure(self.state)
        self._is_settling = True
        await self._dispose()
        await self._settle(verdict)

    def _stopped(self, reason: RollyardError | Shutdown | Stale) -> Failure | Shutdown | Stale:
        return reason.failure(self.state) if isinstance(reason, RollyardError) else reason

    async def _stages(self) -> Ending:
        if self.state is not State.EVAL:
            await self._init()
            failure = await self._run()
            info: Mapping[str, Json] | None = None
        else:
            self._check_stop()
            failure, info = await self._restore()
        return await self._eval(failure, is_sandbox_gone=bool(info and info.get("is_sandbox_gone")))

    async def _init(self) -> None:
        yard = self.yard
        try:
            self._check_stop()
            self._times.mark("init")
            self._move(State.INIT)
            self.clock = Deadline(self.rollout.task.limits.init_s)
            with stage_span(self._span, "init"):
                self._kit = await stages.init(
                    yard.shop, self.rollout, self.clock, lease_s=yard.settings.lease_s, metrics=yard.metrics
                )
            self._times.mark("ready")
            self._move(State.READY)
            yard.ready += 1
        finally:
            yard.init_pool.release()
        sandbox = self._kit.sandbox
        if sandbox is not None:
            self._summary = replace(self._summary, limits_in_force=dict(sandbox.limits_in_force))

    async def _run(self) -> Failure | None:
        yard = self.yard
        assert self._kit is not None
        try:
            await yard.run_pool.acquire(self._rank)
        finally:
            yard.ready -= 1
            yard.wake()
        try:
            self._times.mark("run")
            self._move(State.RUN)
            self.clock = Deadline(self.rollout.task.limits.run_s)
            self.beat()
            with stage_span(self._span, "run", agent=yard.shop.agent_of(self.rollout.task).name) as span:
                watch = stages.Watch(self.beat, span, yard.metrics)
                ran = await stages.run(yard.shop, self.rollout, self.run, self._kit, self._running, self.clock, watch)
            self._trajectory = ran.trajectory
            self._summarize(ran.engine, ran.prompt_tokens)
            verify(ran.trajectory)
            failure = ran.failure
            if failure is not None and failure.blame is not Blame.POLICY:
                raise _Ended(failure)
            await self._save(ran)
            self._times.mark("eval_wait")
            return failure
        finally:
            try:
                await self._dispose()
            finally:
                yard.run_pool.release()

    async def _save(self, ran: stages.Ran) -> None:
        """run → eval: artifacts out of the sandbox, then one durable row that says all EVAL needs."""
        assert self._kit is not None
        plan = self._kit.plan
        trajectory = ran.trajectory
        if self._kit.sandbox is not None and not ran.is_sandbox_gone:
            try:
                artifacts = await self.yard.shop.artifacts.save(
                    self._kit.sandbox, plan.artifacts, self.rollout.id, self.rollout.attempt
                )
                trajectory = replace(trajectory, artifacts=tuple(artifacts))
            except SandboxEndedByPolicy as gone:
                ran = replace(ran, is_sandbox_gone=True, failure=ran.failure or gone.failure("run"))
        self._trajectory = trajectory
        info: dict[str, Json] = {
            "is_reevaluable": plan.is_reevaluable,
            "is_sandbox_gone": ran.is_sandbox_gone,
            "failure": msgspec.to_builtins(ran.failure),
            "summary": msgspec.to_builtins(self._summary),
            "timings": msgspec.to_builtins(self._timings()),
        }
        at = self.rollout.position
        saving = asyncio.ensure_future(self.yard.store.save_run(self.rollout.id, at, trajectory, info))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await saving  # once begun it is written; what we believe must be what is stored
            self._at(at.to(State.EVAL))
            raise
        self._at(at.to(State.EVAL))

    async def _restore(self) -> tuple[Failure | None, Mapping[str, Json]]:
        """An attempt that an earlier process brought as far as EVAL."""
        saved = await self.yard.store.saved_run(self.rollout.id)
        if saved is None:
            raise InternalError("this rollout is in EVAL, but what RUN left is not there")
        self._trajectory, info = saved
        self._summary = msgspec.convert(info["summary"], Summary)
        self._restored = msgspec.convert(info["timings"], Timings)
        self._times.mark("eval_wait")
        return msgspec.convert(info["failure"], Failure | None), info

    # --- scoring --------------------------------------------------------------------------------------

    async def _eval(self, failure: Failure | None, *, is_sandbox_gone: bool) -> Ending:
        yard = self.yard
        limits = self.rollout.task.limits
        plan = yard.shop.environment_of(self.rollout.task).plan(self.rollout.task)
        if is_sandbox_gone:
            return self._ending(plan.failing_score, failure or SandboxEndedByPolicy("").failure("run"))
        assert self._trajectory is not None
        broken, overruns = 0, 0  # apart: a host that failed once has not shown that the checks are slow
        while True:
            try:
                async with yard.eval_pool.slot(self._rank):
                    self._times.mark("eval")
                    self.clock = Deadline(limits.eval_s)
                    self.beat()
                    with stage_span(self._span, "eval"):
                        score = await stages.evaluate(
                            yard.shop,
                            self.rollout,
                            self._trajectory,
                            self.clock,
                            lease_s=yard.settings.lease_s,
                            watch=self._watch,
                            metrics=yard.metrics,
                        )
                    return self._ending(score, failure)
            except (DeadlineExpired, EvalDeadline, SandboxEndedByPolicy) as error:
                overruns += 1
                if overruns >= 2:
                    return self._failing(error, failure, plan.failing_score)
                self._note(f"EVAL was tried again: {_word(error)}")
            except RollyardError as error:
                broken += 1
                if not error.retryable or broken >= yard.settings.eval_attempts or self._stop is not None:
                    raise
                if isinstance(error, SandboxStuck):  # else `main` counts it
                    self._quarantine(error)
                self._note(f"EVAL was tried again: {error.code}")
                await asyncio.sleep(retry.Backoff(first_s=0.2).delay_s(broken))
            finally:
                self._eval_sandbox = None

    def _failing(self, error: Exception, failure: Failure | None, score: Score) -> Ending:
        """Twice too slow, or twice the end of its sandbox: what was judged did that, not the judge."""
        if isinstance(error, SandboxEndedByPolicy):
            found = error.failure("eval")
        else:
            detail = f"EVAL was not done in {self.clock.budget_s:g} s, twice, each time in a fresh sandbox"
            found = EvalDeadline(detail).failure("eval")
        if failure is not None:
            self._note(f"RUN had ended with {failure.code}")
            if not self._may_train(failure):
                found = replace(found, trainable=False)
        return self._ending(score, found)

    def _watch(self, sandbox: Sandbox) -> None:
        self._eval_sandbox = sandbox

    def _ending(self, score: Score, failure: Failure | None) -> Ending:
        if failure is not None and not (self._trajectory and self._trajectory.turns):
            failure = failure.without_model_call()
        if failure is not None and failure.blame is not Blame.POLICY:
            return Ending(Outcome.FAILED, None, failure, False, self._summary, self._timings())
        may_train = failure is None or self._may_train(failure)
        traces = self._trajectory.traces if self._trajectory else ()
        is_trainable = self.run.mode is Mode.TRAIN and may_train and any(trace.is_trainable for trace in traces)
        outcome = failure.outcome if failure else Outcome.COMPLETED
        if failure is not None:
            failure = replace(failure, trainable=is_trainable)
        return Ending(outcome, score, failure, is_trainable, self._summary, self._timings())

    def _may_train(self, failure: Failure) -> bool:
        return failure.trainable or (failure.code == RunDeadline.code and self.run.trainable_on_deadline)

    # --- the end --------------------------------------------------------------------------------------

    async def _dispose(self) -> None:
        """Everything it holds is gone after this, or reported as stuck. A cancel cannot cut it short."""
        if self._kit is not None and self._closing is None:
            self._closing = asyncio.ensure_future(self._close(self._kit))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, kit: stages.Kit) -> None:
        try:
            await kit.close()
        except SandboxStuck as stuck:
            self._quarantine(stuck)
        except Exception as error:  # then nothing is proven, and the rollout still has to end
            log.exception("clean-up broke", extra={"rollout": self.rollout.id})
            self._quarantine(SandboxStuck(f"its clean-up broke: {type(error).__name__}: {error}"))

    def _quarantine(self, stuck: SandboxStuck) -> None:
        self.quarantined += 1
        self._note(stuck.detail)
        log.error("sandbox stuck", extra={"rollout": self.rollout.id, "detail": stuck.detail})

    async def _settle(self, verdict: Ending | Failure | Shutdown | Stale) -> None:
        """Exactly one of: end, requeue, leave for the next process."""
        try:
            if isinstance(verdict, Ending):
                await self._end(verdict)
            elif isinstance(verdict, Failure):
                await self._failed(verdict)
            elif isinstance(verdict, Shutdown) and self.state in (State.INIT, State.READY, State.RUN):
                lost = self._lost("drained", "the service was stopped")
                await self._requeue(lost, delay_s=0.0, is_excused=True)
            elif isinstance(verdict, Shutdown) and self.state is State.EVAL:
                await self.yard.store.excuse_eval(self.rollout.id, self.rollout.position)
            elif isinstance(verdict, Stale):
                await self._overtaken()
        except Stale:
            await self._overtaken()
        except StoreUnusable:
            raise  # nothing can be written any more: the service ends with it
        except Exception as error:  # what this rollout left cannot be written: its own end, not everybody's
            log.exception("the end cannot be stored", extra={"rollout": self.rollout.id})
            self._trajectory, self._summary = None, Summary(node=self.yard.settings.node)
            broken = InternalError(f"what this rollout left cannot be stored ({type(error).__name__})")
            ending = Ending(Outcome.FAILED, None, broken.failure(self.state), False, self._summary, self._timings())
            with suppress(Stale):
                await self._end(ending)

    async def _overtaken(self) -> None:
        """Somebody else moved the row: a cancel that ended it while it was being admitted. Then we tell it."""
        log.info("attempt was overtaken", extra={"rollout": self.rollout.id, "state": self.state})
        with suppress(NotFound):
            found = await self.yard.store.get(self.rollout.id)
            if found.state is State.ENDED:
                self.yard.publish(found)

    async def _failed(self, failure: Failure) -> None:
        if failure.code == Cancelled.code:
            await self._end(Ending(Outcome.CANCELLED, None, failure, False, self._summary, self._timings()))
            return
        rollout = self.rollout
        delay_s = retry.delay_s(failure, rollout.attempt, rollout.excused, self.yard.settings.max_attempts)
        if delay_s is None or self.state in (State.QUEUED, State.EVAL):  # EVAL has had its own tries
            await self._end(Ending(Outcome.FAILED, None, failure, False, self._summary, self._timings()))
        else:
            await self._requeue(self._lost(failure.code, failure.detail), delay_s=delay_s)

    async def _end(self, ending: Ending) -> None:
        ended = await self.yard.store.end(self.rollout.id, self.rollout.position, ending, self._trajectory)
        self.rollout = ended
        end_rollout_span(self._span, ending)
        self.yard.publish(ended)

    async def _requeue(self, lost: LostAttempt, *, delay_s: float, is_excused: bool = False) -> None:
        at = self.rollout.position
        await self.yard.store.requeue(self.rollout.id, at, lost, is_excused=is_excused)
        if await self._is_cancelled_now():
            return
        rollout = replace(
            self.rollout,
            position=at.to(State.QUEUED),
            lost=(*self.rollout.lost, lost),
            excused=self.rollout.excused + is_excused,
        )
        self.rollout = rollout
        self._span.fail(lost.code)
        self._span.end()
        self.yard.publish(rollout)
        self.yard.requeued(rollout, delay_s)

    async def _is_cancelled_now(self) -> bool:
        """A cancel that was asked for while this attempt was being given back: no other one may begin."""
        found = await self.yard.store.get(self.rollout.id)
        if found.is_cancel_requested and found.state is State.QUEUED:
            found = await self.yard.store.request_cancel(found.id, "cancelled by the client") or found
        if found.state is not State.ENDED:
            return False
        self._span.end()
        self.yard.publish(found)
        return True

    def _lost(self, code: str, detail: str) -> LostAttempt:
        sampled = self._trajectory.sampled_tokens if self._trajectory else self._running.sampled_tokens
        return LostAttempt(self.rollout.attempt, code, detail, self.state, sampled, self._summary.engine)

    # --- small things ---------------------------------------------------------------------------------

    def _check_stop(self) -> None:
        if self._stop is not None:  # stopped before its first step: nobody could cancel the task yet
            raise asyncio.CancelledError

    @property
    def _rank(self) -> Rank:
        return (-self.rollout.priority, self.rollout.seq)

    def _move(self, state: State) -> None:
        """Written in order, not waited for; if the store says it is not ours any more, we stop."""
        at = self.rollout.position
        to = at.to(state)
        self.yard.store.move(self.rollout.id, at, to).add_done_callback(self._moved)
        self._at(to)

    def _moved(self, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self.stop(error if isinstance(error, Stale) else Stale(str(error)))

    def _at(self, position: Position) -> None:
        self.rollout = replace(self.rollout, position=position)
        self.beat()
        self.yard.publish(self.rollout)

    def _note(self, text: str) -> None:
        self._summary = replace(self._summary, notes=(*self._summary.notes, text))

    def _summarize(self, engine: str, prompt_tokens: int) -> None:
        trajectory = self._trajectory
        assert trajectory is not None
        forks = tuple(f"forked: {trace.fork_reason}" for trace in trajectory.traces if trace.fork_reason)
        self._summary = replace(
            self._summary,
            turns=trajectory.turns,
            sampled_tokens=trajectory.sampled_tokens,
            prompt_tokens=prompt_tokens,
            traces=len(trajectory.traces),
            ended_by=trajectory.ended_by,
            engine=engine,
            notes=(*self._summary.notes, *forks),
        )

    def _timings(self) -> Timings:
        times, before = self._times, self._restored
        info = self._running.info
        if before is not None:
            return replace(
                before, eval_wait_s=times.between("eval_wait", "eval"), eval_s=times.between("eval", "ended")
            )
        return Timings(
            queued_s=self._queued_s,
            init_s=times.between("init", "ready"),
            ready_s=times.between("ready", "run"),
            run_s=times.between("run", "eval_wait"),
            model_s=_number(info.get("model_s")),
            tool_s=_number(info.get("tool_s")),
            eval_wait_s=times.between("eval_wait", "eval"),
            eval_s=times.between("eval", "ended"),
        )


class _Ended(Exception):
    """Carries a failure that RUN returned out of the stages."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def _word(error: Exception) -> str:
    return error.code if isinstance(error, RollyardError) else "its deadline fired"


def _number(value: Json) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
