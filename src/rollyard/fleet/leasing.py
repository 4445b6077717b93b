"""Leases rollouts from the head's queue to nodes, and takes them back when nodes are lost.

    queue ─▶ read ─▶ a node is chosen ─▶ leased (durable) ─▶ sent to the node with its next orders

Rollouts whose agent is in this process (`session`: a client's own program, which calls the gateway) run here, as in a
pipeline without nodes. All others hold a seat at their policy from the lease to the end of RUN, and go only to nodes
that reach one of the policy's engines that are up at the head. While no node does, they wait in the queue, and
`unserved` contains the reason.

Invariants. `live` contains every rollout that has not ended and is not queued, wherever it runs. A leased rollout has
exactly one `LeasedRollout`; whatever ends it (the node's report, the node's loss) first sets `is_settling`, and the
store accepts one. Whatever `_lease` took from the queue is leased, run here, pushed back or published, and counted off
its run once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rollyard.core import LostAttempt, Rollout, RollyardError, Run, State, Summary
from rollyard.core.failure import Cancelled, NodeLost
from rollyard.engines.pool.seats import Seat
from rollyard.fleet.leased import LeasedRollout
from rollyard.fleet.nodes import ConnectedNode, FleetSettings, Nodes
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import Tracer
from rollyard.pipeline import Pipeline, PipelineSettings, StageResources
from rollyard.pipeline.attempt import Attempt
from rollyard.pipeline.progress import AttemptProgress
from rollyard.pipeline.settlement import Settlement
from rollyard.store.base import QueuedRow, Store, StoreUnusable

log = logging.getLogger("rollyard.fleet")

LATER_S = 0.2
"""Seconds before a rollout that found no place is tried again."""

MISSED_S = 0.05
"""Seconds before a rollout is tried again that another transaction held when it was to be leased."""

Taken = tuple[QueuedRow, Seat | None]


class LeasingPipeline(Pipeline):
    """A pipeline that leases rollouts to nodes."""

    def __init__(
        self,
        store: Store,
        resources: StageResources,
        settings: PipelineSettings,
        fleet: FleetSettings,
        *,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        super().__init__(store, resources, settings, metrics=metrics, tracer=tracer)
        self.nodes = Nodes(fleet, on_lost=self._lost, on_room=self.wake)
        self._out: dict[str, LeasedRollout] = {}  # those of `live` that are at nodes
        self._held_back: set[str] = set()  # policies whose seats are taken while nodes want more
        self._doomed: dict[str, str] = {}  # cancelled while they were being leased
        self._own_runs: set[str] = set()  # runs that have had rollouts that only this process can run
        self._coming_here: set[str] = set()  # rollouts that have left the queue for this process's INIT
        self._choosing = 0  # rollouts that have left the queue and have no node yet
        self._going_back: set[str] = set()  # of lost nodes; they may be claimed until they are requeued
        self._unclaimed: set[str] = set()  # those of `_out` from before this process, not claimed yet
        self._room_for: dict[str, int] = {}  # by policy: places of nodes that can serve it, in one pass
        self._unserved: dict[str, str] = {}  # policies whose queued rollouts no node can serve, and why

    @property
    def here(self) -> int:
        return len(self.live) - len(self._out)

    async def cancel(self, rollout_id: str, detail: str = "cancelled by the client") -> Rollout | None:
        rollout = await super().cancel(rollout_id, detail)
        if rollout is not None and rollout.state is not State.ENDED and rollout_id in self._taking:
            self._doomed[rollout_id] = detail
        return rollout

    def enqueue(self, stored: Sequence[Rollout], waited_s: float = 0.0) -> None:
        for rollout in stored:
            if rollout.state is State.QUEUED and self._needs(rollout)[0]:
                self._own_runs.add(rollout.run)
        super().enqueue(stored, waited_s)

    # --- leasing --------------------------------------------------------------------------------------

    def _fill(self) -> None:
        taken: list[Taken] = []
        most = min(self.nodes.wanted - self._choosing, self.nodes.settings.batch)
        self._held_back.clear()
        self._room_for.clear()
        while not self.is_draining and len(taken) < most:
            row = self.scheduler.pop(time.monotonic(), self._may_go)
            if row is None:
                break
            self._taking[row.id] = row.run
            run = self.run_of(row.run)
            if run is not None and run.policy in self._room_for:
                self._room_for[run.policy] -= 1
            taken.append((row, self.resources.router.seats(run.policy).try_acquire() if run is not None else None))
        while not self.is_draining and self._room_here > 0:
            row = self.scheduler.pop(time.monotonic(), self._own_runs.__contains__)  # no node is needed for these
            if row is None:
                break
            self._coming_here.add(row.id)
            self._taking[row.id] = row.run
            taken.append((row, None))
        for run in {run.policy: run for run in self._runs.values()}.values():
            seats = self.resources.router.seats(run.policy)
            seats.held_back, seats.on_free = int(run.policy in self._held_back), self.wake
        if taken:
            self._choosing += len(taken)
            self._own(partial(self._lease_each, taken))

    @property
    def _room_here(self) -> int:
        """Rollouts that this process itself could admit, as a pipeline without nodes would."""
        before_run = self.ready_slots + self.run_pool.free - self.init_pool.active - self.ready + self.unseated
        return min(self.init_pool.free, self.max_live - self.here, before_run) - len(self._coming_here)

    def _may_go(self, run_id: str) -> bool:
        """Whether a rollout of this run may be leased. It must find a free seat, because nodes run everything that they
        have; otherwise the policy is marked as held back, which reports the demand to its engines' caps. And a node
        with room must be able to serve it; this disregards engines that are down at the head, too."""
        run = self.run_of(run_id)
        if run is None:
            return True
        if self.resources.router.seats(run.policy).free == 0:
            self._held_back.add(run.policy)
            return False
        if run.policy not in self._room_for:
            self._room_for[run.policy] = self.nodes.wanted_for(self.resources.router.up(run.policy))
            self._tell_unserved(run.policy)
        return self._room_for[run.policy] > 0

    def _tell_unserved(self, policy: str) -> None:
        why = self.why_unserved(policy)
        if bool(why) is (policy in self._unserved):
            return
        if why:
            self._unserved[policy] = why
            log.warning("no node can serve a policy: its rollouts wait", extra={"policy": policy, "why": why})
        else:
            del self._unserved[policy]
            log.info("a policy can be served again", extra={"policy": policy})

    @property
    def unserved(self) -> dict[str, str]:
        """Policies whose rollouts wait because no node reaches one of their engines, and why."""
        return {policy: why for policy in self._unserved if (why := self.why_unserved(policy))}

    def why_unserved(self, policy: str) -> str:
        """Returns why no node can serve the policy. Empty if a node can, if there is no node, or if no engine of it is
        up at all."""
        engines, nodes = self.resources.router.up(policy), list(self.nodes.by_name.values())
        if not engines or any(node.room.serves(engines) for node in nodes):
            return ""
        return "; ".join(
            f"node {node.name} cannot use {engine}: {node.unreachable.get(engine, 'it does not know this engine yet')}"
            for node in nodes
            for engine in sorted(engines)
        )

    async def _lease_each(self, taken: Sequence[Taken]) -> None:
        """Leases the rollouts. If one of them raises, it ends, and the others are leased without it."""
        try:
            await self._lease(taken)
        except StoreUnusable:
            raise
        except Exception as error:
            rows = [row for row, _ in taken if row.id not in self._out]
            if len(rows) == 1:
                await self._give_up(rows[0], error)
                return
            log.exception("rollouts could not be leased together", extra={"rollouts": len(rows)})
            for row in rows:
                self.scheduler.adopt(row.run)
                self._taking[row.id] = row.run
                self._choosing += 1
                await self._lease_each([(row, None)])

    async def _lease(self, taken: Sequence[Taken]) -> None:
        """Reads the rollouts, chooses nodes and writes the leases; only then are they sent to the nodes."""
        left = {row.id: (row, seat) for row, seat in taken}
        wanted: list[tuple[Rollout, Run, ConnectedNode]] = []
        try:
            try:
                found = await self.store.get_many(list(left))
            finally:
                self._choosing -= len(taken)
            for rollout in found:
                row, seat = left[rollout.id]
                run = self.run_of(rollout.run)
                is_ours, needs_seat = self._needs(rollout)
                if (
                    rollout.state is not State.QUEUED
                    or rollout.attempt != row.attempt
                    or run is None
                    or self.is_draining
                ):
                    self._not_taken(rollout)
                elif is_ours:
                    if rollout.id in self._coming_here or self._room_here > 0:
                        self._coming_here.add(rollout.id)
                        self._close(left.pop(rollout.id)[1])
                        self._own(partial(self._run_here, rollout, run, self.queued_s(row, rollout)))
                    else:
                        self.scheduler.push(row, time.monotonic() + LATER_S)
                elif needs_seat and not self._is_seated(left, row, run):
                    self.scheduler.push(row, time.monotonic() + LATER_S)
                elif (node := self.nodes.place(rollout, self._engines(run, needs_seat))) is None:
                    self.scheduler.push(row, time.monotonic() + LATER_S)  # the node that wanted it has left meanwhile
                else:
                    if not needs_seat:
                        self._close(seat)
                    wanted.append((rollout, run, node))
            got = set(await self.store.lease([(it.id, it.attempt, node.name) for it, _, node in wanted]))
            for rollout, run, node in wanted:
                if rollout.id in got:
                    row, seat = left.pop(rollout.id)
                    self._taking.pop(rollout.id, None)
                    self._send(LeasedRollout(rollout, run, node, seat, queued_s=self.queued_s(row, rollout)))
            missed = [rollout.id for rollout, _, _ in wanted if rollout.id not in got]
            for rollout in await self.store.get_many(missed) if missed else ():
                if rollout.state is State.QUEUED:  # another transaction held it
                    self.scheduler.push(left[rollout.id][0], time.monotonic() + MISSED_S)
                else:
                    self._not_taken(rollout)
        finally:
            for _, _, node in wanted:
                node.promised -= 1
            for row, seat in left.values():
                self._close(seat)
                self._coming_here.discard(row.id)
                self._taking.pop(row.id, None)
                self._doomed.pop(row.id, None)
                self.scheduler.done(row.run)
            if left:
                self._idle.set()
                if self.nodes.wanted:
                    self.wake()

    def _engines(self, run: Run, needs_model: bool) -> frozenset[str]:
        return self.resources.router.up(run.policy) if needs_model else frozenset()

    def _is_seated(self, left: dict[str, Taken], row: QueuedRow, run: Run) -> bool:
        """Whether it has a seat. One that left the queue without a seat gets one now, if there is one."""
        if left[row.id][1] is None:
            left[row.id] = (row, self.resources.router.seats(run.policy).try_acquire())
        return left[row.id][1] is not None

    def _needs(self, rollout: Rollout) -> tuple[bool, bool]:
        """Whether only this process can run it, and whether it needs a seat. A rollout whose agent is not installed any
        more runs here: its attempt fails with what is missing."""
        try:
            agent = self.resources.resolve(rollout.task).agent
            return agent.is_head_only, agent.needs_model
        except Exception as error:  # a plugin's loading may raise anything
            log.warning("a rollout's agent is not installed", extra={"rollout": rollout.id, "error": str(error)})
            return True, False

    def _not_taken(self, rollout: Rollout) -> None:
        if rollout.state is State.ENDED:
            self.publish(rollout)  # cancelled after it left the queue

    def _send(self, leased: LeasedRollout) -> None:
        queued, node = leased.rollout, leased.node
        leased.at(queued.position.to(State.INIT))
        self._hold(leased)
        assert node is not None
        if node.is_over:
            self._own(partial(self._take_back, leased))
        else:
            node.lease(queued, leased.run, leased.queued_s)
        self.publish(leased.rollout)

    async def _run_here(self, rollout: Rollout, run: Run, queued_s: float) -> None:
        self._ahead[run.policy] = self._ahead.get(run.policy, 0) + 1
        try:
            await self.init_pool.acquire((-rollout.priority, rollout.seq))
        except BaseException:
            self.seated(run.policy)
            self.scheduler.done(run.id)
            raise
        finally:
            self._taking.pop(rollout.id, None)
            self._coming_here.discard(rollout.id)
        await self._live(Attempt(self, rollout, run, queued_s))

    # --- leased rollouts ------------------------------------------------------------------------------

    def _hold(self, leased: LeasedRollout) -> None:
        self.live[leased.rollout.id] = leased
        self._out[leased.rollout.id] = leased
        if (detail := self._doomed.pop(leased.rollout.id, None)) is not None:
            leased.stop(Cancelled(detail))

    def _let_go(self, leased: LeasedRollout) -> None:
        rollout_id = leased.rollout.id
        if self._out.get(rollout_id) is not leased:
            return
        del self._out[rollout_id], self.live[rollout_id]
        self._unclaimed.discard(rollout_id)
        if rollout_id in self._going_back:
            self._going_back.discard(rollout_id)
            self.nodes.tell()
        if leased.node is not None:
            leased.node.out.discard(rollout_id)
        leased.leave_seat()
        self.scheduler.done(leased.run.id)
        self._idle.set()
        self.wake()

    @staticmethod
    def _close(seat: Seat | None) -> None:
        if seat is not None:
            seat.close()

    # --- lost nodes -----------------------------------------------------------------------------------

    def _lost(self, node: ConnectedNode, why: str) -> None:
        self.resources.router.left(node.name)
        log.warning("node is gone", extra={"node": node.name, "why": why, "rollouts": len(node.out)})
        for rollout_id in node.out:
            leased = self._out.get(rollout_id)
            if leased is not None and leased.node is node and not leased.is_settling:
                self._going_back.add(rollout_id)
                self._own(partial(self._give_back, leased, why))

    async def _give_back(self, leased: LeasedRollout, why: str) -> None:
        async with leased.writing:
            if not leased.is_settling:
                name = leased.node.name if leased.node is not None else ""
                await self._settle(leased, leased.cancelled or NodeLost(f"node {name} {why}" if name else why))

    async def _take_back(self, leased: LeasedRollout) -> None:
        """Requeues a rollout from a node that never received it. The attempt does not count."""
        leased.is_settling = True
        lost = LostAttempt(leased.rollout.attempt, NodeLost.code, "its node left before it received it", leased.state)
        lost = self._at_its_node(leased, lost)
        try:
            await self._settling(leased).give_back(lost, delay_s=0.0, is_excused=True)
        finally:
            self._let_go(leased)

    async def _settle(self, leased: LeasedRollout, error: RollyardError) -> None:
        leased.is_settling = True
        try:
            await self._settling(leased).settle(error.failure(leased.state))
        finally:
            self._let_go(leased)

    @staticmethod
    def _at_its_node(leased: LeasedRollout, lost: LostAttempt) -> LostAttempt:
        return replace(lost, node=leased.node.name if leased.node is not None else leased.claimant)

    def _settling(self, leased: LeasedRollout) -> Settlement:
        name = leased.node.name if leased.node is not None else ""
        return Settlement(
            self, AttemptProgress(leased.rollout, leased.run, Summary(node=name), queued_s=leased.queued_s)
        )
