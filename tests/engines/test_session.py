"""An interrupted completion is continued, not sampled again."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from rollyard.core import Deadline, DeadlineExpired, Sampling
from rollyard.core.failure import EngineBroken, EngineRefused, EngineTimeout, EngineUnavailable
from rollyard.engines import Generation, Health, VersionSpan
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.routing.completion import PartialCompletion
from rollyard.engines.weights.provenance import stamped
from rollyard.testing.script import Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import END_ID, PROMPT, QUICK, TOKENIZER, complete, probed, routed, text_of

WORDS = "the quick brown fox jumps over the lazy dog"


def stalls_at_first(after: int) -> Any:
    """The first call of a session samples a few tokens and then stalls; later ones continue to the end."""

    def script(turn: Turn) -> Reply:
        return Reply(WORDS, stall_after=after if turn.session_id and turn.call == 0 else None)

    return script


async def uninterrupted(http: HttpPool) -> Generation:
    from rollyard.engines import GenerateRequest

    async with ScriptedEngine(lambda _: WORDS) as server:
        engine = await probed(server, http)
        return await engine.generate(GenerateRequest("r", PROMPT, Sampling(), 100, 1, (END_ID,)))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_call_past_its_deadline_continues_from_its_tokens(dialect: Any, http: HttpPool) -> None:
    async with ScriptedEngine(stalls_at_first(9), dialect=dialect) as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            generation = await complete(session, model_s=0.2)
        whole = await uninterrupted(http)
        assert generation.token_ids == whole.token_ids and generation.logprobs == whole.logprobs
        assert generation.finish_reason == "stop" and text_of(generation) == WORDS
        first, second = server.calls
        assert list(second.prompt_ids) == [*PROMPT, *TOKENIZER.encode(WORDS)[:9]], "prompt + kept tokens"
        limit = "max_tokens" if dialect == "vllm" else "max_new_tokens"
        assert second.body["sampling_params"][limit] == first.body["sampling_params"][limit] - 9
        assert router.stats.continuations == 1 and router.stats.retries == 0


async def test_a_deadline_with_nothing_sampled_is_a_timeout_after_another_try() -> None:
    async with (
        ScriptedEngine(lambda t: Reply("x", stall_after=0 if t.session_id else None)) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        with pytest.raises(EngineTimeout, match="sampled nothing in"):
            await complete(session, model_s=0.05)
        assert len(server.calls) == 2
        await server.idle()


async def test_an_expired_clock_salvages_the_sampled_tokens() -> None:
    async with (
        ScriptedEngine(stalls_at_first(9)) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        saved: list[Generation] = []
        clock = Deadline(0.2)
        with pytest.raises(DeadlineExpired):
            await complete(session, clock, salvage=saved.append)
        assert [text_of(generation) for generation in saved] == [WORDS[:9]]
        assert saved[0].finish_reason == "abort" and saved[0].versions == (VersionSpan(0, 0, 9),)
        assert saved[0].logprobs is not None and len(saved[0].logprobs) == 9
        await server.idle()
        with pytest.raises(DeadlineExpired):
            await complete(session, clock)
        assert len(server.calls) == 1, "no call is made with an expired clock"


async def test_a_cancelled_completion_frees_the_engine_and_the_seat() -> None:
    async with ScriptedEngine(stalls_at_first(2)) as server, routed(server) as router:

        async def rollout() -> None:
            async with router.session("default", "s1") as session:
                await complete(session)

        task = asyncio.create_task(rollout())
        await server.busy()
        assert (router.list()[0].stats.sessions, router.list()[0].stats.in_flight) == (1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (router.list()[0].stats.sessions, router.list()[0].stats.in_flight) == (0, 0)
        await server.idle()


async def test_a_call_cancelled_twice_is_released_once() -> None:
    """The second cancel arrives while the call is being ended."""
    async with (
        ScriptedEngine(lambda t: Reply("x", stall_after=0 if t.session_id else None)) as server,
        routed(server) as router,
    ):
        async with router.session("default", "s1") as session:
            task = asyncio.create_task(complete(session))
            await server.busy()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        await server.idle()
        (status,) = router.list()
        assert (status.stats.sessions, status.stats.in_flight) == (0, 0)


async def test_a_session_moves_from_a_lost_engine_to_another() -> None:
    async with (
        ScriptedEngine(lambda _: WORDS) as one,
        ScriptedEngine(lambda _: WORDS) as two,
        routed(one, two) as router,
        router.session("default", "s1") as session,
    ):
        first = one if session.engine.spec.id == "e1" else two
        await first.stop()
        assert text_of(await complete(session)) == WORDS
        assert session.engine.spec.url != first.url
        assert router.stats.moves == 1
        assert sorted(status.stats.sessions for status in router.list()) == [0, 1]


async def test_a_call_moves_to_another_engine_when_its_engine_is_lost() -> None:
    async with (
        ScriptedEngine(stalls_at_first(5)) as one,
        ScriptedEngine(lambda _: WORDS) as two,
        routed(one) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await one.busy()
        from tests.engines.parts import spec_of

        await router.add(spec_of(two, "e2"))
        await one.stop()
        assert text_of(await task) == WORDS
        assert session.engine.spec.id == "e2"


async def test_the_only_engine_is_waited_for_with_the_clock_stopped() -> None:
    async with (
        ScriptedEngine(lambda _: WORDS) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await server.stop()
        clock = Deadline(10.0)
        task = asyncio.create_task(complete(session, clock))
        while router.list()[0].health is not Health.DOWN or clock.is_running:  # the watch may find it during a call
            await asyncio.sleep(0.001)
        used_s = clock.used_s
        await asyncio.sleep(0.05)
        assert clock.used_s == used_s, "waiting for an engine does not count"
        await server.start()
        assert text_of(await task) == WORDS
        assert router.list()[0].health is Health.UP and router.list()[0].stats.trips == 1


async def test_no_engine_in_time_is_unavailable_with_the_reason() -> None:
    settings = replace(QUICK, engine_wait_s=0.05)
    async with ScriptedEngine() as server, routed(server, settings=settings) as router:
        async with router.session("default", "s1") as session:
            await server.stop()
            with pytest.raises(EngineUnavailable, match=r"no engine of default came up.*e1 is down"):
                await complete(session)
        with pytest.raises(EngineUnavailable, match="it has none"):
            await router.open_session("unknown", "s2")


async def test_an_invalid_reply_is_retried_once_and_then_raised() -> None:
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        server.fail_next(1, "fewer_logprobs")
        assert text_of(await complete(session)) == "ok"
        server.fail_next(2, "fewer_logprobs")
        with pytest.raises(EngineBroken, match="2 logprobs for 3 tokens"):
            await complete(session)


async def test_a_refusal_is_not_retried_and_does_not_count_as_a_failure() -> None:
    async with ScriptedEngine(lambda _: "ok", max_context=10) as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            with pytest.raises(EngineRefused) as caught:
                await complete(session)
        assert caught.value.data["context"] is True
        stats = router.list()[0].stats
        assert (stats.calls, stats.failures, stats.refusals) == (1, 0, 1)


async def test_kept_tokens_that_fill_the_context_end_by_length() -> None:
    async with (
        ScriptedEngine(stalls_at_first(9), max_context=len(PROMPT) + 9) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        generation = await complete(session, model_s=0.2)
        assert generation.finish_reason == "length" and text_of(generation) == WORDS[:9]


async def test_a_call_aborted_by_another_client_is_continued() -> None:
    async with (
        ScriptedEngine(stalls_at_first(4)) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        task = asyncio.create_task(complete(session))
        await server.busy()
        async with aiohttp.ClientSession() as http, http.post(f"{server.url}/abort_requests", json={}):
            pass
        assert text_of(await task) == WORDS


async def test_a_call_whose_abort_is_ignored_is_given_up_after_the_grace_period() -> None:
    settings = replace(QUICK, abort_grace_s=1.0)  # the second call must end within it, too
    async with (
        ScriptedEngine(lambda _: "ok") as server,
        routed(server, settings=settings) as router,
        router.session("default", "s1") as session,
    ):
        server.fail_next(1, "hang")
        assert text_of(await complete(session, model_s=0.05)) == "ok"
        assert router.stats.tokens_lost == 1
        await server.idle()


async def test_a_continued_call_does_not_reuse_its_seed() -> None:
    async with ScriptedEngine(stalls_at_first(9)) as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            await complete(session, model_s=0.2, seed=5)
        seeds = [call.body["sampling_params"]["seed"] for call in server.calls]
        assert seeds[0] == 5 and seeds[1] != 5


@pytest.mark.parametrize(("dialect", "name"), [("vllm", "structured_outputs"), ("sglang", "ebnf")])
async def test_a_constraint_is_not_applied_again_in_the_middle_of_a_completion(dialect: Any, name: str) -> None:
    """The engine would apply the constraint from its start again, since it treats the earlier tokens as prompt."""
    sampling = Sampling(extra={name: {"grammar": "root ::= x"} if dialect == "vllm" else "root ::= x", "min_p": 0.1})
    async with ScriptedEngine(stalls_at_first(9), dialect=dialect) as server, routed(server) as router:
        async with router.session("default", "s1") as session:
            generation = await complete(session, model_s=0.2, sampling=sampling)
        first, second = (call.body["sampling_params"] for call in server.calls)
        assert name in first and name not in second and second["min_p"] == 0.1
        assert "without the constraint" in generation.untrainable
        assert text_of(generation) == WORDS


async def test_a_chat_call_moves_to_another_engine() -> None:
    async with (
        ScriptedEngine(lambda _: "yes") as one,
        ScriptedEngine(lambda _: "yes") as two,
        routed(one, two) as router,
        router.session("default", "s1") as session,
    ):
        await (one if session.engine.spec.id == "e1" else two).stop()
        reply = await session.chat(
            [{"role": "user", "content": "?"}], sampling=Sampling(), tools=(), clock=Deadline(), model_s=5.0
        )
        assert reply.message["content"] == "yes"


async def test_a_chat_call_past_model_s_is_a_timeout_and_past_its_clock_is_expired() -> None:
    async with (
        ScriptedEngine(lambda t: Reply("x", stall_after=0 if t.session_id else None)) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        ask: dict[str, Any] = {"sampling": Sampling(), "tools": ()}
        with pytest.raises(EngineTimeout):
            await session.chat([{"role": "user", "content": "?"}], clock=Deadline(), model_s=0.05, **ask)
        with pytest.raises(DeadlineExpired):
            await session.chat([{"role": "user", "content": "?"}], clock=Deadline(0.05), model_s=5.0, **ask)


def test_joining_shifts_and_merges_versions_and_drops_incomplete_logprobs() -> None:
    from rollyard.core import ids_array, logprobs_array

    completion = PartialCompletion()
    completion.add(Generation(ids_array([1, 2]), logprobs_array([-1.0, -2.0]), "abort", (VersionSpan(3, 0, 2),), 7, 5))
    completion.add(
        Generation(
            ids_array([3, 4]), logprobs_array([-3.0, -4.0]), "stop", (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
        )
    )
    joined = completion.generation("stop")
    assert list(joined.token_ids) == [1, 2, 3, 4] and joined.prompt_tokens == 7 and joined.cached_tokens == 5
    assert joined.versions == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4))
    completion.add(Generation(ids_array([5]), None, "stop", (VersionSpan(4, 0, 1),)))
    assert completion.generation("stop").logprobs is None


def test_tokens_without_a_version_get_that_of_the_call() -> None:
    from rollyard.core import ids_array

    assert stamped(Generation(ids_array([1, 2]), None, "stop"), 4).versions == (VersionSpan(4, 0, 2),)
    half = Generation(ids_array([1, 2]), None, "stop", (VersionSpan(-1, 0, 1), VersionSpan(9, 1, 2)))
    assert stamped(half, 4).versions == (VersionSpan(4, 0, 1), VersionSpan(9, 1, 2))


def test_a_completion_of_engines_of_two_kinds_has_logprobs_of_an_unknown_kind() -> None:
    def part(engine: str, kind: Any, count: int = 1) -> Generation:
        ids, logprobs = array("i", [1] * count), array("f", [-1.0] * count)
        spans = (VersionSpan(0, 0, count),)
        return Generation(ids, logprobs, "stop", spans, engine=engine, logprobs_kind=kind)

    for parts, expected in (
        ([part("e0", "raw"), part("e1", "processed")], ("e1", "unknown")),
        ([part("e0", "raw"), part("e1", "raw")], ("e1", "raw")),
        ([part("e0", "raw", count=0), part("e1", "processed")], ("e1", "processed")),
        ([part("e0", "raw"), part("e1", "processed", count=0)], ("e0", "raw")),
    ):
        completion = PartialCompletion()
        for one in parts:
            completion.add(one)
        joined = completion.generation("stop")
        assert (joined.engine, joined.logprobs_kind) == expected


async def test_a_completion_names_the_engine_that_sampled_it() -> None:
    async with (
        ScriptedEngine(lambda _: Reply(WORDS), tokenizer=TOKENIZER) as server,
        routed(server) as router,
        router.session("default", "s") as session,
    ):
        generation = await complete(session)
        assert (generation.engine, generation.logprobs_kind) == ("e1", session.engine.info.logprobs_kind)
