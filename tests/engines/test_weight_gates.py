"""The gates that a head sends to nodes, the load that nodes report, and that the head waits before weights change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rollyard.core.engine import Admission
from rollyard.core.failure import PolicyStuck
from rollyard.core.policy import PauseMode, PolicyRecord
from rollyard.engines import Health, Router
from rollyard.engines.clients.load import EngineLoad
from rollyard.engines.pool.admission import CapRules
from rollyard.engines.weights.state import PolicyState
from rollyard.engines.weights.weight_gates import EngineGate, WeightGates
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import QUICK, judge_of, routed, spec_of

Operation = Callable[[Router], Coroutine[Any, Any, Any]]


def engine_gates(router: Router) -> dict[str, EngineGate]:
    return {gate.id: gate for policy in router.gates().policies for gate in policy.engines}


# --- contents


async def test_gates_contain_the_state_of_all_engines_and_can_be_encoded() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        await router.add(judge_of(one))
        await router.policies.resume("default", 3)
        two.control.fail("version", 1, 500)
        with pytest.raises(PolicyStuck):
            await router.policies.resume("default", 4, engines=["e2"])
        gates = router.gates()
        assert [spec.id for spec in gates.specs] == ["e1", "e2", "judge"]
        (policy,) = gates.policies
        assert (policy.name, policy.version, policy.is_named, policy.is_paused) == ("default", 3, True, False)
        first, second = policy.engines
        assert first == EngineGate("e1", 3, is_given=True, started=str(one.started_at))
        assert (second.is_paused, second.is_quarantined, second.version) == (True, True, 3)
        assert "did not take its version" in second.error
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(gates), type=WeightGates) == gates


async def test_the_number_rises_with_every_change_and_listeners_are_called_once() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        notified_numbers: list[int] = []
        router.on_gates.append(lambda: notified_numbers.append(router.gates().number))

        def break_down() -> None:
            raise RuntimeError("a listener broke")

        router.on_gates.insert(0, break_down)
        numbers = [router.gates().number]
        for change in (
            router.pause("default"),
            router.policies.pause("default", holder="me", mode=PauseMode.KEEP),
            router.policies.resume("default", 1),
            router.add(spec_of(server, "e2")),
            router.remove("e2"),
        ):
            await change
            numbers.append(router.gates().number)
        assert numbers == sorted(numbers) and len(set(numbers)) >= 5
        async with router.session("default", "s1"):
            router.used("e1", "n1", 3, 2, 100)
            assert router.gates().number == numbers[-1], "gates contain no loads"
        await asyncio.sleep(0)
        assert notified_numbers == sorted(set(notified_numbers)) and notified_numbers[-1] == numbers[-1]


async def test_the_number_rises_across_restarts() -> None:
    """Otherwise a node that applied high numbers of the previous head would seem to have applied this head's gates."""
    async with ScriptedEngine() as server:
        async with routed(server) as router:
            for version in range(20):
                await router.policies.resume("default", version)
            last = router.gates().number
        async with Router(QUICK) as router:
            assert router.gates().number > last


async def test_an_engine_that_is_not_admitted_yet_is_not_joined() -> None:
    async with ScriptedEngine() as server, Router(QUICK) as router:
        notified_gates: list[WeightGates] = []
        router.on_gates.append(lambda: notified_gates.append(router.gates()))
        await server.stop()
        assert (await router.add(spec_of(server), must_answer=False)).health is Health.DOWN
        await asyncio.sleep(0)
        assert notified_gates and not engine_gates(router)["e1"].is_joined
        await server.start()
        async with asyncio.timeout(90):
            while not engine_gates(router)["e1"].is_joined:
                await asyncio.sleep(0.005)


async def test_a_mode_never_becomes_less_strict_while_the_gate_is_closed() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        modes: list[PauseMode | None] = [engine_gates(router)["e1"].mode]
        for mode in (PauseMode.DRAIN, PauseMode.KEEP, PauseMode.DRAIN, PauseMode.ABORT, PauseMode.KEEP):
            await router.policies.pause("default", holder="me", mode=mode)
            modes.append(engine_gates(router)["e1"].mode)
        drain, keep, abort = PauseMode.DRAIN, PauseMode.KEEP, PauseMode.ABORT
        assert modes == [None, drain, keep, keep, abort, abort]
        await router.policies.resume("default", 1)
        assert engine_gates(router)["e1"].mode is None


# --- the load of nodes


async def test_sessions_of_nodes_count_in_routing_and_in_the_list() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        router.used("e1", "n1", 5, 2, 100)
        router.used("e2", "n1", 4, 3, 0)
        router.used("e9", "n1", 4, 3, 0)  # removed meanwhile
        async with router.session("default", "s1") as session:
            assert session.engine.spec.id == "e2"
            router.used("e1", "n2", 1, 0, 10)
            stats = {status.spec.id: status.stats for status in router.list()}
            assert (stats["e1"].sessions, stats["e1"].in_flight, stats["e1"].tokens) == (6, 2, 110)
            assert (stats["e2"].sessions, stats["e2"].in_flight) == (5, 3)
            router.left("n1")
            router.left("unknown")
            (first, second) = (status.stats for status in router.list())
            assert (first.sessions, first.in_flight, first.tokens) == (1, 0, 110)
            assert (second.sessions, second.in_flight) == (1, 0)


async def test_tokens_of_a_node_are_counted_once_however_often_it_reports_them() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        counts = []
        for tokens in (100, 100, 130, 20, 25):  # before the fourth it was restarted
            router.used("e1", "n1", 0, 0, tokens)
            counts.append(router.list()[0].stats.tokens)
        router.left("n1")
        router.used("e1", "n1", 0, 0, 25)  # it was only unreachable
        assert [*counts, router.list()[0].stats.tokens] == [100, 100, 130, 150, 155, 155]


async def test_sessions_of_nodes_fill_an_engine_and_change_its_cap() -> None:
    rules = CapRules(start=8, settle_s=0.0)
    async with ScriptedEngine() as server, routed(settings=replace(QUICK, watch_s=60, cap_rules=rules)) as router:
        await router.add(spec_of(server, "small", capacity=2, admission=Admission.FIXED))
        await router.add(spec_of(server, "large", capacity=4))
        router.used("small", "n1", 2, 0, 0)
        async with router.session("default", "s1") as session:
            assert session.engine.spec.id == "large", "the other is full"
        member = router.pool("default").members["large"]
        member.record_load(EngineLoad(0.1), 0.0)
        assert member.cap == 4
        router.used("large", "n1", 4, 4, 0)
        member.record_load(EngineLoad(0.99, running=4), 1.0)
        assert member.cap == 3, "the nodes' sessions fill its cache"


# --- waiting for nodes


class Slow:
    """Followers that settle only when the test allows it; `observed_gates` has the gates that they had to apply."""

    def __init__(self, router: Router) -> None:
        self.observed_gates: list[WeightGates] = []
        self._router = router
        self._asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        router.followers = self

    async def settled(self) -> None:
        going: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.observed_gates.append(self._router.gates())
        self._asked.put_nowait(going)
        await going

    async def asked(self) -> asyncio.Future[None]:
        async with asyncio.timeout(90):
            return await self._asked.get()


@asynccontextmanager
async def slow(*servers: ScriptedEngine) -> AsyncGenerator[tuple[Router, Slow], None]:
    async with routed(*servers) as router:
        yield router, Slow(router)


def gates_of(gates: WeightGates) -> dict[str, tuple[bool, PauseMode | None]]:
    return {gate.id: (gate.is_paused, gate.mode) for policy in gates.policies for gate in policy.engines}


def pause(mode: PauseMode, **fields: Any) -> Operation:
    return lambda router: router.policies.pause("default", holder="me", mode=mode, **fields)


SHUT = {
    "drain": (pause(PauseMode.DRAIN), PauseMode.DRAIN),
    "abort": (pause(PauseMode.ABORT), PauseMode.ABORT),
    "keep": (pause(PauseMode.KEEP), PauseMode.KEEP),
    "a resume without a pause": (lambda router: router.policies.resume("default", 1), PauseMode.ABORT),
    "the gate only": (lambda router: router.pause("default"), PauseMode.KEEP),
}


@pytest.mark.parametrize("case", SHUT)
async def test_an_engine_gets_no_control_request_before_every_node_has_closed_its_gate(case: str) -> None:
    operation, mode = SHUT[case]
    async with ScriptedEngine() as server, slow(server) as (router, followers):
        task = asyncio.create_task(operation(router))
        going = await followers.asked()
        assert gates_of(followers.observed_gates[-1]) == {"e1": (True, mode)}
        assert list(server.control.log) == [] and not task.done()
        going.set_result(None)
        await task


async def test_a_pause_of_one_engine_closes_only_its_gate_and_waits_for_nodes() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, slow(one, two) as (router, followers):
        task = asyncio.create_task(pause(PauseMode.ABORT, engines=["e1"])(router))
        going = await followers.asked()
        assert gates_of(followers.observed_gates[-1]) == {"e1": (True, PauseMode.ABORT), "e2": (False, None)}
        assert engine_gates(router)["e1"].is_leaving
        assert list(one.control.log) == []
        going.set_result(None)
        await task
        assert list(one.control.log) == ["pause abort"] and list(two.control.log) == []


async def test_calls_that_cannot_be_frozen_are_cut_at_nodes_before_the_pause_completes() -> None:
    """They were to be kept, but the engine has no control routes."""
    async with ScriptedEngine() as server:
        server.control.is_there = False
        async with slow(server) as (router, followers):
            task = asyncio.create_task(pause(PauseMode.KEEP)(router))
            (await followers.asked()).set_result(None)
            going = await followers.asked()
            assert [gates_of(gates)["e1"][1] for gates in followers.observed_gates] == [PauseMode.KEEP, PauseMode.ABORT]
            assert router.policies.status("default").state is PolicyState.PAUSING
            going.set_result(None)
            assert (await task).state is PolicyState.PAUSED


async def test_an_engine_that_does_not_pause_is_quarantined_at_nodes_before_the_pause_completes() -> None:
    async with ScriptedEngine() as server, slow(server) as (router, followers):
        server.control.fail("pause", 1, 500)
        task = asyncio.create_task(pause(PauseMode.KEEP)(router))
        (await followers.asked()).set_result(None)
        going = await followers.asked()
        assert engine_gates(router)["e1"].is_quarantined and not task.done()
        assert gates_of(followers.observed_gates[-1])["e1"] == (True, PauseMode.ABORT)
        going.set_result(None)
        await task


async def test_a_resume_during_a_drain_first_cuts_the_draining_calls_of_nodes() -> None:
    async with ScriptedEngine() as server, slow(server) as (router, followers):
        pausing = asyncio.create_task(pause(PauseMode.DRAIN, wait_s=0)(router))
        await followers.asked()
        assert (await pausing).state is PolicyState.PAUSING
        task = asyncio.create_task(router.policies.resume("default", 1))
        going = await followers.asked()
        assert (
            gates_of(followers.observed_gates[-1]) == {"e1": (True, PauseMode.ABORT)} and list(server.control.log) == []
        )
        going.set_result(None)
        await task
        assert list(server.control.log) == ["version 1", "clear", "resume"]


async def test_a_resume_leaves_kept_calls_frozen() -> None:
    async with ScriptedEngine() as server, slow(server) as (router, followers):
        pausing = asyncio.create_task(pause(PauseMode.KEEP)(router))
        (await followers.asked()).set_result(None)
        await pausing
        task = asyncio.create_task(router.policies.resume("default", 1))
        going = await followers.asked()
        (gate,) = followers.observed_gates[-1].policies[0].engines
        assert (gate.mode, gate.next_version) == (PauseMode.KEEP, 1), "kept calls may report the next version"
        going.set_result(None)
        await task


async def test_an_expired_lease_quarantines_at_nodes_and_cuts_calls_that_can_move() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        moved = asyncio.Event()
        await pause(PauseMode.KEEP, engines=["e1"], lease_s=0.01)(router)
        router.on_gates.append(moved.set)
        async with asyncio.timeout(90):
            while not engine_gates(router)["e1"].is_quarantined:
                await moved.wait()
                moved.clear()
        assert gates_of(router.gates()) == {"e1": (True, PauseMode.ABORT), "e2": (False, None)}
        await router.policies.renew("default", holder="me", lease_s=60)
        assert not engine_gates(router)["e1"].is_quarantined


async def test_an_engine_added_during_a_pause_is_never_open_to_nodes() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one) as router:
        await router.policies.resume("default", 1)
        await pause(PauseMode.ABORT)(router)
        states: list[tuple[bool, bool]] = []

        def look() -> None:
            if (gate := engine_gates(router).get("e2")) is not None:
                states.append((gate.is_joined, gate.is_paused))

        router.on_gates.append(look)
        await router.add(spec_of(two, "e2"))
        await asyncio.sleep(0)
        assert states and states[-1] == (True, True) and (True, False) not in states


async def test_after_a_restart_an_engine_is_paused_once_nodes_have_cut_their_calls() -> None:
    saved: dict[str, PolicyRecord] = {}

    async def save(record: PolicyRecord) -> None:
        saved[record.name] = record

    async with ScriptedEngine() as server:
        async with routed(server) as router:
            router.policies.save = save
            await pause(PauseMode.DRAIN)(router)
        server.control.log.clear()
        async with Router(QUICK) as router:
            router.policies.restore(saved.values())
            followers = Slow(router)
            task = asyncio.create_task(router.add(spec_of(server)))
            going = await followers.asked()
            assert (
                gates_of(followers.observed_gates[-1]) == {"e1": (True, PauseMode.ABORT)}
                and list(server.control.log) == []
            )
            going.set_result(None)
            assert (await task).health is Health.QUARANTINED and list(server.control.log) == ["pause abort"]


async def test_removing_an_engine_waits_for_the_calls_of_nodes() -> None:
    """It may get other weights once it is removed."""
    async with ScriptedEngine() as server, slow(server) as (router, followers):
        task = asyncio.create_task(router.remove("e1"))
        going = await followers.asked()
        assert followers.observed_gates[-1].specs == () and not task.done()
        going.set_result(None)
        await task


async def test_closing_a_router_does_not_wait_for_nodes() -> None:
    async with ScriptedEngine() as server:
        async with slow(server) as (router, followers):
            await pause(PauseMode.ABORT, wait_s=0)(router)
            await followers.asked()
        assert len(followers.observed_gates) == 1
