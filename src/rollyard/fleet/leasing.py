"""Leases rollouts from the head's queue to nodes.

    queue ─▶ read ─▶ a node is chosen ─▶ leased (durable) ─▶ sent to the node with its next orders

Rollouts whose agent is in this process (`session`: a client's own program, which calls the gateway) run here, as in a
pipeline without nodes. All others hold a seat at their policy from the lease to the end of RUN, and go only to nodes
that reach one of the policy's engines that are up at the head. While no node does, they wait in the queue, and
`unserved` contains the reason.

Invariants. `Pipeline.live` contains every rollout that has not ended and is not queued, wherever it runs. Whatever
`_lease` took from the queue is leased, run here, pushed back or published, and counted off its run once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from rollyard.core import Rollout, Run, State
from rollyard.engines.pool.seats import Seat, Seats
from rollyard.engines.routing.router import Router
from rollyard.fleet.leased import LeasedRollout
from rollyard.fleet.leases import Leases
from rollyard.fleet.nodes import ConnectedNode, Nodes
from rollyard.pipeline import Pipeline
from rollyard.store.base import QueuedRow, StoreUnusable

log = logging.getLogger("rollyard.fleet")

LATER_S = 0.2
"""Seconds before a rollout that found no place is tried again."""

MISSED_S = 0.05
"""Seconds before a rollout is tried again that another transaction held when it was to be leased."""

Taken = tuple[QueuedRow, Seat | None]


class Leasing:
    """Chooses nodes for queued rollouts, and leases them."""

    def __init__(self, pipeline: Pipeline, nodes: Nodes, leases: Leases) -> None:
        self._pipeline = pipeline
        self._nodes = nodes
        self._leases = leases
        self._policies_without_seats: set[str] = set()  # policies whose seats are taken while nodes want more
        self._own_runs: set[str] = set()  # runs that have had rollouts that only this process can run
        self._coming_here: set[str] = set()  # rollouts that have left the queue for this process's INIT
        self._choosing = 0  # rollouts that have left the queue and have no node yet
        self._room_for: dict[str, int] = {}  # by policy: places of nodes that can serve it, in one pass
        self._unserved: dict[str, str] = {}  # policies whose queued rollouts no node can serve, and why

    def queued(self, rollout: Rollout) -> None:
        """Called before a rollout is queued."""
        if self.needs(rollout)[0]:
            self._own_runs.add(rollout.run)

    def start_queued(self) -> None:
        """Leases queued rollouts while nodes want more, and runs those here that need no node."""
        pipeline = self._pipeline
        taken: list[Taken] = []
        most = min(self._nodes.free_places - self._choosing, self._nodes.settings.batch)
        self._policies_without_seats.clear()
        self._room_for.clear()
        while not pipeline.is_draining and len(taken) < most:
            row = pipeline.scheduler.pop(time.monotonic(), self._may_go)
            if row is None:
                break
            pipeline.starting[row.id] = row.run
            run = pipeline.run_of(row.run)
            if run is not None and run.policy in self._room_for:
                self._room_for[run.policy] -= 1
            taken.append((row, self._seats(run).try_acquire() if run is not None else None))
        while not pipeline.is_draining and self._room_here > 0:
            row = pipeline.scheduler.pop(time.monotonic(), self._may_come)  # no node is needed for these
            if row is None:
                break
            self._coming_here.add(row.id)
            pipeline.starting[row.id] = row.run
            run = pipeline.run_of(row.run)
            taken.append((row, self._seats(run).try_acquire() if run is not None else None))
        for run in {run.policy: run for run in pipeline.runs}.values():
            seats = self._seats(run)
            seats.held_back, seats.on_free = int(run.policy in self._policies_without_seats), pipeline.wake
        if taken:
            self._choosing += len(taken)
            pipeline.spawn(partial(self._lease_each, taken))

    @property
    def _room_here(self) -> int:
        """Rollouts that this process itself could admit, as a pipeline without nodes would."""
        it = self._pipeline
        before_run = it.ready_slots + it.run_pool.free - it.init_pool.active - it.ready + it.unseated
        return min(it.init_pool.free, it.max_live - it.live_here, before_run) - len(self._coming_here)

    def _may_come(self, run_id: str) -> bool:
        """Whether a rollout of this run may start here. It must find a free seat: one that waited for a seat here would
        get it before all that wait in the queue, also those of other owners."""
        if run_id not in self._own_runs:
            return False
        run = self._pipeline.run_of(run_id)
        if run is None:
            return True
        free = self._seats(run).free
        if free is None or free > self._pipeline.ahead.get(run.policy, 0):
            return True
        self._policies_without_seats.add(run.policy)  # so that a freed seat wakes this
        return False

    def _may_go(self, run_id: str) -> bool:
        """Whether a rollout of this run may be leased. It must find a free seat, because nodes run everything that they
        have; otherwise the policy is marked as held back, which reports the demand to its engines' caps. And a node
        with room must be able to serve it; this disregards engines that are down at the head, too."""
        run = self._pipeline.run_of(run_id)
        if run is None:
            return True
        free = self._seats(run).free
        if free is not None and free <= self._pipeline.ahead.get(run.policy, 0):
            self._policies_without_seats.add(run.policy)
            return False
        if run.policy not in self._room_for:
            self._room_for[run.policy] = self._nodes.free_places_for(self._router.up(run.policy))
            self._log_unserved(run.policy)
        return self._room_for[run.policy] > 0

    def _log_unserved(self, policy: str) -> None:
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
        engines, nodes = self._router.up(policy), list(self._nodes.by_name.values())
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
            rows = [row for row, _ in taken if row.id not in self._leases]
            if len(rows) == 1:
                await self._pipeline.give_up(rows[0], error)
                return
            log.exception("rollouts could not be leased together", extra={"rollouts": len(rows)})
            for row in rows:
                self._pipeline.scheduler.adopt(row.run)
                self._pipeline.starting[row.id] = row.run
                self._choosing += 1
                await self._lease_each([(row, None)])

    async def _lease(self, taken: Sequence[Taken]) -> None:
        """Reads the rollouts, chooses nodes and writes the leases; only then are they sent to the nodes."""
        pipeline = self._pipeline
        remaining = {row.id: (row, seat) for row, seat in taken}
        assignments: list[tuple[Rollout, Run, ConnectedNode]] = []
        try:
            try:
                rollouts = await pipeline.store.get_many(list(remaining))
            finally:
                self._choosing -= len(taken)
            for rollout in rollouts:
                row, seat = remaining[rollout.id]
                run = pipeline.run_of(rollout.run)
                is_head_only, needs_seat = self.needs(rollout)
                if (
                    rollout.state is not State.QUEUED
                    or rollout.attempt != row.attempt
                    or run is None
                    or pipeline.is_draining
                ):
                    self._not_taken(rollout)
                elif is_head_only:
                    if rollout.id in self._coming_here or self._room_here > 0:
                        self._coming_here.add(rollout.id)
                        pipeline.admitted(run.policy)  # before its seat is free, which no other may count on
                        _close(remaining.pop(rollout.id)[1])
                        pipeline.spawn(partial(self._run_here, rollout, run, pipeline.queued_s(row, rollout)))
                    else:
                        pipeline.queue(row, LATER_S)
                elif needs_seat and not self._is_seated(remaining, row, run):
                    pipeline.queue(row, LATER_S)
                elif (node := self._nodes.place(rollout, self._engines(run, needs_seat))) is None:
                    # The node that wanted it has left meanwhile.
                    pipeline.queue(row, LATER_S)
                else:
                    if not needs_seat:
                        _close(seat)
                    assignments.append((rollout, run, node))
            got = set(await pipeline.store.lease([(it.id, it.attempt, node.name) for it, _, node in assignments]))
            for rollout, run, node in assignments:
                if rollout.id in got:
                    row, seat = remaining.pop(rollout.id)
                    pipeline.starting.pop(rollout.id, None)
                    self._send(LeasedRollout(rollout, run, node, seat, queued_s=pipeline.queued_s(row, rollout)))
            missed = [rollout.id for rollout, _, _ in assignments if rollout.id not in got]
            for rollout in await pipeline.store.get_many(missed) if missed else ():
                if rollout.state is State.QUEUED:  # another transaction held it
                    pipeline.queue(remaining[rollout.id][0], MISSED_S)
                else:
                    self._not_taken(rollout)
        finally:
            for _, _, node in assignments:
                node.promised -= 1
            for row, seat in remaining.values():
                _close(seat)
                self._coming_here.discard(row.id)
                pipeline.starting.pop(row.id, None)
                self._leases.forget_cancel(row.id)
                pipeline.scheduler.release(row.run)
            if remaining:
                pipeline.notify()
                if self._nodes.free_places:
                    pipeline.wake()

    @property
    def _router(self) -> Router:
        return self._pipeline.resources.router

    def _seats(self, run: Run) -> Seats:
        return self._router.seats(run.policy)

    def _engines(self, run: Run, needs_model: bool) -> frozenset[str]:
        return self._router.up(run.policy) if needs_model else frozenset()

    def _is_seated(self, remaining: dict[str, Taken], row: QueuedRow, run: Run) -> bool:
        """Whether it has a seat. One that left the queue without a seat gets one now, if there is one."""
        if remaining[row.id][1] is None:
            remaining[row.id] = (row, self._seats(run).try_acquire())
        return remaining[row.id][1] is not None

    def needs(self, rollout: Rollout) -> tuple[bool, bool]:
        """Whether only this process can run it, and whether it needs a seat. A rollout whose agent is not installed any
        more runs here: its attempt fails with what is missing."""
        try:
            agent = self._pipeline.resources.resolve(rollout.task).agent
            return agent.is_head_only, agent.needs_model
        except Exception as error:  # a plugin's loading may raise anything
            log.warning("a rollout's agent is not installed", extra={"rollout": rollout.id, "error": str(error)})
            return True, False

    def _not_taken(self, rollout: Rollout) -> None:
        if rollout.state is State.ENDED:
            self._pipeline.publish(rollout)  # cancelled after it left the queue

    def _send(self, leased: LeasedRollout) -> None:
        queued, node = leased.rollout, leased.node
        leased.at(queued.position.to(State.INIT))
        self._leases.add(leased)
        assert node is not None
        if node.is_over:
            self._pipeline.spawn(partial(self._leases.take_back, leased))
        else:
            node.lease(queued, leased.run, leased.queued_s)
        self._pipeline.publish(leased.rollout)

    async def _run_here(self, rollout: Rollout, run: Run, queued_s: float) -> None:
        pipeline, order = self._pipeline, next(self._pipeline.admissions)
        try:
            await pipeline.init_pool.acquire((-rollout.priority, order))
        except BaseException:
            pipeline.seated(run.policy)
            pipeline.scheduler.release(run.id)
            raise
        finally:
            pipeline.starting.pop(rollout.id, None)
            self._coming_here.discard(rollout.id)
        await pipeline.run_attempt(rollout, run, order, queued_s)


def _close(seat: Seat | None) -> None:
    if seat is not None:
        seat.close()
