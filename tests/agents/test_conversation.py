"""Conversations against a real engine over HTTP: every prompt that was sent is in the trace."""

import asyncio

import pytest

from rollyard.core import DeadlineExpired, Limits, Sampling, Trajectory, sampling_seed
from rollyard.core.failure import ContextLimit, PromptTooLong
from rollyard.engines import Kind
from rollyard.testing.script import Reply
from rollyard.tokens import ChatML, verify
from rollyard.tokens.splice import NOT_EXTENDED, OTHER_TOOLS

from .conftest import USER, call


def proven(scene):
    """Returns the traces, verified and compared with the prompts that the engine received."""
    traces = scene.conversation.traces()
    verify(Trajectory("r1", 1, traces=traces))
    spans = sorted((span.turn, trace.token_ids[: span.start].tolist()) for trace in traces for span in trace.spans)
    owned = dict(spans)
    assert [owned[turn] for turn in sorted(owned)] == scene.prompts[: len(owned)]
    return traces


async def test_every_prompt_extends_what_was_sent_and_sampled(scene):
    async with scene(["one", "two 漢字", "three"]) as s:
        for text in ("a", "b", "c"):
            parsed = await s.conversation.turn([{"role": "user", "content": text}], (), max_tokens=50)
        assert parsed.content == "three"
        (trace,) = proven(s)
        assert len(trace.spans) == 3
        assert trace.is_trainable
        assert trace.logprobs_kind == "processed"
        assert (trace.model, trace.policy, trace.spans[0].engine) == ("scripted", "default", "e1")
        assert trace.spans[1].cached_tokens >= trace.spans[0].end - 1
        seeds = [request.body["sampling_params"]["seed"] for request in s.engine.calls]
        assert seeds == [sampling_seed(7, "r1", turn) for turn in range(3)]
        assert [m["role"] for m in s.conversation.messages] == ["user", "assistant"] * 3


async def expired_at_the_engine(scene) -> None:
    """Takes a turn whose deadline passes when the engine has the call."""
    turn = asyncio.create_task(scene.conversation.turn(USER, (), max_tokens=50))
    await scene.engine.busy()
    clock = scene.context.clock
    clock.budget_s = clock.used_s
    clock.rearm()
    await turn


async def test_tokens_sampled_before_a_deadline_are_in_the_trace(scene):
    async with scene(["first", Reply("one two three four", stall_after=2)]) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        with pytest.raises(DeadlineExpired):
            await expired_at_the_engine(s)
        (trace,) = proven(s)
        assert [span.finish_reason for span in trace.spans] == ["stop", "abort"]
        assert trace.spans[-1].end - trace.spans[-1].start == 2
        assert s.conversation.turns == 2
        assert s.conversation.messages[-1]["role"] == "assistant"


async def test_a_deadline_before_any_token_keeps_the_earlier_turns(scene):
    async with scene(["first", Reply("never", stall_after=0)]) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        with pytest.raises(DeadlineExpired):
            await expired_at_the_engine(s)
        (trace,) = proven(s)
        assert len(trace.spans) == 1
        assert len(trace) == trace.spans[0].end


class Forgetful(ChatML):
    """A renderer that extends nothing, like templates that rewrite the history."""

    def extend(self, prompt_ids, sampled_ids, new_messages, tools=()):
        return None


async def test_a_prompt_that_cannot_be_extended_forks_and_drops_nothing(scene, renderer):
    forgetful = Forgetful(renderer._tokenizer)
    async with scene(["one", "two", "three"], renderer=forgetful) as s:
        for text in ("a", "b", "c"):
            await s.conversation.turn([{"role": "user", "content": text}], (), max_tokens=50)
        traces = proven(s)
        assert [trace.fork_reason for trace in traces] == [None, NOT_EXTENDED, NOT_EXTENDED]
        assert [[(x.turn, x.is_owned) for x in trace.spans] for trace in traces] == [
            [(0, True)],
            [(0, False), (1, True)],  # rendered again it is the same: a copy, with mask 0
            [(0, False), (1, False), (2, True)],
        ]
        assert sum(trace.sampled_tokens for trace in traces) == s.conversation.sampled_tokens


async def test_other_tools_start_another_trace(scene):
    schema = {"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}
    async with scene(["one", "two"]) as s:
        await s.conversation.turn(USER, [schema], max_tokens=50)
        await s.conversation.turn(USER, [], max_tokens=50)
        assert [trace.fork_reason for trace in proven(s)] == [None, OTHER_TOOLS]


async def test_a_first_prompt_beyond_the_context_is_the_task_s_fault(scene):
    async with scene(["x"], limits=Limits(max_context=5)) as s:
        with pytest.raises(PromptTooLong, match="the context 5"):
            await s.conversation.turn([{"role": "user", "content": "much too long a prompt"}], (), max_tokens=50)
        assert s.engine.calls == []
        assert s.conversation.traces() == ()


async def test_a_later_prompt_beyond_the_context_is_a_limit(scene):
    async with scene(["x"], max_context=60) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        with pytest.raises(ContextLimit):
            await s.conversation.turn([{"role": "user", "content": "word " * 60}], (), max_tokens=50)
        assert len(s.engine.calls) == 1
        assert len(proven(s)) == 1


async def test_max_tokens_shrinks_to_what_the_context_leaves(scene):
    async with scene(["word " * 100], limits=Limits(max_context=40)) as s:
        with pytest.raises(ContextLimit, match="cut off where the context"):
            await s.conversation.turn(USER, (), max_tokens=1000)
        (trace,) = proven(s)
        assert len(trace) == 40
        assert trace.spans[0].finish_reason == "length"
        assert s.engine.calls[0].body["sampling_params"]["max_tokens"] == 40 - trace.spans[0].start


async def test_a_cut_by_max_tokens_is_recorded_as_it_is_and_closed_in_the_next_prompt(scene):
    async with scene(["word " * 100, "ok"]) as s:
        await s.conversation.turn(USER, (), max_tokens=5)
        assert s.conversation.finish_reason == "length"
        await s.conversation.turn(USER, (), max_tokens=5)
        (trace,) = proven(s)
        assert [span.finish_reason for span in trace.spans] == ["length", "stop"]
        assert s.renderer.decode(trace.token_ids[trace.spans[0].end :]).startswith("<|im_end|>\n<|im_start|>user")


async def test_a_prompt_that_the_engine_refuses_as_too_long_is_a_context_limit(scene):
    async with scene(["x"]) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        s.engine.max_context = 30  # less than the engine reported
        with pytest.raises(ContextLimit, match="longer than the maximum"):
            await s.conversation.turn([{"role": "user", "content": "word " * 20}], (), max_tokens=50)


async def test_missing_logprobs_make_the_trace_untrainable(scene):
    async with scene([Reply("hi", fault="no_logprobs")]) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        (trace,) = proven(s)
        assert trace.logprobs is None
        assert not trace.is_trainable


async def test_a_text_engine_leaves_no_traces(scene):
    async with scene(["hello", "again"], kind=Kind.OPENAI) as s:
        parsed = await s.conversation.turn(USER, (), max_tokens=50)
        assert (parsed.content, s.conversation.traces()) == ("hello", ())
        await s.conversation.turn(USER, (), max_tokens=50)
        assert s.conversation.turns == 2
        assert s.conversation.sampled_tokens > 0
        assert [m["content"] for m in s.conversation.messages] == ["please", "hello", "please", "again"]


async def test_a_text_engine_s_context_is_a_limit_too(scene):
    async with scene(["x"], kind=Kind.OPENAI, max_context=60) as s:
        await s.conversation.turn(USER, (), max_tokens=50)
        with pytest.raises(ContextLimit):
            await s.conversation.turn([{"role": "user", "content": "word " * 60}], (), max_tokens=50)


async def test_a_cancel_frees_the_engine(scene):
    async with scene([Reply("x", stall_after=0)]) as s:
        turn = asyncio.create_task(s.conversation.turn(USER, (), max_tokens=50))
        await s.engine.busy()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await s.engine.idle()
        assert s.conversation.traces() == ()


async def test_a_tool_call_is_read_from_its_ids(scene):
    async with scene(["doing " + call("shell", command="ls")], sampling=Sampling(temperature=0.5)) as s:
        parsed = await s.conversation.turn(USER, (), max_tokens=50)
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("shell", {"command": "ls"})]
        assert proven(s)[0].sampling.temperature == 0.5
