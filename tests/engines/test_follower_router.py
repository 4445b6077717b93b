"""A following router: how its calls and engines follow changes of the head's gates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollyard.core import Deadline, Sampling
from rollyard.core.engine import Admission
from rollyard.core.policy import PauseMode
from rollyard.engines import Health, Router, VersionSpan
from rollyard.engines.routing.follower_router import FollowerRouter
from rollyard.engines.weights.weight_gates import EngineGate, PolicyGate, WeightGates
from rollyard.testing.script import Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.nodes import Fleet, Node
from tests.engines.parts import QUICK, complete, judge_of, routed, spec_of, text_of

pytestmark = pytest.mark.slow


def stalls_at_first(turn: Turn) -> Reply:
    """The first call of a session samples five tokens and then stalls."""
    return Reply("hello world", stall_after=5 if turn.session_id and turn.call == 0 else None)


@asynccontextmanager
async def joined(*servers: ScriptedEngine) -> AsyncGenerator[tuple[Router, Fleet, Node], None]:
    """A head over these servers, and one node."""
    async with routed(*servers) as head:
        fleet = Fleet(head)
        async with fleet.node() as node:
            yield head, fleet, node


def make_gates(*servers: ScriptedEngine, number: int = 1, **fields: object) -> WeightGates:
    """Gates of e1, e2, …, all with these fields."""
    specs = tuple(spec_of(server, f"e{count}") for count, server in enumerate(servers, 1))
    gates = tuple(replace(EngineGate(spec.id, 0), **fields) for spec in specs)  # type: ignore[arg-type]
    version = max((gate.version for gate in gates), default=0)
    return WeightGates(number, specs, (PolicyGate("default", version, True, False, gates),))


async def health(router: Router, engine_id: str, *expected: Health) -> str:
    async with asyncio.timeout(90):
        while True:
            status = next(status for status in router.list() if status.spec.id == engine_id)
            if status.health in expected:
                return status.stats.last_error
            await asyncio.sleep(0.005)


# --- the engines


async def test_engines_are_added_removed_and_changed_as_at_the_head() -> None:
    async with (
        ScriptedEngine(lambda _: "one") as one,
        ScriptedEngine(lambda _: "two") as two,
        joined(one) as (head, _, node),
    ):
        await head.add(spec_of(two, "e2"))
        await head.add(judge_of(two))
        await node.up("e1", "e2", "judge")
        assert (await node.router.ask([{"role": "user", "content": "?"}])).message["content"] == "two"
        await head.remove("e1")
        remaining = {status.spec.id for status in node.router.list()}
        assert remaining == {"e2", "judge"}, "it is removed at the node when this returns"
        await head.remove("e2")
        await head.add(spec_of(one, "e2", capacity=7))
        await node.up("e2", "judge")
        async with node.router.session("default", "s1") as session:
            assert text_of(await complete(session)) == "one"


async def test_an_engine_whose_spec_changed_is_replaced() -> None:
    async with (
        ScriptedEngine(lambda _: "one") as one,
        ScriptedEngine(lambda _: "two") as two,
        FollowerRouter(QUICK) as router,
    ):
        await router.follow(make_gates(one))
        await router.follow(make_gates(two, number=2))
        async with router.session("default", "s1") as session:
            assert text_of(await complete(session)) == "two"


async def test_an_engine_removed_at_the_head_has_no_calls_at_a_node() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as one,
        ScriptedEngine(lambda _: "hello world") as two,
        joined(one, two) as (head, _, node),
        node.router.session("default", "s1", avoid={"e2"}) as session,
    ):
        task = asyncio.create_task(complete(session))
        await one.busy()
        await head.remove("e1")
        assert one.running == 0
        assert text_of(await task) == "hello world" and session.engine.spec.id == "e2"


async def test_a_node_does_not_limit_the_sessions_that_the_head_admitted() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, routed() as head:
        await head.add(spec_of(server, "e1", capacity=1, admission=Admission.FIXED))
        fleet = Fleet(head)
        async with fleet.node() as node:
            assert head.seats("default").bound == 1 and node.router.seats("default").bound is None
            (status,) = node.router.list()
            assert status.cap is None


async def test_an_engine_must_answer_the_node_itself() -> None:
    """A node may not be able to reach an engine that the head can reach."""
    async with ScriptedEngine(lambda _: "ok") as server, FollowerRouter(QUICK) as router:
        await server.stop()
        await router.follow(make_gates(server))
        (status,) = router.list()
        assert status.health is Health.DOWN
        await server.start()
        await health(router, "e1", Health.UP)
        await server.stop()
        await health(router, "e1", Health.DOWN)


async def test_an_engine_not_admitted_by_the_head_is_not_used() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, FollowerRouter(QUICK) as router:
        await router.follow(make_gates(server, is_joined=False))
        async with asyncio.timeout(90):
            while router.list()[0].info is None:  # it is probed
                await asyncio.sleep(0.005)
        assert router.list()[0].health is Health.DOWN
        await router.follow(make_gates(server, number=2, version=4))
        async with router.session("default", "s1") as session:
            assert (await complete(session)).versions == (VersionSpan(4, 0, 3),)
            # a restarted head has not admitted it yet
            await router.follow(make_gates(server, number=3, is_joined=False))
            assert router.list()[0].health is Health.DOWN and router.list()[0].version == 4


async def test_a_call_continues_while_a_new_head_admits_its_engine() -> None:
    async with (
        ScriptedEngine(lambda turn: Reply("ok", stall_after=1 if turn.session_id else None)) as server,
        FollowerRouter(QUICK) as router,
    ):
        await router.follow(make_gates(server))
        await health(router, "e1", Health.UP)
        async with router.session("default", "s1") as session:
            task = asyncio.create_task(complete(session))
            await server.busy()
            await router.follow(make_gates(server, number=2, is_joined=False))
            await router.follow(make_gates(server, number=3))
            assert server.running == 1 and not server.aborted
            task.cancel()
            await asyncio.wait({task})


async def test_a_restarted_engine_stays_down_until_the_head_has_handled_it() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, FollowerRouter(QUICK) as router:
        server.version = "5"
        await router.follow(make_gates(server, version=5))
        await health(router, "e1", Health.UP)
        await server.stop()
        await health(router, "e1", Health.DOWN)
        server.version = "default"  # as after loading its model again
        await server.start()
        async with asyncio.timeout(90):
            while "was it restarted?" not in router.list()[0].stats.last_error:
                await asyncio.sleep(0.005)
        assert router.list()[0].health is Health.DOWN
        server.version = "5"
        await health(router, "e1", Health.UP)


async def test_an_engine_with_other_versions_than_the_heads_is_used() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, FollowerRouter(QUICK) as router:
        server.version = "70"  # set by its trainer; it does not accept Rollyard's
        await router.follow(make_gates(server, version=5))
        for _ in range(2):
            await health(router, "e1", Health.UP)
            await server.stop()
            await health(router, "e1", Health.DOWN)
            await server.start()
        await health(router, "e1", Health.UP)


# --- its calls


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_abort_cuts_calls_and_the_rest_comes_from_the_new_weights(dialect: str) -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect=dialect) as server,  # type: ignore[arg-type]
        joined(server) as (head, _, node),
        node.router.session("default", "s1") as session,
    ):
        await head.policies.resume("default", 6)
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        await head.policies.pause("default", holder="me", mode=PauseMode.ABORT)
        assert server.running == 0 and not task.done() and not clock.is_running
        await head.policies.resume("default", 7)
        generation = await task
        assert text_of(generation) == "hello world"
        assert generation.versions == (VersionSpan(6, 0, 5), VersionSpan(7, 5, 12))
        salts = [call.body.get("cache_salt", call.body.get("extra_key")) for call in server.calls]
        assert salts == ["default:6", "default:7"]
        steps = ["version 6", "clear", "resume", "pause abort", "version 7", "clear", "resume"]
        assert list(server.control.log) == steps, "a node sends no control requests"


async def test_an_engine_is_paused_only_after_the_calls_of_nodes_have_drained() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        joined(server) as (head, fleet, node),
        node.router.session("default", "s1") as session,
    ):
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        pausing = asyncio.create_task(head.policies.pause("default", holder="me", mode=PauseMode.DRAIN))
        await fleet.is_waited_for()
        async with asyncio.timeout(90):
            while not node.router.is_paused("default"):
                await asyncio.sleep(0)
        assert clock.is_running and not task.done() and not server.control.log
        second = asyncio.create_task(complete(session))
        (piece,) = server._work.running.values()
        piece.end("done")
        await pausing
        assert task.done() and text_of(await task) == "hello world" and not server.aborted
        assert list(server.control.log) == ["pause wait"] and not second.done() and len(server.calls) == 1
        await head.policies.resume("default", 1)
        assert (await second).versions == (VersionSpan(1, 0, 12),)


async def test_an_abort_after_a_drain_cuts_the_draining_calls_and_completes_both() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        joined(server) as (head, fleet, node),
        node.router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        draining = asyncio.create_task(head.policies.pause("default", holder="me", mode=PauseMode.DRAIN))
        await fleet.is_waited_for()
        async with asyncio.timeout(90):
            while not node.router.is_paused("default"):
                await asyncio.sleep(0)
        assert node.tasks and server.running == 1
        await head.policies.pause("default", holder="me", mode=PauseMode.ABORT)
        await draining
        assert server.running == 0 and not node.tasks
        await head.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_a_drain_that_is_called_off_counts_as_applied() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        FollowerRouter(QUICK) as router,
    ):
        await router.follow(make_gates(server))
        async with router.session("default", "s1") as session:
            task = asyncio.create_task(complete(session))
            await server.busy()
            draining = asyncio.create_task(
                router.follow(make_gates(server, number=2, is_paused=True, mode=PauseMode.DRAIN))
            )
            await asyncio.sleep(0)
            assert not draining.done()
            await router.follow(make_gates(server, number=3))
            await draining
            assert server.running == 1 and not server.aborted
            task.cancel()
            await asyncio.wait({task})


async def test_keep_freezes_calls_that_report_versions_and_they_continue_in_place() -> None:
    async with (
        ScriptedEngine(
            lambda turn: Reply("hello world", stall_after=5 if turn.session_id and turn.call == 1 else None)
        ) as server,
        joined(server) as (head, _, node),
        node.router.session("default", "s1") as session,
    ):
        await head.policies.resume("default", 4)
        await complete(session)  # shows that the engine reports its versions
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        await head.policies.pause("default", holder="me", mode=PauseMode.KEEP)
        assert server.running == 1 and not clock.is_running
        await head.policies.resume("default", 5)
        (piece,) = server._work.running.values()
        piece.end("done")
        generation = await task
        assert generation.versions == (VersionSpan(4, 0, 5), VersionSpan(5, 5, 12))
        assert len(server.calls) == 2, "it was never cut"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_keep_cuts_calls_that_cannot_report_their_versions(is_streamed: bool) -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect="vllm" if is_streamed else "sglang") as server,
        joined(server) as (head, _, node),
        node.router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session, on_tokens=(lambda _: None) if is_streamed else None))
        await server.busy()
        await head.policies.pause("default", holder="me", mode=PauseMode.KEEP)
        assert server.running == 0
        await head.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_keep_cuts_all_calls_if_the_engine_cannot_freeze_them() -> None:
    async with ScriptedEngine(
        lambda turn: Reply("hello world", stall_after=5 if turn.session_id and turn.call == 1 else None)
    ) as server:
        server.control.is_there = False
        server.version = "0"
        async with joined(server) as (head, _, node), node.router.session("default", "s1") as session:
            await complete(session)  # shows that the engine reports its versions
            task = asyncio.create_task(complete(session))
            await server.busy()
            await head.policies.pause("default", holder="me", mode=PauseMode.KEEP)
            assert server.running == 0
            server.version = "1"
            await head.policies.resume("default", 1)
            assert [span.version for span in (await task).versions] == [0, 1]


async def test_a_pause_of_the_gate_only_is_followed() -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect="sglang") as server,
        joined(server) as (head, _, node),
        node.router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        await head.pause("default")
        assert server.running == 0 and not task.done()
        head.resume("default", 2)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(2, 5, 12))
        assert not server.control.log


async def test_a_version_set_without_a_pause_cuts_calls_that_cannot_report_it() -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect="sglang") as server,
        joined(server) as (head, _, node),
        node.router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        await head.policies.resume("default", 3)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(3, 5, 12))


async def test_a_node_that_missed_the_pause_cuts_calls_that_cannot_report_versions() -> None:
    async with ScriptedEngine(stalls_at_first, dialect="sglang") as server, FollowerRouter(QUICK) as router:
        await router.follow(make_gates(server))
        async with router.session("default", "s1") as session:
            task = asyncio.create_task(complete(session))
            await server.busy()
            await router.follow(make_gates(server, number=9, version=3))
            assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(3, 5, 12))


async def test_a_chat_call_aborted_by_a_pause_is_repeated_even_if_it_ends_after_the_pause() -> None:
    async with ScriptedEngine(stalls_at_first) as server, FollowerRouter(QUICK) as router:
        await router.follow(make_gates(server))
        async with router.session("default", "s1") as session:
            messages = [{"role": "user", "content": "hello"}]
            chat = asyncio.create_task(
                session.chat(messages, sampling=Sampling(), tools=(), clock=Deadline(), model_s=30.0)
            )
            await server.busy()
            await router.follow(make_gates(server, number=2, is_paused=True, mode=PauseMode.ABORT))
            await router.follow(make_gates(server, number=3, version=1))
            server._end(list(server._work.running))
            assert (await chat).message["content"] == "hello world"


# --- some of the engines, and those that fail


async def test_a_rolling_update_moves_sessions_of_nodes() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as one,
        ScriptedEngine(stalls_at_first) as two,
        joined(one, two) as (head, _, node),
        node.router.session("default", "s1", avoid={"e2"}) as session,
    ):
        await head.policies.resume("default", 1)
        task = asyncio.create_task(complete(session))
        await one.busy()
        await head.policies.pause("default", holder="me", engines=["e1"])
        await two.busy()  # the session moved there, and continues with the old weights
        assert session.engine.spec.id == "e2" and one.running == 0
        await head.policies.resume("default", 2, engines=["e1"])
        await head.policies.pause("default", holder="me", engines=["e2"])
        await head.policies.resume("default", 2, engines=["e2"])
        generation = await task
        assert text_of(generation) == "hello world"
        assert [span.version for span in generation.versions] == [1, 2]


async def test_frozen_calls_continue_on_another_engine_when_the_update_is_abandoned() -> None:
    def script(turn: Turn) -> Reply:
        return Reply("hello world", stall_after=5 if turn.session_id and turn.call == 1 else None)

    async with (
        ScriptedEngine(script) as one,
        ScriptedEngine(lambda _: "hello world") as two,
        joined(one, two) as (head, _, node),
        node.router.session("default", "s1", avoid={"e2"}) as session,
    ):
        await head.policies.resume("default", 1)
        await complete(session)  # shows that the engine reports its versions
        task = asyncio.create_task(complete(session))
        await one.busy()
        await head.policies.pause("default", holder="me", mode=PauseMode.KEEP, engines=["e1"], lease_s=0.05)
        assert one.running == 1
        generation = await task
        assert text_of(generation) == "hello world" and session.engine.spec.id == "e2"
        assert await health(node.router, "e1", Health.QUARANTINED)


async def test_an_engine_quarantined_at_the_head_is_not_used_at_nodes() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as good,
        ScriptedEngine(lambda _: "ok") as bad,
        joined(good, bad) as (head, _, node),
        node.router.session("default", "s1", avoid={"e1"}) as session,
    ):
        await head.policies.pause("default", holder="me")
        bad.control.fail("clear", 100, 500)
        await head.policies.resume("default", 1)
        assert (await complete(session)).versions == (VersionSpan(1, 0, 3),)
        assert session.engine.spec.id == "e1" and not bad.calls
        assert "did not clear" in await health(node.router, "e2", Health.QUARANTINED)
        await asyncio.sleep(5 * QUICK.watch_s)
        await health(node.router, "e2", Health.QUARANTINED)  # its own watch does not bring it up

        bad.control._faults.clear()
        await head.policies.resume("default", 1)
        await node.up("e1", "e2")
        async with node.router.session("default", "s2", avoid={"e1"}) as other:
            assert (await complete(other)).versions == (VersionSpan(1, 0, 3),) and bad.calls


async def test_an_engine_released_by_the_head_is_checked_at_once() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        FollowerRouter(replace(QUICK, watch_s=600)) as router,
    ):
        await router.follow(make_gates(server, is_joined=False))
        await router.follow(make_gates(server, number=2))
        await health(router, "e1", Health.UP)
        await router.follow(make_gates(server, number=3, is_quarantined=True))
        await health(router, "e1", Health.QUARANTINED)
        await router.follow(make_gates(server, number=4))
        await health(router, "e1", Health.UP)


async def test_calls_of_a_node_leave_a_quarantined_engine() -> None:
    """The head found that the engine was restarted with other weights; the node has not noticed."""
    async with (
        ScriptedEngine(stalls_at_first, dialect="sglang") as one,
        ScriptedEngine(lambda _: "hello world") as two,
        FollowerRouter(QUICK) as router,
    ):
        gates = make_gates(one, two)
        await router.follow(gates)
        for engine_id in ("e1", "e2"):
            await health(router, engine_id, Health.UP)
        async with router.session("default", "s1", avoid={"e2"}) as session:
            task = asyncio.create_task(complete(session))
            await one.busy()
            (policy,) = gates.policies
            first = replace(policy.engines[0], is_quarantined=True, error="was it restarted?")
            policy = replace(policy, engines=(first, policy.engines[1]))
            await router.follow(replace(gates, number=2, policies=(policy,)))
            assert one.running == 0 and text_of(await task) == "hello world" and session.engine.spec.id == "e2"


# --- nodes that join and leave


async def test_a_node_that_joins_while_paused_waits_for_the_new_weights() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, routed(server) as head:
        fleet = Fleet(head)
        await head.policies.pause("default", holder="me")
        async with fleet.node(must_be_up=False) as node:
            session_opens = asyncio.create_task(node.router.open_session("default", "s1"))
            await asyncio.sleep(3 * QUICK.watch_s)
            assert not session_opens.done() and not server.calls
            await head.policies.resume("default", 8)
            session = await session_opens
            assert (await complete(session)).versions == (VersionSpan(8, 0, 3),)
            await session.close()


async def test_a_node_that_is_gone_is_not_waited_for() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        joined(server) as (head, fleet, first),
        fleet.node(),
    ):
        first.is_blocked = True  # it receives nothing
        pausing = asyncio.create_task(head.policies.pause("default", holder="me"))
        await fleet.is_waited_for()
        assert not server.control.log
        fleet.lose(first)
        await pausing
        assert list(server.control.log) == ["pause abort"]
        await head.policies.resume("default", 1)


async def test_an_engine_is_not_paused_before_all_nodes_have_applied_the_pause() -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect="sglang") as server,
        joined(server) as (head, fleet, first),
        fleet.node() as second,
        second.router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        second.is_blocked = True
        pausing = asyncio.create_task(head.policies.pause("default", holder="me"))
        await fleet.until(lambda: first.applied == head.gates().number)
        assert not server.control.log and server.running == 1 and not pausing.done()
        second.release()
        await pausing
        assert server.running == 0
        await head.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_a_node_cannot_update_weights() -> None:
    async with ScriptedEngine() as server, joined(server) as (_, _, node):
        for wrong in (node.router.policies.pause("default", holder="me"), node.router.policies.resume("default", 1)):
            with pytest.raises(RuntimeError, match="at the head"):
                await wrong


WORDS = 40


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_each_token_of_a_node_has_the_version_it_was_sampled_from(
    mode: PauseMode,
) -> None:
    """Two nodes, two engines that report no versions, eight updates. Each token is the number of its weights."""
    weights = 0

    def script(turn: Turn) -> Reply:
        return Reply(token_ids=(weights,) * WORDS, tokens_per_s=400.0) if turn.session_id else Reply("ok")

    async with (
        ScriptedEngine(script, is_scale_out=False) as one,
        ScriptedEngine(script, dialect="sglang") as two,
        joined(one, two) as (head, fleet, first),
        fleet.node() as second,
    ):
        done = asyncio.Event()
        samples: list[tuple[int, int]] = []

        async def play(node: Node, name: str) -> None:
            async with node.router.session("default", name) as session:
                while not done.is_set():
                    generation = await complete(session, max_tokens=WORDS)
                    assert len(generation.token_ids) == WORDS
                    for span in generation.versions:
                        samples.extend((span.version, token) for token in generation.token_ids[span.start : span.end])

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(play((first, second)[number % 2], f"s{number}"))
            for version in range(1, 9):
                await asyncio.gather(one.busy(), two.busy())
                await asyncio.sleep(0.02)
                await head.policies.pause("default", holder="me", mode=mode)
                assert (one.running, two.running) == (0, 0), "a token would come from half-written weights"
                weights = version
                await head.policies.resume("default", version)
            await asyncio.gather(one.busy(), two.busy())
            done.set()
        assert [pair for pair in samples if pair[0] != pair[1]] == []
        assert {version for version, _ in samples} == set(range(9))
