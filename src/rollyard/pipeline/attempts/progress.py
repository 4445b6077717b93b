"""The state of one attempt: its record, what RUN left, and how long each step took.

Plain state and arithmetic, shared by `Attempt`, which goes through the stages, and `Settlement`, which writes the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from rollyard.core import (
    Blame,
    Ending,
    Failure,
    Json,
    LostAttempt,
    Mode,
    Outcome,
    Rollout,
    Run,
    Score,
    State,
    Summary,
    Timings,
    Trajectory,
)
from rollyard.core.failure import RunDeadline
from rollyard.core.overlong import TRUNCATIONS
from rollyard.envs.findings import Findings
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.pipeline.attempts.stages import RunResult, RunState
from rollyard.sandbox.egress import EgressLedger


@dataclass(slots=True)
class AttemptProgress:
    """The state of one attempt. `rollout` is updated at every move."""

    rollout: Rollout
    run: Run
    summary: Summary
    running: RunState = field(default_factory=RunState)
    trajectory: Trajectory | None = None
    span: Span = NO_SPAN
    before: Timings | None = None  # from the process that brought it as far as EVAL
    marks: dict[str, float] = field(default_factory=dict[str, float])  # when each step started
    queued_s: float = 0.0
    prepare_s: float = 0.0
    ledger: EgressLedger = field(default_factory=EgressLedger)  # what its sandboxes reached
    is_reevaluable: bool = True  # what EVAL needs survives this process
    findings: Findings = field(default_factory=Findings)  # of EVAL's last try

    @property
    def state(self) -> State:
        return self.rollout.state

    def note(self, text: str) -> None:
        """Adds a note to the record."""
        self.summary = replace(self.summary, notes=(*self.summary.notes, text))

    def ran(self, ran: RunResult) -> None:
        """Stores RUN's result."""
        trajectory = self.trajectory = ran.trajectory
        oldest, newest = _versions(trajectory)
        forks = tuple(f"forked: {trace.fork_reason}" for trace in trajectory.traces if trace.fork_reason)
        self.summary = replace(
            self.summary,
            turns=trajectory.turns,
            sampled_tokens=trajectory.sampled_tokens,
            prompt_tokens=ran.prompt_tokens,
            traces=len(trajectory.traces),
            ended_by=trajectory.ended_by,
            engine=ran.engine,
            oldest_version=oldest,
            newest_version=newest,
            notes=(*self.summary.notes, *forks),
        )

    # --- timings --------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        self.marks[name] = time.monotonic()

    def timings(self) -> Timings:
        eval_wait_s, eval_s = self._between("eval_wait", "eval"), self._between("eval", "ended")
        if self.before is not None:
            return replace(self.before, eval_wait_s=eval_wait_s, eval_s=eval_s)
        return Timings(
            queued_s=self.queued_s,
            init_s=self._between("init", "ready"),
            prepare_s=self.prepare_s,
            ready_s=self._between("ready", "run"),
            run_s=self._between("run", "eval_wait"),
            model_s=_number(self.running.info.get("model_s")),
            tool_s=_number(self.running.info.get("tool_s")),
            eval_wait_s=eval_wait_s,
            eval_s=eval_s,
        )

    def _between(self, start: str, end: str) -> float:
        """Returns the seconds from one mark to another, or to now; 0 without the first mark."""
        started_at, ended_at = self.marks.get(start), self.marks.get(end)
        if started_at is None:
            return 0.0
        return (ended_at if ended_at is not None else time.monotonic()) - started_at

    # --- the end --------------------------------------------------------------------------------------

    def scored(self, score: Score, failure: Failure | None) -> Ending:
        """Returns the end of an evaluated attempt. A failure of any blame but `policy` leaves it without a score."""
        if failure is not None and not (self.trajectory and self.trajectory.turns):
            failure = failure.without_model_call()
        if failure is not None and failure.blame is not Blame.POLICY:
            return self.failed(failure)
        traces = self.trajectory.traces if self.trajectory else ()
        masked = self._masked(failure)
        may_train = failure is None or self.may_train(failure)
        is_train = self.run.mode is Mode.TRAIN and may_train and not masked
        is_trainable = is_train and any(trace.is_trainable for trace in traces)
        outcome = failure.outcome if failure else Outcome.COMPLETED
        if failure is not None:
            failure = replace(failure, trainable=is_trainable)
        if self.run.overlong_penalty is not None:
            score = self.run.overlong_penalty.applied(score, self.summary.sampled_tokens)
        return Ending(outcome, score, failure, is_trainable, self.with_egress(self.summary), self.timings(), masked)

    def with_egress(self, summary: Summary) -> Summary:
        """Returns the summary with what the sandboxes reached. Its key `before` is from the process that ended RUN."""
        egress, before = self.ledger.summary(), summary.egress
        return replace(summary, egress={**egress, "before": before} if egress and before else egress or before)

    def may_train(self, failure: Failure) -> bool:
        if self.run.mask_truncated and failure.code in TRUNCATIONS:
            return False
        return failure.trainable or (failure.code == RunDeadline.code and self.run.trainable_on_deadline)

    def _masked(self, failure: Failure | None) -> str:
        """Returns why the run excludes this rollout from the loss as truncated, or an empty string."""
        if not self.run.mask_truncated or self.trajectory is None:
            return ""
        if failure is not None and failure.code in TRUNCATIONS:
            return f"its run masks truncated rollouts, and it ended with {failure.code}"
        if self.trajectory.is_cut_off:
            return "its run masks truncated rollouts, and its last reply was cut off by a token limit"
        return ""

    def failed(self, failure: Failure, outcome: Outcome = Outcome.FAILED) -> Ending:
        """Returns an end without a score."""
        summary = self.summary
        if self.trajectory is None:  # RUN was interrupted: its tokens are still recorded
            summary = replace(summary, sampled_tokens=self.running.sampled_tokens)
        return Ending(outcome, None, failure, False, self.with_egress(summary), self.timings())

    def lost(self, code: str, detail: str) -> LostAttempt:
        sampled = self.trajectory.sampled_tokens if self.trajectory else self.running.sampled_tokens
        summary = self.summary
        return LostAttempt(
            self.rollout.attempt, code, detail, self.state, sampled, summary.engine, summary.node, self.timings()
        )


def _versions(trajectory: Trajectory) -> tuple[int, int]:
    """Returns the oldest and newest weight version that sampled in the trajectory, by span: few spans have two."""
    versions = {
        version
        for trace in trajectory.traces
        for span in trace.spans
        if span.is_owned
        for version in set(trace.versions[span.start : span.end])
    }
    return (min(versions), max(versions)) if versions else (-1, -1)


def _number(value: Json) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
