"""The router: holds the engines, watches their health, and assigns one to each session.

A session stays on its engine for the prefix cache; a new one goes to the least loaded engine (`engines/pool/pool.py`).
`session.py` describes how a completion survives the loss of its engine. Engines can be added and removed at any time.
Policy engines are pooled by policy; judges have a pool of their own.

The router is opened with `async with` and owns everything that it starts: the HTTP connections that all engines share,
and one watch per engine (`health.py`).

`policies` updates weights, including the control requests to the engines. `pause` and `resume` only close and open the
gates, for callers that control the engines themselves. A pause returns when no call is left that cannot report its
versions. Calls on engines that do report them continue or freeze, as the engine was instructed, with their clocks
stopped. A streamed call always counts as one that cannot: its tokens are passed on as they arrive, and if it broke
before its end, it would be unknown which of them the new weights had sampled.

Other routers may follow this one (`engines/weights/weight_gates.py`, `follower_router.py`): their sessions count as
this router's, and wherever this router waits for calls to end, it also waits for theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Self

from rollyard.core import Message
from rollyard.core.failure import EngineExists, EngineFailure, JudgeUnreachable, NotFound
from rollyard.engines.base import ChatReply, Engine, EngineSpec, Kind, Role
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.openai import OpenAIEngine
from rollyard.engines.clients.prorl import ProrlEngine
from rollyard.engines.clients.remote import RemoteEngine
from rollyard.engines.clients.sglang import SglangEngine
from rollyard.engines.clients.transport import open_http
from rollyard.engines.clients.vllm import VllmEngine
from rollyard.engines.pool.admission import SessionCap
from rollyard.engines.pool.pool import EngineCall, EnginePool, EngineStatus, Health, PoolMember
from rollyard.engines.pool.seats import Seats
from rollyard.engines.routing.calls import RouterStats
from rollyard.engines.routing.health import HealthWatch, Vet
from rollyard.engines.routing.session import RoutedSession
from rollyard.engines.routing.settings import RouterSettings
from rollyard.engines.weights.policies import Policies
from rollyard.engines.weights.state import OnVersion, PolicySettings
from rollyard.engines.weights.weight_gates import Followers, GatePublisher, WeightGates

log = logging.getLogger("rollyard.engines")

LISTED = "`rollyard engines list` shows the engines."

_KINDS: dict[Kind, type[RemoteEngine]] = {
    Kind.VLLM: VllmEngine,
    Kind.SGLANG: SglangEngine,
    Kind.OPENAI: OpenAIEngine,
    Kind.PRORL: ProrlEngine,
}


def make_engine(spec: EngineSpec, http: HttpPool) -> Engine:
    return _KINDS[spec.kind](spec, http)


class Router:
    """The engines of all policies, and the sessions on them."""

    def __init__(self, settings: RouterSettings | None = None, *, vet: Vet | None = None) -> None:
        """`vet` may refuse an engine that answered its probe, with an EngineFailure, before any session uses it."""
        self.settings = settings or RouterSettings()
        self.stats = RouterStats()
        self._http: HttpPool | None = None
        self._members: dict[str, PoolMember] = {}
        self._reserved: dict[str, EnginePool] = {}  # by the ids of engines being probed: the pools that they will join
        self._policies: dict[str, EnginePool] = {}
        self._book = GatePublisher(self._members, self._policies)
        self.on_moved: list[Callable[[], None]] = []  # called after each change of a gate or of an engine's health
        self._judges = EnginePool("the judges", self._moved)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.followers: Followers | None = None
        self._health = self._make_health(vet)
        self.policies = self._make_policies(PolicySettings(self.settings.control_s, self.settings.abort_grace_s))

    def _make_health(self, vet: Vet | None) -> HealthWatch:
        return HealthWatch(self.settings, vet, lambda member: self.policies.admit_engine(member))

    def _make_policies(self, bounds: PolicySettings) -> Policies:
        return Policies(self._policies, self.pool, self._health.revive, bounds, self._settled)

    async def __aenter__(self) -> Self:
        self._http = open_http()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.followers = None  # do not wait for nodes
        await self.policies.close()
        await self.clear()
        if self._http is not None:
            await self._http.close()

    # --- the engines

    async def add(self, spec: EngineSpec, *, must_answer: bool = True) -> EngineStatus:
        """Probes an engine and adds it. If the probe fails, the failure is raised and the engine is not added.

        With `must_answer` off, an engine that does not answer yet is added as down, and watched until it does. An
        engine that was paused before a restart of the service cannot answer: it is added as paused, and probed when it
        is resumed.
        """
        if self._http is None:
            raise RuntimeError("the router is not open")
        if spec.id in self._members or spec.id in self._reserved:
            raise EngineExists(f"there is an engine {spec.id!r} already")
        pool = self._judges if spec.role is Role.JUDGE else self.pool(spec.policy)
        member = PoolMember(
            make_engine(spec, self._http), pool, session_cap=SessionCap.of(spec, self.settings.cap_rules)
        )
        is_waiting = self.policies.is_waiting(member)
        self._reserved[spec.id] = pool
        try:
            try:
                if not is_waiting:
                    await self._health.probe(member)
            except EngineFailure as error:
                if must_answer or not error.retryable:
                    raise
                member.stats.set_error(error)
        finally:
            del self._reserved[spec.id]
        self._members[spec.id] = member
        pool.add(member)
        pool.moved()
        try:
            if member.is_probed or is_waiting:
                await self.policies.admit_engine(member)
        except BaseException:
            await self.remove(spec.id)
            raise
        if self._members.get(spec.id) is not member:
            raise NotFound(f"engine {spec.id!r} was removed while it was being added")
        self._watches[spec.id] = asyncio.create_task(self._health.watch(member), name=f"watch {spec.id}")
        log.info("engine added", extra={"engine": spec.id, "policy": spec.policy, "health": str(member.health)})
        return member.status()

    async def remove(self, engine_id: str) -> None:
        """Removes an engine. Its running calls are cut, and continue on other engines from the sampled tokens."""
        await self.detach(engine_id)

    def detach(self, engine_id: str) -> Coroutine[None, None, None]:
        """Detaches an engine, at once, and returns what waits for the end of its calls and closes it."""
        if engine_id not in self._members:
            raise NotFound(f"there is no engine {engine_id!r}", remedy=LISTED)
        return self._close_when_idle(*self._detach(engine_id))

    def _detach(self, engine_id: str) -> tuple[PoolMember, asyncio.Task[None] | None]:
        """Detaches the engine; it is no longer selectable."""
        member = self._members.pop(engine_id)
        member.pool.drop(member)
        self.policies.forget(member)
        for call in list(member.calls):
            call.cut()
        return member, self._watches.pop(engine_id, None)

    async def _close_when_idle(self, member: PoolMember, watch: asyncio.Task[None] | None) -> None:
        try:
            if watch is not None:
                watch.cancel()
                await asyncio.wait({watch})
            async with asyncio.timeout(self.settings.abort_grace_s):
                await member.idle.wait()
                if member.engine.spec.role is Role.POLICY:
                    await self._settled()
        except TimeoutError:
            log.warning("an engine was removed with calls in flight", extra={"engine": member.id})
        finally:
            await member.engine.close()
        log.info("engine removed", extra={"engine": member.id})

    async def clear(self) -> None:
        """Removes all engines."""
        async with asyncio.TaskGroup() as group:
            for engine_id in list(self._members):
                group.create_task(self.remove(engine_id))

    def list(self) -> list[EngineStatus]:
        return [member.status() for member in self._members.values()]

    def engine(self, engine_id: str) -> Engine:
        """An engine by its id, for checks outside of rollouts (for example of its tokenizer)."""
        if engine_id not in self._members:
            raise NotFound(f"there is no engine {engine_id!r}", remedy=LISTED)
        return self._members[engine_id].engine

    def pool(self, policy: str) -> EnginePool:
        if policy not in self._policies:
            self._policies[policy] = EnginePool(policy, self._moved)
        return self._policies[policy]

    def forget(self, policy: str) -> None:
        """Drops a policy whose last run was deleted, if it is only a name that a client chose, and no engine is being
        added to it."""
        pool = self._policies.get(policy)
        if pool is None or pool in self._reserved.values():
            return
        if pool.is_unused and not self.policies.has(policy):
            del self._policies[policy]

    def _moved(self) -> None:
        self._book.moved()
        for listener in self.on_moved:
            listener()

    def up(self, policy: str) -> frozenset[str]:
        """Ids of the policy's engines that are up, paused or not."""
        pool = self._policies.get(policy)
        return frozenset(id for id, it in pool.members.items() if it.health is Health.UP) if pool else frozenset()

    def unreachable(self, policy: str) -> str:
        """Why this router cannot serve the policy; empty if it can, or if some engine has not been tried."""
        pool = self._policies.get(policy)
        members = pool.members.values() if pool else ()
        if any(member.health.is_reachable or not member.stats.last_error for member in members):
            return ""
        return "; ".join(f"{member.id}: {member.stats.last_error}" for member in members)

    def kinds(self, policy: str) -> frozenset[Kind]:
        """The kinds of the policy's current engines."""
        pool = self._policies.get(policy)
        return frozenset(member.engine.spec.kind for member in pool.members.values()) if pool else frozenset()

    # --- sessions

    def seats(self, policy: str) -> Seats:
        """The seats of a policy. The caller acquires one before it opens a session, and keeps it as long as that."""
        return self.pool(policy).seats

    def waiting(self) -> dict[str, int]:
        """The number of rollouts that wait for a seat, by policy, for policies with engines."""
        return {name: pool.seats.waiting for name, pool in self._policies.items() if pool.members}

    async def open_session(
        self, policy: str, session_id: str, *, priority: int = 0, avoid: Collection[str] = ()
    ) -> RoutedSession:
        """Opens a session on the least loaded engine, preferably none in `avoid`; waits up to `engine_wait_s` for an
        engine. The caller closes it."""
        pool = self.pool(policy)
        avoided = [member for member in pool.members.values() if member.id in avoid]
        member = pool.pick(avoided) or pool.pick() or pool.pick_paused()
        if member is None:
            member = await pool.wait_for_one(self.settings.engine_wait_s, self.settings.pause_wait_s)
        return RoutedSession(pool, member, session_id, priority, self.settings, self.stats)

    @asynccontextmanager
    async def session(
        self, policy: str, session_id: str, *, priority: int = 0, avoid: Collection[str] = ()
    ) -> AsyncGenerator[RoutedSession, None]:
        session = await self.open_session(policy, session_id, priority=priority, avoid=avoid)
        try:
            yield session
        finally:
            await session.close()

    # --- weights

    def version(self, policy: str) -> int:
        """The version that was resumed last."""
        return self.pool(policy).version

    @property
    def on_version(self) -> OnVersion:
        """Listeners, called with (policy, version) after each resume that names a version."""
        return self.policies.on_version

    def is_paused(self, policy: str) -> bool:
        return self.pool(policy).is_paused

    async def pause(self, policy: str) -> None:
        """Holds new calls and stops clocks. Cuts calls that cannot report their versions, and waits for their end."""
        pool = self.pool(policy)
        pool.shut()
        cut = [ended for member in pool.members.values() for ended in member.cut(is_sparing=True)]
        if cut:
            await asyncio.wait(cut)  # their sessions bound it by abort_grace_s
        await self._settled()

    def resume(self, policy: str, version: int | None = None) -> None:
        """Lets calls continue, with weights of this version if given. It also sets the version of a running policy."""
        pool = self.pool(policy)
        if version is not None:
            pool.version = version
            for member in pool.members.values():
                member.has(version)
                member.is_version_accepted = False  # the caller may have given the engine another version, or none
        pool.open()
        if version is not None:
            self.policies.notify_listeners(policy, version)

    # --- following routers

    def gates(self) -> WeightGates:
        """The current gates, for following routers (`engines/weights/weight_gates.py`)."""
        return self._book.gates()

    @property
    def on_gates(self) -> list[Callable[[], None]]:
        """Listeners, called after each change of the gates."""
        return self._book.listeners

    def used(self, engine_id: str, node: str, sessions: int, in_flight: int, tokens: int) -> None:
        """Records a node's current use of an engine; `tokens` is the node's total."""
        member = self._members.get(engine_id)
        if member is not None and member.remote_load.record(node, sessions, in_flight, tokens):
            member.pool.touch(member)

    def left(self, node: str) -> None:
        """Removes the load of a node that is gone."""
        for member in self._members.values():
            if member.remote_load.remove(node):
                member.pool.touch(member)

    async def _settled(self) -> None:
        """Waits until all following routers have applied the current gates. Nodes that are silent count as gone after
        their lease, which bounds the wait."""
        if self.followers is not None:
            await self.followers.settled()

    # --- judges

    async def ask(self, messages: Sequence[Message]) -> ChatReply:
        """One reply of the least loaded judge, or of another if that fails. Raises JudgeUnreachable if none answers."""
        settings = self.settings
        tried: set[PoolMember] = set()
        why = "no engine of role judge is up"
        for _ in range(settings.judge_tries):
            member = self._judges.pick(tried) or self._judges.pick()
            if member is None:
                break
            tried.add(member)
            call = EngineCall(is_cuttable=False)
            member.begin(call)
            try:
                async with asyncio.timeout(settings.judge_s):
                    reply = await member.engine.chat(messages, sampling=settings.judge_sampling)
                member.failures_in_a_row = 0
                return reply
            except TimeoutError:
                why = f"engine {member.id} did not answer in {settings.judge_s} s"
                member.failed(why, settings.trip_after)
            except EngineFailure as error:
                why = error.detail
                member.failed(error, settings.trip_after)
            finally:
                member.end(call)
        raise JudgeUnreachable(why)
