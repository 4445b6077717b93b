"""The leased rollouts of a fleet's head, and how they end or return to the queue.

Invariants. A leased rollout has exactly one `LeasedRollout`; whatever ends it (the node's report, the node's loss)
first sets `is_settling`, and the store accepts one.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from rollyard.core import LostAttempt, RollyardError, Summary
from rollyard.core.failure import Cancelled, NodeLost
from rollyard.fleet.leased import LeasedRollout
from rollyard.fleet.nodes import ConnectedNode, Nodes
from rollyard.pipeline import Pipeline
from rollyard.pipeline.attempts.progress import AttemptProgress
from rollyard.pipeline.attempts.settlement import Settlement

log = logging.getLogger("rollyard.fleet")


class Leases:
    """The rollouts that are leased to nodes, by id."""

    def __init__(self, pipeline: Pipeline, nodes: Nodes) -> None:
        self._pipeline = pipeline
        self._nodes = nodes
        self._by_id: dict[str, LeasedRollout] = {}  # those of `Pipeline.live` that are at nodes
        self._cancelled_early: dict[str, str] = {}  # cancelled while they were being leased
        self._going_back: set[str] = set()  # of lost nodes; they may be claimed until they are requeued
        self.unclaimed: set[str] = set()  # those from before this process, not claimed yet

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, rollout_id: str) -> bool:
        return rollout_id in self._by_id

    def get(self, rollout_id: str) -> LeasedRollout | None:
        return self._by_id.get(rollout_id)

    @property
    def is_settled(self) -> bool:
        """Whether no rollout of a lost node, or of an earlier process, may still be claimed."""
        return not self.unclaimed and not self._going_back

    def cancel_on_lease(self, rollout_id: str, detail: str) -> None:
        """Cancels a rollout as soon as it is leased."""
        self._cancelled_early[rollout_id] = detail

    def forget_cancel(self, rollout_id: str) -> None:
        self._cancelled_early.pop(rollout_id, None)

    def add(self, leased: LeasedRollout) -> None:
        self._pipeline.live[leased.rollout.id] = leased
        self._by_id[leased.rollout.id] = leased
        if (detail := self._cancelled_early.pop(leased.rollout.id, None)) is not None:
            leased.stop(Cancelled(detail))

    def remove(self, leased: LeasedRollout) -> None:
        rollout_id = leased.rollout.id
        if self._by_id.get(rollout_id) is not leased:
            return
        del self._by_id[rollout_id], self._pipeline.live[rollout_id]
        self.unclaimed.discard(rollout_id)
        if rollout_id in self._going_back:
            self._going_back.discard(rollout_id)
            self._nodes.notify()
        if leased.node is not None:
            leased.node.out.discard(rollout_id)
        leased.leave_seat()
        self._pipeline.scheduler.release(leased.run.id)
        self._pipeline.on_place_freed()

    # --- their end ------------------------------------------------------------------------------------

    def lost(self, node: ConnectedNode, why: str) -> None:
        """Gives back what a lost node had."""
        self._pipeline.resources.router.left(node.name)
        log.warning("node is gone", extra={"node": node.name, "why": why, "rollouts": len(node.out)})
        for rollout_id in node.out:
            leased = self._by_id.get(rollout_id)
            if leased is not None and leased.node is node and not leased.is_settling:
                self.give_back_later(leased, why)

    def claim(self, leased: LeasedRollout, node: ConnectedNode) -> None:
        """Assigns a rollout from before this process to its node, which still has it."""
        leased.node = node
        self.unclaimed.discard(leased.rollout.id)
        node.out.add(leased.rollout.id)

    def give_back_unclaimed(self, why: str) -> None:
        for rollout_id in list(self.unclaimed):
            self.unclaimed.discard(rollout_id)
            self.give_back_later(self._by_id[rollout_id], why)
        self._nodes.notify()

    def give_back_later(self, leased: LeasedRollout, why: str) -> None:
        """Gives it back in the background. Until then its node may still claim it."""
        self._going_back.add(leased.rollout.id)
        self._pipeline.spawn(partial(self.give_back, leased, why))

    async def give_back(self, leased: LeasedRollout, why: str) -> None:
        async with leased.writing:
            if not leased.is_settling:
                name = leased.node.name if leased.node is not None else ""
                await self.settle(leased, leased.cancelled or NodeLost(f"node {name} {why}" if name else why))

    async def take_back(self, leased: LeasedRollout) -> None:
        """Requeues a rollout from a node that never received it."""
        detail = "its node left before it received it"
        await self.excuse(leased, LostAttempt(leased.rollout.attempt, NodeLost.code, detail, leased.state))

    async def excuse(self, leased: LeasedRollout, lost: LostAttempt) -> None:
        """Requeues the rollout; the attempt does not count."""
        await self.requeue(leased, lost, delay_s=0.0, is_excused=True)

    async def requeue(
        self, leased: LeasedRollout, lost: LostAttempt, *, delay_s: float, is_excused: bool = False
    ) -> None:
        leased.is_settling = True
        lost = replace(lost, node=leased.node.name if leased.node is not None else leased.claimant)
        try:
            await self._settlement(leased).give_back(lost, delay_s=delay_s, is_excused=is_excused)
        finally:
            self.remove(leased)

    async def settle(self, leased: LeasedRollout, error: RollyardError) -> None:
        """Ends the rollout with this error, or requeues it if another attempt may succeed."""
        leased.is_settling = True
        try:
            await self._settlement(leased).settle(error.failure(leased.state))
        finally:
            self.remove(leased)

    def _settlement(self, leased: LeasedRollout) -> Settlement:
        name = leased.node.name if leased.node is not None else ""
        progress = AttemptProgress(leased.rollout, leased.run, Summary(node=name), queued_s=leased.queued_s)
        return Settlement(self._pipeline, progress)
