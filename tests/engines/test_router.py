"""Routing: the engine of a session, and engines that are added, removed, fail or get new weights."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from rollyard.core import Deadline
from rollyard.core.failure import EngineExists, EngineUnavailable, InvalidRequest, JudgeUnreachable, NotFound
from rollyard.engines import EngineSpec, Health, Kind, Router, VersionSpan
from rollyard.testing.script import Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import QUICK, complete, judge_of, routed, spec_of, text_of


async def until_health(router: Router, health: Health, index: int = 0) -> None:
    while router.list()[index].health is not health:
        await asyncio.sleep(0.002)


async def test_sessions_stick_and_new_ones_go_to_the_least_loaded_by_capacity() -> None:
    async with ScriptedEngine() as server, Router(QUICK) as router, AsyncExitStack() as stack:
        await router.add(spec_of(server, "small", capacity=1))
        await router.add(spec_of(server, "large", capacity=3))
        sessions = [await stack.enter_async_context(router.session("default", f"s{i}")) for i in range(8)]
        counts = {status.spec.id: status.stats.sessions for status in router.list()}
        assert counts == {"small": 2, "large": 6}
        before = sessions[0].engine
        for _ in range(3):
            await complete(sessions[0])
        assert sessions[0].engine is before
        await stack.aclose()
        assert all(status.stats.sessions == 0 for status in router.list())


async def test_calls_in_flight_break_ties() -> None:
    async with (
        ScriptedEngine(lambda t: Reply("x", stall_after=0 if t.session_id == "busy" else None)) as server,
        Router(QUICK) as router,
        AsyncExitStack() as stack,
    ):
        await router.add(spec_of(server, "a"))
        await router.add(spec_of(server, "b"))
        busy = await stack.enter_async_context(router.session("default", "busy"))
        await stack.enter_async_context(router.session("default", "quiet"))
        task = asyncio.create_task(complete(busy))
        await server.busy()
        third = await stack.enter_async_context(router.session("default", "third"))
        assert third.engine is not busy.engine
        task.cancel()
        await asyncio.wait({task})


async def test_the_heap_does_not_grow_with_the_calls() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            for _ in range(100):
                await complete(session)
        assert len(router.pool("default")._heap) < 100


async def test_an_engine_added_later_gets_its_share_of_sessions() -> None:
    async with ScriptedEngine() as server, routed(server) as router, AsyncExitStack() as stack:
        for i in range(4):
            await stack.enter_async_context(router.session("default", f"a{i}"))
        await router.add(spec_of(server, "late"))
        for i in range(6):
            await stack.enter_async_context(router.session("default", f"b{i}"))
        assert [status.stats.sessions for status in router.list()] == [5, 5]


async def test_policies_and_judges_have_engines_of_their_own() -> None:
    async with (
        ScriptedEngine(lambda _: "policy") as one,
        ScriptedEngine(lambda _: "judge") as two,
        Router(replace(QUICK, engine_wait_s=0.01)) as router,
    ):
        await router.add(spec_of(one, "e1", policy="actor"))
        await router.add(judge_of(two))
        with pytest.raises(EngineUnavailable):
            await router.open_session("critic", "s")
        async with router.session("actor", "s") as session:
            assert text_of(await complete(session)) == "policy"
        assert (await router.ask([{"role": "user", "content": "?"}])).message["content"] == "judge"


async def test_another_judge_is_tried_before_judge_unreachable_is_raised() -> None:
    async with ScriptedEngine(lambda _: "one") as one, ScriptedEngine(lambda _: "two") as two, Router(QUICK) as router:
        with pytest.raises(JudgeUnreachable, match="no engine of role judge"):
            await router.ask([])
        await router.add(judge_of(one, "j1"))
        await router.add(judge_of(two, "j2"))
        await one.stop()
        answers = {str((await router.ask([{"role": "user", "content": "?"}])).message["content"]) for _ in range(4)}
        assert answers == {"two"}
        await two.stop()
        with pytest.raises(JudgeUnreachable):
            await router.ask([{"role": "user", "content": "?"}])


async def test_a_judge_has_a_deadline() -> None:
    settings = replace(QUICK, judge_s=0.05, judge_tries=1)
    async with ScriptedEngine(lambda _: Reply("x", stall_after=0)) as server, Router(settings) as router:
        await router.add(judge_of(server))
        with pytest.raises(JudgeUnreachable, match="did not answer in"):
            await router.ask([{"role": "user", "content": "?"}])


async def test_a_duplicate_id_and_an_unreachable_engine_are_not_added() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        with pytest.raises(EngineExists):
            await router.add(spec_of(server, "e1"))
        dead = EngineSpec("dead", "http://127.0.0.1:9", Kind.VLLM)
        with pytest.raises(EngineUnavailable):
            await router.add(dead)
        assert [status.spec.id for status in router.list()] == ["e1"]
        with pytest.raises(NotFound):
            await router.remove("dead")


async def test_an_engine_that_need_not_answer_yet_is_watched_until_it_does() -> None:
    async with ScriptedEngine() as server, Router(QUICK) as router:
        await server.stop()
        status = await router.add(spec_of(server), must_answer=False)
        assert status.health is Health.DOWN and status.info is None
        opening = asyncio.create_task(router.open_session("default", "s1"))
        await server.start()
        session = await opening
        assert router.list()[0].info is not None
        await session.close()


async def test_an_engine_refused_by_vetting_is_still_watched() -> None:
    """A refusal of any kind must not end the watch: its tokenizer, for example, may be fixed later."""
    refusals = [InvalidRequest("no renderer"), InvalidRequest("no renderer"), ValueError("a broken file")]

    async def vet(_: object) -> bool:
        if refusals:
            raise refusals.pop()
        return True

    async with ScriptedEngine() as server, Router(QUICK, vet=vet) as router:
        await server.stop()
        await router.add(spec_of(server), must_answer=False)
        await server.start()
        await until_health(router, Health.UP)
        assert not refusals


async def test_a_policy_is_not_dropped_while_an_engine_is_added_to_it() -> None:
    """Its last run may be deleted during the probe. The engine would join a pool that no session can find."""

    async def vet(_: object) -> bool:
        router.forget("actor")
        return True

    async with ScriptedEngine() as server, Router(QUICK, vet=vet) as router:
        await router.add(spec_of(server, policy="actor"))
        assert router.up("actor") == {"e1"}
        await router.remove("e1")
        dropped = router.pool("actor")
        router.forget("actor")
        assert router.pool("actor") is not dropped


async def test_sessions_of_a_removed_engine_move_with_their_tokens() -> None:
    def script(turn: Turn) -> Reply:
        return Reply("hello world", stall_after=5 if turn.session_id else None)

    async with ScriptedEngine(script) as one, ScriptedEngine(lambda _: "hello world") as two, routed(one) as router:
        async with router.session("default", "s1") as session:
            task = asyncio.create_task(complete(session))
            await one.busy()
            await router.add(spec_of(two, "e2"))
            await router.remove("e1")
            assert text_of(await task) == "hello world"
            assert len(two.calls[0].prompt_ids) == len(one.calls[0].prompt_ids) + 5
            assert [status.spec.id for status in router.list()] == ["e2"]
        await router.clear()
        assert router.list() == []


async def test_the_breaker_opens_and_only_a_sampled_token_closes_it() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as bad,
        ScriptedEngine(lambda _: "ok") as good,
        routed(bad, good) as router,
        AsyncExitStack() as stack,
    ):
        sessions = [await stack.enter_async_context(router.session("default", f"s{i}")) for i in range(6)]
        bad.script = lambda _: Reply(fault=500)
        assert {text_of(await complete(session)) for session in sessions} == {"ok"}
        status = router.list()[0]
        assert status.health is Health.DOWN and status.stats.failures == 3
        assert status.stats.last_error == "it answered 500 to a call", "the errors of all sessions contain this"
        assert "a fault of status 500" in status.stats.last_error_words
        assert bad.is_healthy, "a passed health check is not enough"
        total = len(bad.requests)
        while len(bad.requests) < total + 2:
            await asyncio.sleep(0.002)
        status = router.list()[0]
        assert status.health is Health.DOWN
        assert status.stats.last_error == "it answered 500 to a call", "that of a trial, too"
        bad.script = lambda _: "ok"
        await until_health(router, Health.UP)


async def test_an_unhealthy_engine_gets_no_new_sessions() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router, AsyncExitStack() as stack:
        one.is_healthy = False
        await until_health(router, Health.DOWN)
        sessions = [await stack.enter_async_context(router.session("default", f"s{i}")) for i in range(3)]
        assert {session.engine.spec.id for session in sessions} == {"e2"}


async def test_a_paused_policy_holds_new_calls_and_their_clocks() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await router.pause("default")
        assert router.is_paused("default")
        clock = Deadline(5.0)
        task = asyncio.create_task(complete(session, clock))
        await asyncio.sleep(0.05)
        assert not task.done() and not server.calls and clock.used_s == 0.0
        router.resume("default", 3)
        generation = await task
        assert generation.versions == (VersionSpan(3, 0, 3),)
        assert server.calls[0].body["cache_salt"] == "default:3"
        assert router.version("default") == 3


async def test_a_pause_is_bounded_by_pause_wait_s() -> None:
    async with (
        ScriptedEngine() as server,
        routed(server, settings=replace(QUICK, pause_wait_s=0.02)) as router,
        router.session("default", "s1") as session,
    ):
        await router.pause("default")
        with pytest.raises(EngineUnavailable, match="was paused for more than"):
            await complete(session)


async def test_a_call_that_cannot_report_versions_is_cut_before_the_weights_change() -> None:
    def script(turn: Turn) -> Reply:
        return Reply("hello world", stall_after=5 if turn.session_id and turn.call == 0 else None)

    async with (
        ScriptedEngine(script, dialect="sglang") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        await router.pause("default")
        assert server.running == 0, "a pause returns when no call samples any more"
        assert not task.done()
        router.resume("default", 1)
        generation = await task
        assert text_of(generation) == "hello world"
        assert generation.versions == (VersionSpan(0, 0, 5), VersionSpan(1, 5, 12))


async def test_a_call_that_reports_versions_continues_during_a_pause_with_its_clock_stopped() -> None:
    def script(turn: Turn) -> Reply:
        return Reply("hello world", latency_s=0.1 if turn.session_id and turn.call == 1 else 0.0)

    async with ScriptedEngine(script) as server, routed(server) as router:
        server.version = "4"
        async with router.session("default", "s1") as session:
            assert (await complete(session)).versions == (VersionSpan(4, 0, 12),)
            clock = Deadline(60.0)
            task = asyncio.create_task(complete(session, clock))
            await server.busy()
            assert clock.is_running
            await router.pause("default")
            assert not clock.is_running and server.running == 1
            assert (await task).versions == (VersionSpan(4, 0, 12),)
            assert len(server.calls) == 2, "it was not cut"


async def test_calls_and_tokens_are_counted() -> None:
    async with ScriptedEngine(lambda _: "ok") as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            await complete(session)
            await complete(session)
        stats = router.list()[0].stats
        assert (stats.calls, stats.tokens, stats.sessions, stats.in_flight) == (2, 6, 0, 0)
        assert stats.prompt_tokens == 2 * len(server.calls[0].prompt_ids)
        assert stats.cached_tokens == len(server.calls[0].prompt_ids) - 1


async def test_closing_the_router_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with ScriptedEngine() as server, routed(server, server) as router, router.session("default", "s1") as session:
        await complete(session)
    assert {t for t in asyncio.all_tasks() - before if "watch" in t.get_name() or "free" in t.get_name()} == set()


async def test_a_session_avoids_the_given_engines_unless_there_is_no_other() -> None:
    async with ScriptedEngine() as server, Router(QUICK) as router, AsyncExitStack() as stack:
        await router.add(spec_of(server, "a"))
        only = await stack.enter_async_context(router.session("default", "s0", avoid={"a"}))
        assert only.engine.spec.id == "a"
        await router.add(spec_of(server, "b"))
        for number in range(3):
            other = await stack.enter_async_context(router.session("default", f"s{1 + number}", avoid={"a"}))
            assert other.engine.spec.id == "b", "although it has more load by now"
