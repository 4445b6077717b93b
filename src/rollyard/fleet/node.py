"""A node: joins its head, runs the rollouts leased to it in its own pipeline, and hands over how they ended.

Two loops call the head: one polls for orders, one reports. If either finds that the head is unreachable or does not
know this node, the first one joins again and reports what is held here. What the head does not leave to this node is
ended.

Invariants. Nothing that ended is lost while this process lives and finds a head within `hold_s`; after that everything
held here is ended and sandboxes are proven gone, since other nodes have the rollouts by then. A drained node takes no
more, ends what it has, and reports that. Closing it gives back what has not started RUN, waits for the rest as long as
the pipeline drains, hands over, and leaves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import cast

from rollyard.core import Rollout
from rollyard.core.failure import Cancelled, EngineUnavailable, NodeUnknown
from rollyard.core.version import __version__
from rollyard.engines.routing.follower_router import FollowerRouter
from rollyard.engines.weights.weight_gates import WeightGates
from rollyard.fleet.head_connection import LEAST_ANSWER_S, HeadConnection, HeadUnreachable
from rollyard.fleet.ledger import NodeLedger
from rollyard.fleet.messages import (
    PROTOCOL,
    EngineUse,
    Join,
    Key,
    NodeStatus,
    Orders,
    Poll,
    PoolUse,
    Report,
    rollout_of,
    run_of,
)
from rollyard.fleet.view_sender import ViewSender
from rollyard.pipeline import Pipeline
from rollyard.store.base import Stale, Store

log = logging.getLogger("rollyard.fleet")

MOST_ITEMS = 512
MOST_BYTES = 16 << 20
"""Limits of one report; a single item that is larger goes alone."""

MOST_WHY = 300
"""Characters of an engine's error that are sent to the head."""

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 5.0

PREFETCH = 1.0
"""Rollouts that wait here for INIT, per slot of INIT: when a slot becomes free, the next one is already here."""


def as_store(ledger: NodeLedger) -> Store:
    """Returns the ledger as a store: a pipeline that gets its rollouts by leases uses only what a ledger has."""
    return cast(Store, ledger)


class Node:
    """One node. `main` runs until `stop` is set, or the head refuses the node (`NodeRefused`)."""

    def __init__(
        self, name: str, link: HeadConnection, pipeline: Pipeline, ledger: NodeLedger, router: FollowerRouter
    ) -> None:
        self.name = name
        self._link = link
        self._pipeline = pipeline
        self._ledger = ledger
        self._router = router
        self._session = secrets.token_hex(8)
        self._got = 0
        self._gates = -1
        self._joins = 0
        self._is_drained = False
        self._news = asyncio.Event()  # something to report
        self._answered = asyncio.Event()  # the head has answered a report
        self._is_joined = asyncio.Event()
        self._lease_s, self._hold_s = 30.0, 600.0
        self._last_contact_at = time.monotonic()
        self._views = ViewSender(self._session, link, pipeline, ledger)
        self._errands: set[asyncio.Task[None]] = set()
        self._broke: asyncio.Future[None] | None = None  # set when an errand raises
        self._reported_free_places = 0
        self._reported_reach: list[tuple[str, bool, bool]] = []
        self._is_moved = False
        router.on_moved.append(self.moved)
        self.on_joined: Callable[[], None] = lambda: None

    def news(self) -> None:
        self._news.set()

    async def main(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Runs until `stop` is set or a loop raises: `NodeRefused`, or an unexpected error. `hurry` ends the drain that
        follows a stop."""
        loops = [asyncio.create_task(work) for work in (self._poll(), self._report(), self._hold())]
        stopping = asyncio.create_task(stop.wait())
        try:
            self._broke = asyncio.get_running_loop().create_future()
            await asyncio.wait({stopping, self._broke, *loops}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._leave(hurry or asyncio.Event())
        finally:
            for task in (stopping, *loops, *self._errands):
                task.cancel()
            ended = await asyncio.gather(*loops, return_exceptions=True)
            self._ledger.close()  # hands over nothing more: the head gives back what still ends here
        if self._broke.done():
            self._broke.result()
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _leave(self, hurry: asyncio.Event) -> None:
        """Ends what it has, as far as there is time, hands it over, and gives back the rest."""
        self._drain(True)
        waits = [asyncio.create_task(self._pipeline.drain()), asyncio.create_task(hurry.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._pipeline.stop_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(1.0, self._pipeline.settings.drain_s)):
                while self._ledger.holds:
                    self._answered.clear()
                    await self._answered.wait()
        with suppress(HeadUnreachable, NodeUnknown):
            await self._link.report(Report(self._session, self._status(), [], is_leaving=True))

    # --- the loops ------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            try:
                if not self._is_joined.is_set():
                    await self._join()
                orders = await self._link.poll(Poll(self._session, self._status()), self._lease_s / 3)
                self._record_contact()
                self._apply_orders(orders)
                retry_s = FIRST_RETRY_S
            except NodeUnknown:
                self._is_joined.clear()
            except HeadUnreachable as away:
                log.info("the head is unreachable", extra={"node": self.name, "why": str(away)})
                await asyncio.sleep(retry_s)
                retry_s = self._longer(retry_s)

    async def _join(self) -> None:
        holds = self._ledger.holds
        self._gates = -1  # another head has its own numbers
        self._joins += 1
        joined = await self._link.join(
            Join(
                PROTOCOL,
                __version__,
                self.name,
                self._session,
                socket.gethostname(),
                holds,
                self._status(),
                sends_views=True,
            )
        )
        self._record_contact()
        self._lease_s, self._hold_s = joined.lease_s, joined.hold_s
        self._link.answer_s = max(LEAST_ANSWER_S, self._lease_s / 2)
        keeps = set(joined.keeps)
        for key in holds:
            if key not in keeps:
                self._end(key, "it was given to another node while this one was away")
        self._is_joined.set()
        self.news()
        self.on_joined()
        log.info("joined", extra={"node": self.name, "epoch": joined.epoch, "holds": len(keeps)})

    async def _report(self) -> None:
        """Reports what happened, as soon as something did, and the status when places became free."""
        retry_s = FIRST_RETRY_S
        while True:
            await self._news.wait()
            await self._is_joined.wait()
            self._news.clear()
            joins = self._joins
            try:
                while True:
                    entries = self._ledger.next(MOST_ITEMS, MOST_BYTES)
                    items = [entry.item for entry in entries]
                    reported = await self._link.report(Report(self._session, self._status(), items))
                    self._record_contact()
                    self._ledger.acknowledge(entries, reported.refused)
                    self._answered.set()
                    for key in reported.refused:
                        self._end(key, "the head has given it to another node, or it has ended")
                    retry_s = FIRST_RETRY_S
                    if not len(self._ledger):
                        break
            except NodeUnknown:
                if joins == self._joins:  # otherwise it has joined since
                    self._is_joined.clear()
                self._news.set()
            except HeadUnreachable:
                self._news.set()
                await asyncio.sleep(retry_s)
                retry_s = self._longer(retry_s)

    def _longer(self, retry_s: float) -> float:
        """Returns the next delay, short enough that a restarted head has not given away what is held here."""
        return min(2 * retry_s, LAST_RETRY_S, max(FIRST_RETRY_S, self._lease_s / 5))

    async def _hold(self) -> None:
        """Ends everything when no head was found for too long."""
        while True:
            await asyncio.sleep(min(1.0, self._hold_s / 10))
            away_s = time.monotonic() - self._last_contact_at
            if away_s > self._hold_s and self._ledger.holds:
                log.error("no head was found: everything here is ended", extra={"node": self.name, "away_s": away_s})
                for key in self._ledger.holds:
                    self._end(key, f"no head was found for {away_s:.0f} s")
                self._is_joined.clear()  # a head that was only suspended must learn of this: join again

    # --- orders ---------------------------------------------------------------------------------------

    def _apply_orders(self, orders: Orders) -> None:
        self._got = orders.number
        if orders.is_drained is not None and orders.is_drained is not self._is_drained:
            self._drain(orders.is_drained)
        for run in orders.runs:
            self._pipeline.register_run(run_of(run))
        for lease in orders.leases:
            rollout = rollout_of(lease)
            if not self._ledger.accept(rollout):
                continue
            if rollout.id in self._pipeline.live:
                self._run(self._start_after_earlier_attempt(rollout, lease.queued_s))
            else:
                self._pipeline.enqueue([rollout], lease.queued_s)
        if self._is_drained and orders.leases:  # they were sent before it was drained
            self._drain(True)
        for cancel in orders.cancels:
            self._cancel(cancel.key, cancel.detail)
        if orders.gates is not None:
            self._run(self._follow(orders.gates, self._joins))
        for request in orders.views:
            self._run(self._views.send(request))

    def _run(self, errand: Coroutine[object, object, None]) -> None:
        """Runs an errand beside the loops. If it raises, so does `main`: unapplied gates must not count as applied."""
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errand_ended)

    def _errand_ended(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and (error := task.exception()) and self._broke is not None and not self._broke.done():
            self._broke.set_exception(error)

    async def _start_after_earlier_attempt(self, rollout: Rollout, queued_s: float) -> None:
        """Starts a rollout after an earlier attempt of it, which was taken from this node, has cleaned up."""
        while rollout.id in self._pipeline.live:
            await self._pipeline.changed()
        key = Key(rollout.id, rollout.attempt)
        if self._ledger.has(key) and self._is_drained:
            self._ledger.give_back(key)
        elif self._ledger.has(key):
            self._pipeline.enqueue([rollout], queued_s)

    async def _follow(self, gates: WeightGates, joins: int) -> None:
        await self._router.follow(gates)
        if joins == self._joins and gates.number > self._gates:
            self._gates = gates.number
            self.news()

    def _drain(self, is_drained: bool) -> None:
        """Stops taking rollouts and gives back those that have not started, or resumes."""
        self._is_drained = is_drained
        for key in self._ledger.holds if is_drained else ():
            if self._pipeline.scheduler.remove(key.id):
                self._ledger.give_back(key)
        self.news()

    def _cancel(self, key: Key, detail: str) -> None:
        if not self._ledger.has(key):
            return
        attempt = self._pipeline.live.get(key.id)
        if attempt is not None and attempt.rollout.attempt == key.attempt:
            attempt.stop(Cancelled(detail))
        elif self._pipeline.scheduler.remove(key.id):  # not started: the head writes its end
            self._ledger.cancelled(key, detail)
        else:
            asyncio.get_running_loop().call_later(0.05, self._cancel, key, detail)  # it is just starting

    def _end(self, key: Key, why: str) -> None:
        """Stops an attempt that does not belong to this node any more; nothing of it is reported."""
        attempt = self._pipeline.live.get(key.id)
        if attempt is not None and attempt.rollout.attempt == key.attempt:
            attempt.stop(Stale(why))
        elif self._ledger.has(key):
            self._pipeline.scheduler.remove(key.id)
        self._ledger.drop(key)

    # --- status ---------------------------------------------------------------------------------------

    def _record_contact(self) -> None:
        self._last_contact_at = time.monotonic()

    def _status(self) -> NodeStatus:
        pipeline = self._pipeline
        pools = {
            name: PoolUse(pool["size"], pool["active"], pool["waiting"]) for name, pool in pipeline.pools().items()
        }
        uses = [
            EngineUse(
                status.spec.id,
                status.stats.sessions,
                status.stats.in_flight,
                status.stats.tokens,
                status.health.is_reachable,
                "" if status.health.is_reachable else status.stats.last_error[:MOST_WHY],
            )
            for status in self._router.list()
        ]
        self._reported_reach = self._engine_reach()
        self._reported_free_places = self._free_places()
        return NodeStatus(self._got, self._reported_free_places, self._gates, self._is_drained, pools, uses)

    def room(self) -> None:
        """Called when a place may have become free: reports it now instead of with the next poll."""
        if self._free_places() > self._reported_free_places:
            self.news()

    def moved(self) -> None:
        """Called when the reachability of an engine may have changed; calls in quick succession share one check."""
        if not self._is_moved:
            self._is_moved = True
            asyncio.get_running_loop().call_soon(self._report_reach)

    def _report_reach(self) -> None:
        """Reports changed reachability, and gives back what waits here for unreachable engines."""
        self._is_moved = False
        if self._engine_reach() == self._reported_reach:
            return
        self.news()
        for rollout in self._ledger.rollouts:
            run = self._pipeline.run_of(rollout.run)
            why = self._router.unreachable(run.policy) if run is not None else ""
            if why and self._pipeline.scheduler.remove(rollout.id):
                why = f"node {self.name} cannot use an engine of {run.policy if run else ''}: {why}"
                self._ledger.give_back(Key(rollout.id, rollout.attempt), EngineUnavailable.code, why[:MOST_WHY])

    def _engine_reach(self) -> list[tuple[str, bool, bool]]:
        """Returns for each engine whether it can be used from here, and whether it has been tried at all."""
        return [(it.spec.id, it.health.is_reachable, bool(it.stats.last_error)) for it in self._router.list()]

    def _free_places(self) -> int:
        """Free places on the way to RUN, and some to wait for INIT, less what waits here already."""
        pipeline = self._pipeline
        if self._is_drained or pipeline.is_draining:
            return 0
        before_run = pipeline.ready_slots + pipeline.run_pool.free - pipeline.init_pool.active - pipeline.ready
        room = min(pipeline.places_free, before_run)
        ahead = max(1, int(PREFETCH * pipeline.init_pool.size))
        return max(0, min(room, pipeline.init_pool.free + ahead) - len(pipeline.scheduler))
