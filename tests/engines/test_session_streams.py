"""A streamed completion passes on each token once, however often it is interrupted, and keeps all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from rollyard.core import Deadline, DeadlineExpired, ids_array, logprobs_array
from rollyard.core.failure import EngineRefused, EngineUnavailable
from rollyard.engines import Generation, VersionSpan
from rollyard.engines.clients.http import HttpPool
from rollyard.testing.script import Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import END_ID, PROMPT, QUICK, TOKENIZER, complete, routed, spec_of, text_of

WORDS = "the quick brown fox jumps over the lazy dog"
IDS = TOKENIZER.encode(WORDS)

DIALECTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
    "sglang, incremental": {"dialect": "sglang", "is_incremental": True},
}


class TokenRecorder:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.came = asyncio.Event()

    def __call__(self, ids: Any) -> None:
        self.ids += ids
        self.came.set()


def at_first(reply: Reply) -> Any:
    """The first call of a session gets this reply; later ones get its whole text."""
    return lambda turn: reply if turn.session_id and turn.call == 0 else Reply(reply.text)


def part_of(count: int, finish: Any = "abort", version: int = 0) -> Generation:
    ids = ids_array(IDS[:count])
    return Generation(ids, logprobs_array([-0.5] * count), finish, (VersionSpan(version, 0, count),), len(PROMPT))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "first",
    [
        Reply(WORDS, stall_after=9),
        Reply(WORDS, stall_after=9, fault="cut_midway"),
        Reply(WORDS, stall_after=9, fault="error_midway"),
    ],
    ids=["past its deadline", "cut", "an error"],
)
async def test_an_interrupted_stream_continues_and_repeats_no_token(first: Reply, dialect: str) -> None:
    async with ScriptedEngine(at_first(first), **DIALECTS[dialect]) as server, routed(server) as router:
        recorder = TokenRecorder()
        async with router.session("default", "s1") as session:
            generation = await complete(session, model_s=0.2, on_tokens=recorder)
        assert recorder.ids == list(generation.token_ids) == [*IDS, END_ID] and generation.finish_reason == "stop"
        assert generation.logprobs is not None and len(generation.logprobs) == len(IDS) + 1
        assert list(server.calls[1].prompt_ids) == [*PROMPT, *IDS[:9]], "prompt + tokens passed on"
        assert router.stats.continuations == 1 and router.stats.tokens_lost == 0


async def test_a_stream_continues_on_another_engine_when_its_engine_is_lost() -> None:
    async with (
        ScriptedEngine(at_first(Reply(WORDS, stall_after=5))) as one,
        ScriptedEngine(lambda _: WORDS) as two,
        routed(one) as router,
        router.session("default", "s1") as session,
    ):
        recorder = TokenRecorder()
        task = asyncio.create_task(complete(session, on_tokens=recorder))
        await recorder.came.wait()
        await router.add(spec_of(two, "e2"))
        await one.stop()
        assert text_of(await task) == WORDS and recorder.ids == [*IDS, END_ID]
        assert session.engine.spec.id == "e2"
        assert list(two.calls[0].prompt_ids) == [*PROMPT, *IDS[:5]]


async def test_streamed_tokens_are_salvaged_when_no_engine_is_left() -> None:
    settings = replace(QUICK, engine_wait_s=0.05)
    async with (
        ScriptedEngine(at_first(Reply(WORDS, stall_after=5))) as server,
        routed(server, settings=settings) as router,
        router.session("default", "s1") as session,
    ):
        recorder, saved = TokenRecorder(), list[Generation]()
        task = asyncio.create_task(complete(session, on_tokens=recorder, salvage=saved.append))
        await recorder.came.wait()
        await server.stop()
        with pytest.raises(EngineUnavailable):
            await task
        assert [list(part.token_ids) for part in saved] == [recorder.ids] == [IDS[:5]]


async def test_an_expired_clock_salvages_streamed_tokens_even_if_the_abort_is_ignored() -> None:
    settings = replace(QUICK, abort_grace_s=1.0)
    async with (
        ScriptedEngine(at_first(Reply(WORDS, stall_after=9, fault="hang"))) as server,
        routed(server, settings=settings) as router,
        router.session("default", "s1") as session,
    ):
        recorder, saved = TokenRecorder(), list[Generation]()
        with pytest.raises(DeadlineExpired):
            await complete(session, Deadline(0.4), on_tokens=recorder, salvage=saved.append)
        assert [list(part.token_ids) for part in saved] == [recorder.ids] == [IDS[:9]]
        assert saved[0].logprobs is not None and saved[0].versions == (VersionSpan(0, 0, 9),)
        assert router.stats.tokens_lost == 0


async def test_a_stream_without_tokens_that_ignores_its_abort_is_lost_and_retried() -> None:
    settings = replace(QUICK, abort_grace_s=1.0)
    async with (
        ScriptedEngine(at_first(Reply(WORDS, fault="hang"))) as server,
        routed(server, settings=settings) as router,
        router.session("default", "s1") as session,
    ):
        recorder = TokenRecorder()
        generation = await complete(session, model_s=0.05, on_tokens=recorder)
        assert recorder.ids == list(generation.token_ids) and text_of(generation) == WORDS
        assert router.stats.tokens_lost == 1


# --- during a weight update


@pytest.mark.parametrize("is_obeyed", [True, False], ids=["aborted", "hung up on"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_pause_cuts_a_stream_and_it_continues_with_the_new_weights(
    dialect: str, is_obeyed: bool, http: HttpPool, web: aiohttp.ClientSession
) -> None:
    """On engines that report versions and on others: the versions of a stream arrive only at its end."""

    def script(turn: Turn) -> Reply:
        if turn.session_id and turn.call == 1:
            return Reply(WORDS, stall_after=5, fault=None if is_obeyed else "hang")
        return Reply(WORDS)

    settings = replace(QUICK, abort_grace_s=10.0 if is_obeyed else 0.1)
    async with ScriptedEngine(script, **DIALECTS[dialect]) as server, routed(server, settings=settings) as router:
        router.resume("default", 4)
        server.version = "4"
        async with router.session("default", "s1") as session:
            await complete(session)
            member = router.pool("default").members["e1"]
            assert member.reports_versions is (dialect == "vllm")
            recorder = TokenRecorder()
            task = asyncio.create_task(complete(session, on_tokens=recorder))
            await recorder.came.wait()
            await router.pause("default")
            assert member.stats.in_flight == 0 and not task.done(), "a pause returns when no call samples any more"
            assert member.reports_versions is (dialect == "vllm"), "a cut stream does not change it"
            async with web.post(f"{server.url}/update_weight_version", json={"new_version": "5"}):
                pass
            router.resume("default", 5)
            generation = await task
        assert recorder.ids == list(generation.token_ids) == [*IDS, END_ID]
        assert generation.versions == (VersionSpan(4, 0, 5), VersionSpan(5, 5, len(IDS) + 1))
        assert server.calls[-1].body.get("cache_salt", server.calls[-1].body.get("extra_key")) == "default:5"


# --- resumed and stopped completions


async def test_a_completion_continues_from_the_tokens_of_an_earlier_one() -> None:
    async with (
        ScriptedEngine(lambda _: WORDS) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        router.resume("default", 3)
        recorder = TokenRecorder()
        generation = await complete(session, on_tokens=recorder, resume=part_of(9, version=2), max_tokens=20)
        assert recorder.ids == list(generation.token_ids) == IDS[:20] and generation.finish_reason == "length"
        assert generation.versions == (VersionSpan(2, 0, 9), VersionSpan(3, 9, 20))
        (call,) = server.calls
        assert list(call.prompt_ids) == [*PROMPT, *IDS[:9]] and call.body["sampling_params"]["max_tokens"] == 11
        unstreamed = await complete(session, resume=part_of(9))
        assert text_of(unstreamed) == WORDS


@pytest.mark.parametrize(
    ("resume", "limit", "stops", "finish"),
    [
        (part_of(9), 9, (END_ID,), "length"),
        (part_of(9), 100, (IDS[8],), "stop"),
        (part_of(9, "stop"), 100, (END_ID,), "stop"),
    ],
    ids=["at the limit", "ends with a stop token", "was complete"],
)
async def test_a_resumed_completion_may_already_be_complete(
    resume: Generation, limit: int, stops: tuple[int, ...], finish: str
) -> None:
    async with (
        ScriptedEngine(lambda _: WORDS) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        recorder = TokenRecorder()
        generation = await complete(session, on_tokens=recorder, resume=resume, max_tokens=limit, stop_token_ids=stops)
        assert (recorder.ids, generation.finish_reason) == (IDS[:9], finish)
        assert server.calls == []


async def test_a_completion_to_resume_must_have_versions() -> None:
    async with ScriptedEngine() as server, routed(server) as router, router.session("default", "s1") as session:
        with pytest.raises(ValueError, match="no weight version"):
            await complete(session, resume=replace(part_of(9), versions=()))


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_a_stopped_completion_returns_its_tokens_and_can_be_resumed(is_streamed: bool) -> None:
    async with (
        ScriptedEngine(at_first(Reply(WORDS, stall_after=9))) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        recorder = TokenRecorder()
        task = asyncio.create_task(complete(session, on_tokens=recorder if is_streamed else None, stop=stop))
        await (recorder.came.wait() if is_streamed else server.busy())
        stop.set_result(None)
        part = await task
        assert (list(part.token_ids), part.finish_reason) == (IDS[:9], "abort")
        assert server.running == 0 and router.list()[0].stats.in_flight == 0
        assert router.list()[0].stats.failures == 0, "being stopped does not count as a failure of the engine"
        assert text_of(await complete(session, resume=part)) == WORDS


async def test_a_completion_can_be_stopped_while_it_waits_for_its_policy() -> None:
    async with ScriptedEngine() as server, routed(server) as router, router.session("default", "s1") as session:
        await router.pause("default")
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(complete(session, stop=stop))
        await asyncio.sleep(0)
        assert not task.done()
        stop.set_result(None)
        part = await task
        assert (list(part.token_ids), part.finish_reason, part.versions) == ([], "abort", ())
        assert (await complete(session, stop=stop)).finish_reason == "abort"
        assert server.calls == [], "one that is stopped before it starts makes no call"


@pytest.mark.parametrize("steps", range(8))
async def test_no_call_starts_during_a_pause_however_soon_it_follows_a_resume(steps: int) -> None:
    """Such a call would sample from weights that are being written, and get the previous version."""
    async with (
        ScriptedEngine(at_first(Reply(WORDS, stall_after=9))) as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        await router.pause("default")
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(complete(session, on_tokens=TokenRecorder(), stop=stop))
        await asyncio.sleep(0)
        router.resume("default")
        for _ in range(steps):
            await asyncio.sleep(0)
        await router.pause("default")
        for _ in range(8):
            await asyncio.sleep(0)
            assert router.list()[0].stats.in_flight == 0
        stop.set_result(None)
        await task


async def test_a_shared_clock_is_stopped_while_a_completion_waits() -> None:
    """The clock of an agent program always runs, except while its policy is paused."""
    async with ScriptedEngine() as server, routed(server) as router, router.session("default", "s1") as session:
        await router.pause("default")
        clock = Deadline(60.0)
        async with clock.counting():
            task = asyncio.create_task(complete(session, clock))
            await asyncio.sleep(0)
            assert not clock.is_running
            router.resume("default")
            await task
            assert clock.is_running


async def test_stopping_one_of_many_completions_stops_no_other() -> None:
    """SGLang aborts every request whose id starts with the given one: no id may be a prefix of another."""

    def script(turn: Turn) -> Reply:
        return Reply(WORDS, stall_after=9) if turn.session_id and turn.call in (0, 9) else Reply(WORDS)

    async with (
        ScriptedEngine(script, dialect="sglang") as server,
        routed(server) as router,
        router.session("default", "s1") as session,
    ):
        stops: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        recorder = [TokenRecorder(), TokenRecorder()]
        first = asyncio.create_task(complete(session, on_tokens=recorder[0], stop=stops[0]))
        await recorder[0].came.wait()
        for _ in range(8):
            await complete(session)
        tenth = asyncio.create_task(complete(session, on_tokens=recorder[1], stop=stops[1]))
        await recorder[1].came.wait()
        stops[0].set_result(None)
        assert (await first).finish_reason == "abort"
        assert server.running == 1 and router.list()[0].stats.in_flight == 1
        stops[1].set_result(None)
        await tenth
        assert len([call for call in server.calls if call.session_id]) == 10


# --- finish reasons


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_finish_reasons_and_context_refusals_are_those_of_the_engine(dialect: str, is_streamed: bool) -> None:
    async with ScriptedEngine(lambda _: WORDS, **DIALECTS[dialect]) as server, routed(server) as router:
        fields: dict[str, Any] = {"on_tokens": TokenRecorder()} if is_streamed else {}
        async with router.session("default", "s1") as session:
            short = await complete(session, max_tokens=5, **fields)
            assert (list(short.token_ids), short.finish_reason) == (IDS[:5], "length")
            full = await complete(session, max_tokens=len(IDS) + 1, **fields)
            assert (full.token_ids[-1], full.finish_reason) == (END_ID, "stop"), "a stop token at the limit is a stop"
            other = await complete(session, stop_token_ids=(IDS[3],), **fields)
            assert (list(other.token_ids), other.finish_reason) == (IDS[:4], "stop")
            server.max_context = 10
            with pytest.raises(EngineRefused) as caught:
                await complete(session, **fields)
            assert caught.value.data["context"] is True
        assert router.list()[0].stats.calls == 4, "nothing was retried"


async def test_an_engine_whose_streams_always_break_off_is_taken_down() -> None:
    """Each call returned a token, so no try was spent; but an engine that finishes no call does not work."""

    def breaks(turn: Turn) -> Reply:
        return Reply(WORDS, stall_after=1, fault="cut_midway") if turn.session_id else Reply("ok")

    async with (
        ScriptedEngine(breaks) as one,
        ScriptedEngine(lambda _: WORDS) as two,
        routed(one) as router,
        router.session("default", "s1") as session,
    ):
        await router.add(spec_of(two, "e2"))
        generation = await complete(session, on_tokens=TokenRecorder())
        assert text_of(generation) == WORDS
        assert session.engine.spec.id == "e2"
        (status,) = [it for it in router.list() if it.spec.id == "e1"]
        assert (status.health, status.stats.trips) == ("down", 1)
