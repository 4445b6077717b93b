"""The head of a fleet: its pipeline's executor, which leases rollouts (`leasing.py`) and receives the nodes' reports.

    the node's reports ─▶ moves, the end of RUN, the end ─▶ store ─▶ waiting clients

Invariants. On join, leases that the node no longer holds are released. A result that cannot be stored fails only its
own rollout and does not keep other reports from being stored. After a restart, leased rollouts have no node until their
node has joined, and are given back if no node claims them within `lease_s`. A change of weights waits for every node
whose reports may still be accepted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from rollyard.core import Ending, LostAttempt, Rollout, RollyardError, State, check_id
from rollyard.core.failure import EngineUnavailable, InternalError, InvalidRequest
from rollyard.engines.routing.router import Router
from rollyard.fleet.leased import WAY, LeasedRollout
from rollyard.fleet.leases import Leases
from rollyard.fleet.leasing import Leasing
from rollyard.fleet.lost_attempts import DRAINED, MOST_EXCUSED, is_nodes_own
from rollyard.fleet.messages import (
    PROTOCOL,
    Ended,
    Item,
    Join,
    Joined,
    Key,
    Moved,
    Orders,
    Poll,
    Report,
    Reported,
    Returned,
    Saved,
    View,
    info_of,
)
from rollyard.fleet.nodes import ConnectedNode, FleetSettings, Nodes
from rollyard.pipeline import Pipeline
from rollyard.pipeline.retry import BACKOFFS, Backoff
from rollyard.store.base import EncodedTrajectory, Stale, StoreUnusable
from rollyard.store.codec import from_json

log = logging.getLogger("rollyard.fleet")

CHECKS_PER_LEASE = 10
"""Checks of the nodes per lease: a lost node is noticed a tenth of a lease late at most."""


class FleetHead:
    """Leases queued rollouts to nodes, and is what nodes call."""

    fixed_pools = "the pools of a fleet belong to its nodes: start them with other sizes, or drain them"

    def __init__(self, pipeline: Pipeline, settings: FleetSettings) -> None:
        self._pipeline = pipeline
        self.nodes = Nodes(settings, on_lost=lambda node, why: self._leases.lost(node, why), on_room=pipeline.wake)
        self._leases = Leases(pipeline, self.nodes)
        self._leasing = Leasing(pipeline, self.nodes, self._leases)

    # --- called by the pipeline -----------------------------------------------------------------------

    async def open(self) -> Sequence[asyncio.Task[None]]:
        pipeline, router = self._pipeline, self._pipeline.resources.router
        router.followers = self
        router.on_gates.append(self._gates_moved)
        for row in pipeline.store.recovered.leased:
            rollout = await pipeline.store.get(row.id)
            run = pipeline.run_of(rollout.run)
            if run is None:  # not possible while it has rollouts
                continue
            pipeline.scheduler.adopt(run.id)
            is_sitting = rollout.state is not State.EVAL and self._leasing.needs(rollout)[1]
            seat = router.seats(run.policy).take() if is_sitting else None
            self._leases.add(LeasedRollout(rollout, run, None, seat, claimant=row.node))
            self._leases.unclaimed.add(rollout.id)
        return [pipeline.spawn(loop, is_vital=True) for loop in (self._watch, self._give_back_unclaimed)]

    def start_queued(self) -> None:
        self._leasing.start_queued()

    def queued(self, rollout: Rollout) -> None:
        self._leasing.queued(rollout)

    def cancelled(self, rollout_id: str, detail: str) -> None:
        self._leases.cancel_on_lease(rollout_id, detail)

    @property
    def remote(self) -> int:
        return len(self._leases)

    def add_pools(self, pools: dict[str, dict[str, int]]) -> None:
        """Adds all nodes' pools; of this process, only what is running counts."""
        for name in ("init", "ready", "run", "eval", "live"):
            own, others = pools[name], [node.status.pools[name] for node in self.nodes.with_pool(name)]
            own["size"] = own["active"] + sum(places.size for places in others)
            own["active"] += sum(places.active for places in others)
            own["waiting"] += sum(places.waiting for places in others)

    @property
    def unserved(self) -> dict[str, str]:
        """Policies whose rollouts wait because no node reaches one of their engines, and why."""
        return self._leasing.unserved

    # --- called by nodes ------------------------------------------------------------------------------

    def join(self, join: Join) -> Joined:
        """Registers a node. The node keeps what it holds and still has the lease of."""
        if join.protocol != PROTOCOL:
            raise InvalidRequest(
                f"node {join.name} uses protocol {join.protocol} of the fleet and this head {PROTOCOL}: install the"
                " same version of Rollyard on both"
            )
        check_id(join.name, "node")
        node, was_there = self.nodes.join(join)
        keeps: list[Key] = []
        for key in join.holds:
            leased = self._leases.get(key.id)
            if leased is None or leased.rollout.attempt != key.attempt or leased.is_settling:
                continue
            if leased.node is node or (leased.node is None and leased.claimant == node.name):
                self._leases.claim(leased, node)
                keeps.append(key)
                if leased.cancelled is not None:
                    node.cancel(key, leased.cancelled.detail)
        if was_there:
            retained_ids = {key.id for key in keeps}
            for rollout_id in node.out - retained_ids:
                leased = self._leases.get(rollout_id)
                if leased is not None and not node.is_sent(rollout_id):
                    self._pipeline.spawn(partial(self._leases.give_back, leased, "no longer has it"))
        else:
            node.rejoined(join.status)
            log.info("node joined", extra={"node": node.name, "host": node.host, "holds": len(keeps)})
        self.nodes.notify()
        settings = self.nodes.settings
        return Joined(self._pipeline.store.epoch, settings.lease_s, settings.hold_s, keeps)

    async def poll(self, poll: Poll, wait_s: float) -> Orders:
        """Returns a node's orders as soon as there are any, or empty ones when `wait_s` is over."""
        node = self._update_node(poll.session, poll)
        until = time.monotonic() + min(wait_s, self.nodes.settings.poll_s)
        while True:
            orders = node.orders(self._router.gates())
            remaining_s = until - time.monotonic()
            if orders is not None or remaining_s <= 0 or node.is_over:
                return orders or Orders(node.status.got)
            try:
                await asyncio.wait_for(node.has_orders.wait(), remaining_s)
            except TimeoutError:
                continue

    async def report(self, report: Report) -> Reported:
        """Stores a node's report. Items of one rollout are stored in order, rollouts concurrently."""
        node = self._update_node(report.session, report)
        by_key: dict[Key, list[Item]] = {}
        for item in report.items:
            by_key.setdefault(item.key, []).append(item)
        taken = await asyncio.gather(*(self._store_items(node, key, items) for key, items in by_key.items()))
        if report.is_leaving:
            self.nodes.mark_lost(node, "left")
        return Reported([key for key, is_taken in zip(by_key, taken, strict=True) if not is_taken])

    def view(self, view: View) -> None:
        """Receives what a node was asked about a running rollout."""
        self.nodes.with_session(view.session).views.receive(view)

    def _update_node(self, session: str, message: Poll | Report) -> ConnectedNode:
        node = self.nodes.record_call(session, message.status)
        for use in message.status.engines:
            self._router.used(use.engine, node.name, use.sessions, use.in_flight, use.tokens)
        return node

    async def _store_items(self, node: ConnectedNode, key: Key, items: Sequence[Item]) -> bool:
        """Stores the items of one attempt. Returns False if it does not belong to this node any more."""
        leased = self._leases.get(key.id)
        if leased is None or leased.node is not node or leased.rollout.attempt != key.attempt:
            return False
        async with leased.writing:  # a repeated report waits until the first one is written
            for item in items:
                if leased.is_settling:
                    return False
                try:
                    match item:
                        case Moved():
                            self._advance(leased, item.state)
                        case Saved():
                            await self._saved(leased, item)
                        case Ended():
                            await self._ended(node, leased, item)
                        case Returned():
                            await self._returned(leased, item)
                except Stale as stale:
                    self._leases.remove(leased)
                    log.info(
                        "a node's report is stale", extra={"rollout": key.id, "node": node.name, "reason": str(stale)}
                    )
                    return False
                except StoreUnusable:
                    raise  # nothing can be written any more: the service ends
                except Exception as error:
                    log.exception("a node's report cannot be stored", extra={"rollout": key.id, "node": node.name})
                    broken = InternalError(f"the rollout's result cannot be stored ({type(error).__name__})")
                    await self._leases.settle(leased, error if isinstance(error, RollyardError) else broken)
                    return False
        return True

    def _advance(self, leased: LeasedRollout, state: State) -> None:
        """Moves through all states up to `state`. Each move is written in order, without waiting."""
        if state not in WAY or leased.rollout.state not in WAY:
            return
        for step in WAY[WAY.index(leased.rollout.state) + 1 : WAY.index(state) + 1]:
            at = leased.rollout.position
            to = at.to(step)
            self._pipeline.store.move(leased.rollout.id, at, to).add_done_callback(
                lambda future: future.cancelled() or future.exception()
            )
            leased.at(to)
        self._pipeline.publish(leased.rollout)

    async def _saved(self, leased: LeasedRollout, item: Saved) -> None:
        rollout = leased.rollout
        if rollout.state is State.EVAL:  # a repeated report
            return
        self._advance(leased, State.RUN)
        for blob in item.artifacts:
            await self._pipeline.resources.artifacts.receive(blob.name, blob.data, rollout.id, rollout.attempt)
        at = leased.rollout.position
        encoded = EncodedTrajectory(item.data, item.sampled_tokens)
        await self._pipeline.store.save_run(rollout.id, at, encoded, info_of(item))
        leased.at(at.to(State.EVAL))
        leased.leave_seat()
        self._pipeline.wake()
        self._pipeline.publish(leased.rollout)

    async def _ended(self, node: ConnectedNode, leased: LeasedRollout, item: Ended) -> None:
        leased.is_settling = True
        encoded = EncodedTrajectory(item.data, item.sampled_tokens) if item.data is not None else None
        ending = from_json(item.ending, Ending)
        rollout, failure = leased.rollout, ending.failure
        if failure is not None and leased.cancelled is None and self._is_nodes_own(leased, failure.code, item):
            lost = LostAttempt(
                rollout.attempt,
                failure.code,
                failure.detail,
                leased.state,
                engine=ending.summary.engine,
                timings=ending.timings,
            )
            await self._leases.excuse(leased, lost)
            return
        try:
            rollout = await self._pipeline.store.end(
                leased.rollout.id, leased.rollout.position, ending, encoded, evidence=item.evidence
            )
        except Stale:
            self._leases.remove(leased)
            raise
        node.ended += 1
        self._leases.remove(leased)
        self._pipeline.publish(rollout)

    async def _returned(self, leased: LeasedRollout, item: Returned) -> None:
        leased.is_settling = True
        rollout, lost = leased.rollout, item.lost
        may_excuse = item.is_excused and (lost.code == DRAINED or rollout.excused < MOST_EXCUSED)
        if may_excuse or self._is_nodes_own(leased, lost.code, item):
            await self._leases.excuse(leased, lost)
            return
        if item.is_excused:  # excused too often: now it counts, and may be the last
            detail = f"{lost.detail}; {rollout.excused} attempts before it were lost by their nodes"
            await self._leases.settle(leased, EngineUnavailable(detail))
            return
        delay_s = BACKOFFS.get(lost.code, Backoff()).delay_s(max(1, rollout.attempt - rollout.excused))
        await self._leases.requeue(leased, lost, delay_s=delay_s)

    def _is_nodes_own(self, leased: LeasedRollout, code: str, item: Ended | Returned) -> bool:
        node, engines = leased.node, self._router.up(leased.run.policy)
        lost_at = {lost.node for lost in leased.rollout.lost} | ({node.name} if node is not None else set())
        return is_nodes_own(
            code,
            item.sampled_tokens if isinstance(item, Ended) else item.lost.tokens_lost,
            leased.rollout.excused,
            is_engine_up=bool(engines),
            is_served=node is not None and node.room.serves(engines),
            has_others=any(it.name not in lost_at and not it.is_drained for it in self.nodes.by_name.values()),
        )

    # --- lost nodes -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.nodes.settings.lease_s / CHECKS_PER_LEASE)
            self.nodes.end_silent()

    async def _give_back_unclaimed(self) -> None:
        """Gives back what no node has claimed within `lease_s` of this head's start."""
        if self._leases.unclaimed:
            await asyncio.sleep(self.nodes.settings.lease_s)
            self._leases.give_back_unclaimed("no node has claimed it since the head was restarted")

    # --- gates ----------------------------------------------------------------------------------------

    @property
    def _router(self) -> Router:
        return self._pipeline.resources.router

    def _gates_moved(self) -> None:
        for node in self.nodes.by_name.values():
            node.has_orders.set()

    async def settled(self) -> None:
        """Waits until every node, including those that may still claim rollouts, has applied the gates or is gone."""
        number = self._router.gates().number
        while not self._leases.is_settled or self.nodes.behind(number):
            await self.nodes.changed()
