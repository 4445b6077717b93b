"""Weight updates: the order of the steps, the three modes, failures, and expired leases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollyard.core import Deadline, Sampling
from rollyard.core.failure import EngineUnavailable, NotFound, PolicyConflict, PolicyStuck
from rollyard.core.policy import PauseMode, PolicyRecord
from rollyard.engines import Generation, Health, Router, RouterSettings, VersionSpan
from rollyard.engines.weights.state import PolicyState, PolicyStatus
from rollyard.testing.script import Reply, Turn
from rollyard.testing.scripted_control import ControlFault, Step
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import QUICK, complete, routed, spec_of, text_of

pytestmark = pytest.mark.slow

DIALECTS = ["vllm", "sglang"]
STEPS: list[Step] = ["version", "clear", "resume"]


def stalls_at_first(turn: Turn) -> Reply:
    """The first call of a session, except a late one, samples five tokens and then stalls."""
    return Reply("hello world", stall_after=5 if turn.session_id not in ("", "late") and turn.call == 0 else None)


async def until(router: Router, is_so: Callable[[PolicyStatus], bool]) -> PolicyStatus:
    async with asyncio.timeout(90):
        while not is_so(status := router.policies.status("default")):
            await asyncio.sleep(0.005)
    return status


def engines_of(status: PolicyStatus) -> dict[str, tuple[int, str, bool]]:
    return {engine.id: (engine.version, engine.health.value, engine.is_paused) for engine in status.engines}


# --- the order, and the modes


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_update_runs_the_steps_on_every_engine_in_order(dialect: str) -> None:
    async with (
        ScriptedEngine(dialect=dialect) as one,  # type: ignore[arg-type]
        ScriptedEngine(dialect=dialect) as two,  # type: ignore[arg-type]
        routed(one, two) as router,
    ):
        notifications: list[tuple[str, int]] = []
        router.on_version.append(lambda policy, version: notifications.append((policy, version)))
        status = await router.policies.pause("default", holder="me")
        assert (status.state, status.holder, status.version) == (PolicyState.PAUSED, "me", 0)
        assert all(engine.is_paused for engine in status.engines) and notifications == []
        assert list(one.control.log) == list(two.control.log) == ["pause abort"] and one.control.is_paused
        status = await router.policies.resume("default", 3)
        assert (status.state, status.holder, status.mode) == (PolicyState.RUNNING, None, None)
        assert list(one.control.log) == list(two.control.log) == ["pause abort", "version 3", "clear", "resume"]
        assert engines_of(status) == {"e1": (3, "up", False), "e2": (3, "up", False)}
        assert router.version("default") == 3 and notifications == [("default", 3)]


async def test_the_first_version_is_set_even_if_it_is_0() -> None:
    """Otherwise an engine that was briefly unreachable would report no version, and count as replaced."""
    async with ScriptedEngine() as server, routed(server) as router:
        await router.policies.resume("default", 0)
        assert list(server.control.log) == ["version 0", "clear", "resume"] and server.version == "0"
        await router.policies.resume("default", 0)
        assert len(server.control.log) == 3, "it has the version"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_abort_keeps_the_tokens_and_the_rest_comes_from_the_new_weights(dialect: str) -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect=dialect) as server,  # type: ignore[arg-type]
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await router.policies.resume("default", 6)
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        await router.policies.pause("default", holder="me", mode=PauseMode.ABORT)
        assert server.running == 0 and not task.done() and not clock.is_running
        used_s = clock.used_s
        await asyncio.sleep(0.05)
        assert clock.used_s == used_s, "clocks are stopped during a pause"
        await router.policies.resume("default", 7)
        generation = await task
        assert text_of(generation) == "hello world"
        assert generation.versions == (VersionSpan(6, 0, 5), VersionSpan(7, 5, 12))
        salts = [call.body.get("cache_salt", call.body.get("extra_key")) for call in server.calls]
        assert salts == ["default:6", "default:7"]


async def test_a_continued_call_has_its_minimum_length_reduced() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session, sampling=Sampling(extra={"min_tokens": 9}), max_tokens=9))
        await server.busy()
        await router.policies.pause("default", holder="me")
        await router.policies.resume("default", 1)
        await task
        params = [call.body["sampling_params"] for call in server.calls]
        assert [(p["min_tokens"], p["max_tokens"]) for p in params] == [(9, 9), (4, 4)]


async def test_drain_lets_calls_end_by_themselves_and_their_clocks_run() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        status = await router.policies.pause("default", holder="me", mode=PauseMode.DRAIN, wait_s=0)
        assert status.state is PolicyState.PAUSING and clock.is_running
        second = asyncio.create_task(complete(session))
        (piece,) = server._work.running.values()
        piece.end("done")
        assert text_of(await task) == "hello world" and not server.aborted
        status = await router.policies.pause("default", holder="me", mode=PauseMode.DRAIN)
        assert status.state is PolicyState.PAUSED and list(server.control.log) == ["pause wait"]
        assert not second.done() and len(server.calls) == 1
        await router.policies.resume("default", 1)
        assert (await second).versions == (VersionSpan(1, 0, 12),)


async def test_a_drain_that_takes_too_long_can_be_turned_into_an_abort() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        status = await router.policies.pause("default", holder="me", mode=PauseMode.DRAIN, wait_s=0.01)
        assert status.state is PolicyState.PAUSING
        status = await router.policies.pause("default", holder="me", mode=PauseMode.ABORT)
        assert status.state is PolicyState.PAUSED
        await router.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_a_drain_longer_than_its_lease_is_still_pausing_while_its_holder_waits() -> None:
    """With any other state, a trainer would write weights while calls are in flight."""
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        status = await router.policies.pause("default", holder="me", mode=PauseMode.DRAIN, lease_s=0.05, wait_s=0.2)
        assert server.running == 1 and status.state is PolicyState.PAUSING
        await until(router, lambda status: status.state is PolicyState.ABANDONED)  # the lease runs from the reply on
        await router.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_a_pause_resumed_by_another_caller_before_it_completes_is_a_conflict() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        pausing = asyncio.create_task(router.policies.pause("default", holder="me", mode=PauseMode.DRAIN))
        await until(router, lambda status: status.state is PolicyState.PAUSING)
        await router.policies.resume("default", 1)
        with pytest.raises(PolicyConflict, match="resumed by another"):
            await pausing
        await task


async def test_a_pause_survives_a_failed_resume_by_another_caller() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        pausing = asyncio.create_task(router.policies.pause("default", holder="me", mode=PauseMode.DRAIN))
        await until(router, lambda status: status.state is PolicyState.PAUSING)
        server.control.fail("version", 1, 500)
        with pytest.raises(PolicyStuck):
            await router.policies.resume("default", 1)
        status = await pausing
        assert (status.state, status.holder, server.running) == (PolicyState.PAUSED, "me", 0)
        await router.policies.resume("default", 1)
        await task


async def test_keep_freezes_calls_that_report_versions_and_they_continue_in_place() -> None:
    stalling = Reply("hello world", stall_after=5)
    async with (
        ScriptedEngine(lambda turn: stalling if turn.session_id and turn.call == 1 else Reply("ok")) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await router.policies.resume("default", 4)
        await complete(session)  # shows that the engine reports its versions
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        (piece,) = server._work.running.values()
        await router.policies.pause("default", holder="me", mode=PauseMode.KEEP)
        at = piece.sampled()
        assert server.running == 1 and not clock.is_running and 0 < at < 12
        await router.policies.resume("default", 5)
        assert clock.is_running
        piece.end("done")
        generation = await task
        assert generation.versions == (VersionSpan(4, 0, at), VersionSpan(5, at, 12))
        assert text_of(generation) == "hello world" and len(server.calls) == 2, "it was never cut"
        assert list(server.control.log)[-4:] == ["pause keep", "version 5", "clear", "resume"]


async def test_keep_cuts_calls_that_cannot_be_frozen() -> None:
    async with (
        ScriptedEngine(stalls_at_first, dialect="sglang") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        await router.policies.pause("default", holder="me", mode=PauseMode.KEEP)
        assert server.running == 0
        await router.policies.resume("default", 1)
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_an_engine_without_control_routes_is_paused_by_its_gate_only(mode: PauseMode) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        server.control.is_there = False
        async with routed(server) as router, router.session("default", "s1") as session:
            (engine,) = router.list()
            assert engine.info is not None and any("VLLM_SERVER_DEV_MODE" in note for note in engine.info.notes)
            await router.policies.pause("default", holder="me", mode=mode)
            task = asyncio.create_task(complete(session))
            await asyncio.sleep(0.02)
            assert not task.done() and not server.calls
            status = await router.policies.resume("default", 9)
            assert engines_of(status) == {"e1": (9, "up", False)}
            assert (await task).versions == (VersionSpan(9, 0, 3),)


async def test_a_chat_call_aborted_by_a_pause_is_repeated() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        messages = [{"role": "user", "content": "hello"}]
        chat = asyncio.create_task(
            session.chat(messages, sampling=Sampling(), tools=(), clock=Deadline(), model_s=30.0)
        )
        await server.busy()
        await router.policies.pause("default", holder="me")
        assert server.running == 0 and not chat.done()
        await router.policies.resume("default", 1)
        assert (await chat).message["content"] == "hello world"


# --- failures


@pytest.mark.parametrize("fault", [500, "hang"])
@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_that_fails_a_step_is_quarantined_and_the_others_continue(
    step: Step, fault: ControlFault
) -> None:
    settings = replace(QUICK, control_s=5.0 if fault == 500 else 2.0)  # the other engine has to answer in it, too
    async with (
        ScriptedEngine(lambda _: "ok") as good,
        ScriptedEngine(lambda _: "ok") as bad,
        routed(good, bad, settings=settings) as router,
        router.session("default", "s1", avoid={"e1"}) as session,
    ):
        await router.policies.pause("default", holder="me")
        bad.control.fail(step, 100, fault)
        status = await router.policies.resume("default", 1)
        assert status.state is PolicyState.RUNNING
        assert engines_of(status)["e1"] == (1, "up", False)
        assert engines_of(status)["e2"][:2] == (0, "quarantined")
        (error,) = [engine.error for engine in status.engines if engine.error]
        assert "it did not" in error
        assert session.engine.spec.id == "e2"
        assert (await complete(session)).versions == (VersionSpan(1, 0, 3),)
        assert session.engine.spec.id == "e1", "sessions of a quarantined engine move"
        await asyncio.sleep(5 * settings.watch_s)
        assert router.list()[1].health is Health.QUARANTINED, "the watch does not bring it up, although it answers"

        bad.control._faults.clear()
        before = list(good.control.log)
        status = await router.policies.resume("default", 1)
        assert engines_of(status) == {"e1": (1, "up", False), "e2": (1, "up", False)}
        assert list(good.control.log) == before, "the engine that has the version gets no control request"


async def test_an_engine_that_does_not_pause_is_quarantined() -> None:
    async with ScriptedEngine(lambda _: "ok") as good, ScriptedEngine() as bad, routed(good, bad) as router:
        bad.control.fail("pause", 1, 500)
        status = await router.policies.pause("default", holder="me")
        assert status.state is PolicyState.PAUSED
        assert engines_of(status) == {"e1": (0, "up", True), "e2": (0, "quarantined", True)}
        assert engines_of(await router.policies.resume("default", 2))["e2"] == (2, "up", False)


async def test_clearing_a_held_cache_is_retried() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        server.control.fail("clear", 2, "held")
        status = await router.policies.resume("default", 2)
        assert engines_of(status) == {"e1": (2, "up", False)}
        assert list(server.control.log) == ["version 2", "clear held", "clear held", "clear", "resume"]


async def test_if_all_engines_fail_the_policy_stays_paused_with_the_reasons() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await router.policies.pause("default", holder="me")
        task = asyncio.create_task(complete(session))
        server.control.fail("resume", 1, 500)
        with pytest.raises(PolicyStuck, match="e1: it did not resume") as raised:
            await router.policies.resume("default", 1)
        assert list(raised.value.data["engines"]) == ["e1"]  # type: ignore[arg-type]
        status = router.policies.status("default")
        assert (status.state, status.version, status.holder) == (PolicyState.PAUSED, 0, "me")
        assert status.lease_left_s is not None and not task.done()
        status = await router.policies.resume("default", 1)
        assert status.state is PolicyState.RUNNING
        assert (await task).versions == (VersionSpan(1, 0, 3),)


async def test_a_restarted_engine_is_not_assumed_to_have_the_weights() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, routed(server) as router:
        await router.policies.resume("default", 5)
        await server.stop()
        await until(router, lambda status: status.engines[0].health is Health.DOWN)
        server.version = "default"  # as after loading its model again
        await server.start()
        status = await until(router, lambda status: status.engines[0].health is not Health.DOWN)
        assert status.engines[0].health is Health.QUARANTINED and "'default'" in (status.engines[0].error or "")
        status = await router.policies.resume("default", 5)
        assert engines_of(status) == {"e1": (5, "up", False)}


# --- the lease


async def test_an_expired_lease_resumes_nothing_until_a_resume_names_a_version() -> None:
    settings = replace(QUICK, engine_wait_s=0.05)
    async with (
        ScriptedEngine(stalls_at_first) as server,
        routed(server, settings=settings) as router,
        router.session("default", "s1") as session,
    ):
        clock = Deadline(60.0)
        task = asyncio.create_task(complete(session, clock))
        await server.busy()
        await router.policies.pause("default", holder="me", lease_s=0.02)
        status = await until(router, lambda status: status.state is PolicyState.ABANDONED)
        assert engines_of(status) == {"e1": (0, "quarantined", True)}
        assert status.holder == "me" and status.lease_left_s is None
        used_s = clock.used_s
        late = asyncio.create_task(late_session(router))
        await asyncio.sleep(0.2)  # longer than engine_wait_s, the limit for an engine that is only down
        assert not task.done() and not late.done() and clock.used_s == used_s and server.control.is_paused
        assert list(server.control.log) == ["pause abort"]
        status = await router.policies.resume("default", 2)
        assert engines_of(status) == {"e1": (2, "up", False)}
        assert (await task).versions == (VersionSpan(0, 0, 5), VersionSpan(2, 5, 12))
        assert await late == "hello world"


async def late_session(router: Router) -> str:
    async with router.session("default", "late") as session:
        return text_of(await complete(session, resume=None, max_tokens=100))


async def test_the_holder_can_renew_an_expired_lease() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        with pytest.raises(PolicyConflict, match="no pause to renew"):
            await router.policies.renew("default", holder="me", lease_s=1)
        await router.policies.pause("default", holder="me", lease_s=0.02)
        await until(router, lambda status: status.state is PolicyState.ABANDONED)
        with pytest.raises(PolicyConflict, match="held by me"):
            await router.policies.renew("default", holder="other", lease_s=60)
        status = await router.policies.renew("default", holder="me", lease_s=60)
        assert (status.state, status.lease_s) == (PolicyState.PAUSED, 60)
        assert engines_of(status) == {"e1": (0, "up", True)}
        assert (await router.policies.resume("default", 1)).state is PolicyState.RUNNING


async def test_another_caller_can_pause_an_abandoned_policy_but_not_a_held_one() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        await router.policies.pause("default", holder="me")
        with pytest.raises(PolicyConflict, match="held by me"):
            await router.policies.pause("default", holder="other")
        await router.policies.renew("default", holder="me", lease_s=0.01)
        await until(router, lambda status: status.state is PolicyState.ABANDONED)
        status = await router.policies.pause("default", holder="other")
        assert (status.state, status.holder) == (PolicyState.PAUSED, "other")


async def test_unknown_policies_and_engines_are_not_found() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        for wrong in (
            router.policies.pause("unknown", holder="me"),
            router.policies.resume("unknown", 1),
            router.policies.renew("unknown", holder="me", lease_s=1),
            router.policies.pause("default", holder="me", engines=["e9"]),
            router.policies.resume("default", 1, engines=["e9"]),
        ):
            with pytest.raises(NotFound):
                await wrong
        assert router.policies.status("default").state is PolicyState.RUNNING


async def test_a_pause_beyond_pause_wait_s_is_an_infra_failure() -> None:
    settings: RouterSettings = replace(QUICK, pause_wait_s=0.02)
    async with ScriptedEngine() as server, routed(server, settings=settings) as router:
        await router.policies.pause("default", holder="me", lease_s=0.01)
        await until(router, lambda status: status.state is PolicyState.ABANDONED)
        with pytest.raises(EngineUnavailable, match="was paused for more than"):
            await late_session(router)


# --- some of the engines


async def test_a_rolling_update_moves_the_sessions_of_the_engines_that_it_aborts() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as one,
        ScriptedEngine(stalls_at_first) as two,
        routed(one, two) as router,
        router.session("default", "s1", avoid={"e2"}) as session,
    ):
        await router.policies.resume("default", 1)
        task = asyncio.create_task(complete(session))
        await one.busy()
        status = await router.policies.pause("default", holder="me", engines=["e1"])
        assert engines_of(status) == {"e1": (1, "up", True), "e2": (1, "up", False)}
        assert not router.is_paused("default")
        await two.busy()  # the session moved there, and continues with the old weights
        assert session.engine.spec.id == "e2"
        status = await router.policies.resume("default", 2, engines=["e1"])
        assert engines_of(status) == {"e1": (2, "up", False), "e2": (1, "up", False)}
        assert status.version == router.version("default") == 2 and status.state is PolicyState.RUNNING
        assert router.policies.settled_version("default") is None, "an evaluation started now would have two versions"
        await router.policies.pause("default", holder="me", engines=["e2"])
        await router.policies.resume("default", 2, engines=["e2"])
        generation = await task
        assert text_of(generation) == "hello world"
        assert [span.version for span in generation.versions] == [1, 2]
        assert router.policies.settled_version("default") == 2
        assert list(two.control.log) == ["version 1", "clear", "resume", "pause abort", "version 2", "clear", "resume"]


async def test_sessions_wait_during_a_rolling_update_with_drain() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as one,
        ScriptedEngine(lambda _: "ok") as two,
        routed(one, two) as router,
        router.session("default", "s1", avoid={"e2"}) as session,
    ):
        await router.policies.pause("default", holder="me", engines=["e1"], mode=PauseMode.DRAIN)
        task = asyncio.create_task(complete(session))
        assert text_of(await asyncio.create_task(other_session(router))) == "ok", "the other engine continues"
        assert not task.done()
        await router.policies.resume("default", 3)
        assert (await task).versions == (VersionSpan(3, 0, 3),) and session.engine.spec.id == "e1"
        assert "version 3" not in two.control.log, "it was not part of the update"


async def other_session(router: Router) -> Generation:
    async with router.session("default", "s2") as session:
        assert session.engine.spec.id == "e2"
        return await complete(session)


# --- added engines, and restarts of the service


async def test_an_added_engine_gets_the_version_of_its_policy() -> None:
    async with ScriptedEngine() as one, ScriptedEngine(lambda _: "ok") as two, routed(one) as router:
        await router.add(spec_of(two, "e2"))
        assert list(two.control.log) == [], "no version was named"
        await router.remove("e2")
        await router.policies.resume("default", 7)
        await router.add(spec_of(two, "e2"))
        assert list(two.control.log) == ["version 7"]
        assert engines_of(router.policies.status("default"))["e2"] == (7, "up", False)
        await router.remove("e2")
        two.control.fail("version", 1, 500)
        status = await router.add(spec_of(two, "e2"))
        assert status.health is Health.QUARANTINED and "could not be given its version" in status.stats.last_error


async def test_an_engine_added_during_a_pause_waits_for_the_resume() -> None:
    async with ScriptedEngine() as one, ScriptedEngine(lambda _: "ok") as two, routed(one) as router:
        await router.policies.pause("default", holder="me")
        assert (await router.add(spec_of(two, "e2"))).is_paused
        assert list(two.control.log) == ["pause abort"]
        status = await router.policies.resume("default", 1)
        assert engines_of(status) == {"e1": (1, "up", False), "e2": (1, "up", False)}
        assert list(two.control.log) == ["pause abort", "version 1", "clear", "resume"]


async def test_saved_policies_survive_a_restart() -> None:
    saved: dict[str, PolicyRecord] = {}

    async def save(record: PolicyRecord) -> None:
        saved[record.name] = record

    async with ScriptedEngine(lambda _: "ok") as one, ScriptedEngine(lambda _: "ok") as two:
        async with routed(one, two) as router:
            router.policies.save = save
            two.control.fail("clear", 100, 500)
            await router.policies.resume("default", 4)
            await router.policies.pause("default", holder="me", engines=["e1"])
        async with Router(QUICK) as router:
            router.policies.restore(saved.values())
            router.policies.save = save
            await router.add(spec_of(one, "e1"))
            await router.add(spec_of(two, "e2"))
            status = router.policies.status("default")
            assert (status.state, status.version, status.holder) == (PolicyState.ABANDONED, 4, "me")
            assert engines_of(status) == {"e1": (4, "quarantined", True), "e2": (0, "quarantined", False)}
            two.control._faults.clear()
            status = await router.policies.resume("default", 5)
            assert engines_of(status) == {"e1": (5, "up", False), "e2": (5, "up", False)}
        one.version = "default"
        async with Router(QUICK) as router:
            router.policies.restore(saved.values())
            await router.add(spec_of(one, "e1"))
            await router.add(spec_of(two, "e2"))
            status = router.policies.status("default")
            assert (status.state, status.version) == (PolicyState.RUNNING, 5)
            assert engines_of(status) == {"e1": (5, "quarantined", False), "e2": (5, "up", False)}


async def test_a_pause_is_saved_before_the_engines_are_paused() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        order: list[object] = []

        async def save(record: PolicyRecord) -> None:
            order.append((record.is_paused, record.version, list(server.control.log)))

        router.policies.save = save
        await router.policies.pause("default", holder="me")
        await router.policies.resume("default", 1)
        assert order == [(True, 0, []), (False, 1, ["pause abort", "version 1", "clear", "resume"])]


async def test_the_state_is_pausing_while_a_pause_is_saved() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        states: list[PolicyState] = []

        async def save(_: PolicyRecord) -> None:
            states.append(router.policies.status("default").state)

        router.policies.save = save
        await router.policies.pause("default", holder="me")
        assert states == [PolicyState.PAUSING]


async def test_an_engine_absent_at_the_resume_waits_for_another_one() -> None:
    """It is still paused by Rollyard: if it were probed, it would not answer, and would never come up."""
    saved: dict[str, PolicyRecord] = {}

    async def save(record: PolicyRecord) -> None:
        saved[record.name] = record

    async with ScriptedEngine(lambda _: "ok") as server:
        async with routed(server) as router:
            router.policies.save = save
            await router.policies.pause("default", holder="me")
        async with Router(QUICK) as router:
            router.policies.restore(saved.values())
            router.policies.save = save
            await router.policies.resume("default", 5)
        async with Router(QUICK) as router:
            router.policies.restore(saved.values())
            status = await router.add(spec_of(server, "e1"))
            assert status.health is Health.QUARANTINED and "left while it was paused" in status.stats.last_error
            assert engines_of(await router.policies.resume("default", 5)) == {"e1": (5, "up", False)}


async def test_a_listener_that_fails_does_not_keep_the_policy_paused() -> None:
    async with ScriptedEngine() as server, routed(server) as router:

        def break_down(policy: str, version: int) -> None:
            raise RuntimeError("a listener broke")

        router.on_version.append(break_down)
        assert (await router.policies.resume("default", 1)).state is PolicyState.RUNNING


async def test_an_engine_removed_during_an_update_does_not_block_it() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        await router.policies.pause("default", holder="me")
        await router.remove("e2")
        status = await router.policies.resume("default", 1)
        assert engines_of(status) == {"e1": (1, "up", False)} and status.state is PolicyState.RUNNING


async def test_an_engine_removed_while_paused_can_be_added_again() -> None:
    async with ScriptedEngine() as one, ScriptedEngine(lambda _: "ok") as two, routed(one, two) as router:
        await router.policies.pause("default", holder="me")
        await router.remove("e2")
        assert (await router.add(spec_of(two, "e2"))).health is Health.QUARANTINED, "it cannot be probed"
        assert engines_of(await router.policies.resume("default", 1))["e2"] == (1, "up", False)


async def test_a_removed_engine_is_not_paused() -> None:
    async with (
        ScriptedEngine(stalls_at_first) as one,
        ScriptedEngine() as two,
        routed(one, two) as router,
        router.session("default", "s1", avoid={"e2"}) as session,
    ):
        task = asyncio.create_task(complete(session))
        await one.busy()
        await router.policies.pause("default", holder="me", mode=PauseMode.DRAIN, wait_s=0)
        await router.remove("e1")
        assert (await router.policies.pause("default", holder="me")).state is PolicyState.PAUSED
        assert list(one.control.log) == []
        task.cancel()
        await asyncio.wait({task})


async def test_an_engine_removed_while_a_pause_is_saved_is_not_paused() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:

        async def save(_: PolicyRecord) -> None:
            await router.remove("e2")

        router.policies.save = save
        status = await router.policies.pause("default", holder="me")
        assert engines_of(status) == {"e1": (0, "up", True)} and list(two.control.log) == []


async def test_a_version_that_no_engine_has_is_not_the_policys_version() -> None:
    """Otherwise an evaluation would be pinned to weights that no engine has."""
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        await router.policies.resume("default", 1)
        notifications: list[tuple[str, int]] = []
        router.on_version.append(lambda policy, version: notifications.append((policy, version)))
        await router.policies.pause("default", holder="me", engines=["e2"])
        await router.remove("e2")
        status = await router.policies.resume("default", 2)
        assert (status.state, status.version) == (PolicyState.RUNNING, 1)
        assert notifications == [("default", 1)], "listeners are notified of the end of the update"
        assert engines_of(status) == {"e1": (1, "up", False)}


async def test_kept_calls_of_an_engine_that_fails_continue_on_another() -> None:
    async with (
        ScriptedEngine(
            lambda turn: Reply("hello world", stall_after=5 if turn.session_id and turn.call == 1 else None)
        ) as one,
        ScriptedEngine(lambda _: "hello world") as two,
        routed(one, two) as router,
        router.session("default", "s1", avoid={"e2"}) as session,
    ):
        await router.policies.resume("default", 1)
        await complete(session)  # shows that the engine reports its versions
        task = asyncio.create_task(complete(session))
        await one.busy()
        await router.policies.pause("default", holder="me", mode=PauseMode.KEEP)
        assert one.running == 1
        one.control.fail("resume", 1, 500)
        await router.policies.resume("default", 2)
        generation = await task
        assert text_of(generation) == "hello world" and session.engine.spec.id == "e2"
        assert generation.versions == (VersionSpan(1, 0, 5), VersionSpan(2, 5, 12))


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_completions_are_complete_with_increasing_versions_across_updates(mode: PauseMode) -> None:
    """Twenty sessions on two kinds of engines, with eight updates."""
    words = "the quick brown fox jumps over the lazy dog"

    def script(turn: Turn) -> Reply:
        return Reply(words, tokens_per_s=200.0) if turn.session_id else Reply("ok")

    async with (
        ScriptedEngine(script) as one,
        ScriptedEngine(script, dialect="sglang") as two,
        routed(one, two) as router,
    ):
        done = asyncio.Event()
        generations: list[Generation] = []

        async def play(number: int) -> None:
            async with router.session("default", f"s{number}") as session:
                while not done.is_set():
                    generations.append(await complete(session, on_tokens=(lambda _: None) if number % 3 == 0 else None))

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(play(number))
            for version in range(1, 9):
                await one.busy()
                await asyncio.sleep(0.05)
                status = await router.policies.pause("default", holder="me", mode=mode)
                assert status.state is PolicyState.PAUSED
                if mode is not PauseMode.KEEP:
                    assert (one.running, two.running) == (0, 0)
                await router.policies.resume("default", version)
            done.set()
        assert len(generations) > 20
        for generation in generations:
            assert text_of(generation) == words
            spans = generation.versions
            assert [span.version for span in spans] == sorted({span.version for span in spans})
            assert (spans[0].start, spans[-1].end) == (0, len(generation.token_ids))
        assert {span.version for generation in generations for span in generation.versions} == set(range(9))
        assert all(stats.stats.failures == 0 for stats in router.list())
