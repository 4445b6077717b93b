"""A node's router. It follows the head's: engines, gates and versions are the head's, calls and health are its own.

It receives gates (`engines/weights/weight_gates.py`) and treats its calls as the head treats its own: `follow` returns
when the calls that the modes cut have ended and those that drain have drained. Gates that arrive while earlier ones
still drain are applied at once: an abort cuts the draining calls, and both `follow` calls return.

Invariants. This router sends engines no control requests. No call starts while the head's gate is closed, and each call
has the version that the head set atomically with opening the gate. An engine is added as down, and must sample a token
for this router, over this node's network, before it gets a session. The number of sessions is limited here only while
the policy is paused: the head admits rollouts by its own seats.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from rollyard.core.failure import EngineUnavailable
from rollyard.core.policy import PauseMode
from rollyard.engines.base import EngineSpec, Role
from rollyard.engines.pool.pool import Health, PoolMember
from rollyard.engines.routing.health import HealthWatch, Vet
from rollyard.engines.routing.router import Router, RouterSettings, make_engine
from rollyard.engines.weights.policies import Policies
from rollyard.engines.weights.state import LEASE_S, PolicySettings, PolicyStatus
from rollyard.engines.weights.steps import all_of
from rollyard.engines.weights.weight_gates import EngineGate, WeightGates


class FollowerRouter(Router):
    """The router of a node, which applies the gates of the head's router."""

    def __init__(self, settings: RouterSettings | None = None, *, vet: Vet | None = None) -> None:
        super().__init__(settings, vet=vet)
        self._leaving: dict[asyncio.Task[None], PoolMember] = {}

    async def __aexit__(self, *exc: object) -> None:
        if self._leaving:
            await asyncio.wait(set(self._leaving))  # each is bounded by abort_grace_s
        await super().__aexit__(*exc)

    def _make_health(self, vet: Vet | None) -> HealthWatch:
        return FollowerHealth(self.settings, vet, lambda member: self.policies.admit_engine(member))

    def _make_policies(self, bounds: PolicySettings) -> Policies:
        return FollowerPolicies(self._policies, self.pool, self._health.revive, bounds, self._settled)

    async def follow(self, gates: WeightGates) -> None:
        """Applies the gates at once; returns when every call that these or later gates end has ended."""
        self._apply(gates)
        for pool in list(self._policies.values()):
            for member in list(pool.members.values()):
                while member.mode is PauseMode.DRAIN and member.calls:
                    await pool.gates_moved()
                await all_of(member.cut_calls())
        if leaving := [task for task, one in self._leaving.items() if one.engine.spec.role is Role.POLICY]:
            await asyncio.wait(leaving)

    # --- applying the head's gates

    def _apply(self, gates: WeightGates) -> None:
        """Applied atomically: nothing is awaited."""
        specs = {spec.id: spec for spec in gates.specs}
        for member in list(self._members.values()):
            if specs.get(member.id) != member.engine.spec:
                leaving = asyncio.create_task(
                    self._close_when_idle(*self._detach(member.id)), name=f"leave {member.id}"
                )
                self._leaving[leaving] = member
                leaving.add_done_callback(self._leaving.pop)
        new = [spec for spec in gates.specs if spec.id not in self._members]
        random.shuffle(new)  # it breaks ties between equally loaded engines; nodes must not all start with the same one
        for spec in new:
            self._attach(spec)
        for policy in gates.policies:
            pool = self.pool(policy.name)
            pool.version, pool.is_named, pool.is_paused = policy.version, policy.is_named, policy.is_paused
            for gate in policy.engines:
                if gate.id in pool.members:
                    self._apply_gate(pool.members[gate.id], gate)
            pool.wake()

    def _attach(self, spec: EngineSpec) -> None:
        if self._http is None:
            raise RuntimeError("the router is not open")
        is_judge = spec.role is Role.JUDGE
        pool = self._judges if is_judge else self.pool(spec.policy)
        member = PoolMember(make_engine(spec, self._http), pool, is_joined=is_judge)
        self._members[spec.id] = member
        pool.add(member)
        self._restart_watch(member)

    def _apply_gate(self, member: PoolMember, gate: EngineGate) -> None:
        """Applies one gate. While it is closed its version does not matter, because no call starts."""
        if gate.next_version is not None and gate.next_version != member.next_version:
            member.expect(gate.next_version)
        if (gate.is_given, gate.started) != (member.is_version_accepted, member.started):
            member.is_version_accepted, member.started, member.verified = gate.is_given, gate.started, None
        if gate.is_quarantined and member.health is not Health.QUARANTINED:
            member.quarantine(gate.error)
            if not gate.is_paused:
                member.cut(is_sparing=False)  # the weights of these calls are unknown
        if gate.is_paused:
            mode = gate.mode or PauseMode.KEEP
            member.pause(mode, is_leaving=gate.is_leaving)
            if mode is not PauseMode.DRAIN:
                member.cut(is_sparing=mode is PauseMode.KEEP)
        elif gate.is_joined:
            if gate.version != member.version:
                member.cut(is_sparing=True)  # there are such calls only if this router missed the closed gate
                member.has(gate.version)
            if member.is_paused:
                member.unpause()
        is_lifted = member.health is Health.QUARANTINED and not gate.is_quarantined
        if is_lifted or (member.health is Health.UP and not gate.is_joined):
            member.set_health(Health.DOWN)
        if gate.is_joined and (is_lifted or not member.is_joined):
            self._restart_watch(member)
        member.is_joined = gate.is_joined

    def _restart_watch(self, member: PoolMember) -> None:
        """Starts the health watch again, with a check at once."""
        if (watch := self._watches.get(member.id)) is not None:
            watch.cancel()
        self._watches[member.id] = asyncio.create_task(self._health.watch(member), name=f"watch {member.id}")


class FollowerHealth(HealthWatch):
    """A node's health checks: an engine must always sample a token for this router before it gets a session."""

    async def watch(self, member: PoolMember) -> None:
        await self.watch_once(member)
        await super().watch(member)

    async def watch_once(self, member: PoolMember) -> None:
        await super().watch_once(member)
        member.pool.moved()  # its last error may have changed

    async def read_load(self, member: PoolMember, *, is_anew: bool = False) -> None:
        """Does nothing: a node has no caps, and requests from all nodes would put load on the engine."""

    async def revive(self, member: PoolMember) -> None:
        """The sampled token also shows whether the engine still has its weights. A node may find a restarted engine
        before the head does; it then stays down here until the head has handled it. The reported version counts only if
        the engine reported versions before that agree with the head's: some engines cannot be given a version, or are
        given another one by a trainer."""
        if not member.is_probed:
            await self.probe(member)
        generation = await self.sample_once(member)
        before, named = member.reported_version, member.version
        reported = generation.versions[-1].version if generation is not None and generation.versions else -1
        is_other = reported != named and (before == named or reported < 0 <= before)
        if is_other and member.pool.is_named and not member.is_paused:
            raise EngineUnavailable(
                f"engine {member.id} no longer reports that its weights are version {named}: was it restarted?"
            )
        member.reported_version = reported


class FollowerPolicies(Policies):
    """A node's policies. Only the head updates weights; at a node, an engine that answers has its gate's version."""

    async def admit_engine(self, member: PoolMember) -> None:
        if member.is_joined and member.health is Health.DOWN:
            member.set_health(Health.UP)

    async def pause(
        self,
        name: str,
        *,
        holder: str,
        mode: PauseMode = PauseMode.ABORT,
        lease_s: float = LEASE_S,
        engines: Sequence[str] | None = None,
        wait_s: float | None = None,
        after: int | None = None,
    ) -> PolicyStatus:
        raise RuntimeError("weights change at the head")

    async def resume(
        self,
        name: str,
        version: int,
        *,
        holder: str | None = None,
        engines: Sequence[str] | None = None,
        after: int | None = None,
    ) -> PolicyStatus:
        raise RuntimeError("weights change at the head")
