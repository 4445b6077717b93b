"""Writes an attempt's end: exactly one of ending, requeueing, or leaving it to the next process.

The sandbox is proven gone by now, and nothing can cancel the attempt any more. Invariant: however often a rollout is
settled, and by whichever process, the store's compare-and-set accepts one; a later one publishes the record that it
finds.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from rollyard.core import Ending, Failure, LostAttempt, Outcome, State, Summary
from rollyard.core.failure import Cancelled, InternalError, NodeLost, NotFound
from rollyard.envs.findings import Findings
from rollyard.observe.spans import end_rollout_span
from rollyard.pipeline import retry
from rollyard.pipeline.attempts.progress import AttemptProgress
from rollyard.pipeline.base import AttemptHost, Shutdown, Verdict
from rollyard.store.base import Stale, StoreUnusable

log = logging.getLogger("rollyard.pipeline")


class Settlement:
    """Writes the end of one attempt."""

    def __init__(self, pipeline: AttemptHost, progress: AttemptProgress) -> None:
        self._pipeline = pipeline
        self._progress = progress

    async def settle(self, verdict: Verdict) -> None:
        progress = self._progress
        try:
            if isinstance(verdict, Ending):
                await self._end(verdict)
            elif isinstance(verdict, Failure):
                await self._failed(verdict)
            elif isinstance(verdict, Shutdown) and self._is_to_be_run_again:
                await self.give_back(progress.lost("drained", "the service was stopped"), delay_s=0.0, is_excused=True)
            elif isinstance(verdict, Shutdown) and progress.state is State.EVAL:
                await self._pipeline.store.excuse_eval(progress.rollout.id, progress.rollout.position)
            elif isinstance(verdict, Stale):
                await self._publish_stored_end()
        except Stale:
            await self._publish_stored_end()
        except StoreUnusable:
            raise  # nothing can be written any more: the service ends
        except Exception as error:  # this rollout's result cannot be written: end only this one
            log.exception("the end cannot be stored", extra={"rollout": progress.rollout.id})
            progress.trajectory, progress.summary = None, Summary(node=self._pipeline.settings.node)
            progress.findings = Findings()
            broken = InternalError(f"the rollout's result cannot be stored ({type(error).__name__})")
            with suppress(Stale):
                await self._end(progress.failed(broken.failure(progress.state)))

    @property
    def _is_to_be_run_again(self) -> bool:
        if self._progress.state is State.EVAL:
            return not self._progress.is_reevaluable
        return self._progress.state in (State.INIT, State.READY, State.RUN)

    async def _failed(self, failure: Failure) -> None:
        progress = self._progress
        if failure.code == Cancelled.code:
            await self._end(progress.failed(failure, Outcome.CANCELLED))
            return
        rollout = progress.rollout
        delay_s = retry.delay_s(failure, rollout.attempt, rollout.excused, self._pipeline.settings.max_attempts)
        has_had_its_tries = progress.state is State.EVAL and failure.code != NodeLost.code  # EVAL retries by itself
        if delay_s is None or progress.state is State.QUEUED or has_had_its_tries:
            await self._end(progress.failed(failure))
        else:
            await self.give_back(progress.lost(failure.code, failure.detail), delay_s=delay_s)

    async def _end(self, ending: Ending) -> None:
        progress = self._progress
        rollout = progress.rollout
        unsaved = None if rollout.state is State.EVAL else progress.trajectory  # EVAL began by saving it
        progress.rollout = await self._pipeline.store.end(
            rollout.id, rollout.position, ending, unsaved, evidence=progress.findings.encoded()
        )
        end_rollout_span(progress.span, ending)
        self._pipeline.publish(progress.rollout)

    async def give_back(self, lost: LostAttempt, *, delay_s: float, is_excused: bool = False) -> None:
        """Requeues the rollout unless it was cancelled meanwhile. Raises `Stale` if another process has changed it."""
        progress = self._progress
        rollout = progress.rollout
        await self._pipeline.store.requeue(rollout.id, rollout.position, lost, is_excused=is_excused)
        progress.span.fail(lost.code)
        progress.span.end()
        if await self._is_cancelled_now():
            return
        progress.rollout = replace(
            rollout,
            position=rollout.position.to(State.QUEUED),
            lost=(*rollout.lost, lost),
            excused=rollout.excused + is_excused,
        )
        self._pipeline.publish(progress.rollout)
        self._pipeline.requeued(progress.rollout, delay_s)

    async def _is_cancelled_now(self) -> bool:
        """Whether a cancel arrived while this attempt was being given back: then no further attempt may start."""
        try:
            rollout = await self._pipeline.store.get(self._progress.rollout.id)
        except NotFound:
            return True  # deleted with its run, or (at a node) returned to the head
        if rollout.is_cancel_requested and rollout.state is State.QUEUED:
            rollout = await self._pipeline.store.request_cancel(rollout.id, "cancelled by the client") or rollout
        if rollout.state is not State.ENDED:
            return False
        self._pipeline.publish(rollout)
        return True

    async def _publish_stored_end(self) -> None:
        """Publishes the record if another writer has ended it, such as a cancel during admission."""
        rollout = self._progress.rollout
        log.info("attempt was overtaken", extra={"rollout": rollout.id, "state": rollout.state})
        with suppress(NotFound):
            stored = await self._pipeline.store.get(rollout.id)
            if stored.state is State.ENDED:
                self._pipeline.publish(stored)
