"""For any messages: a result's tokens, concatenated, are the trace's, and those of assistants are those of the mask."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import Sampling, Trace, Trajectory
from rollyard.service.prorl.messages import messages_of, trained_trace
from rollyard.tokens.trace import TraceBuilder
from tests.service.prorl_parts import as_trained

IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
CONTEXT_IDS = st.lists(st.integers(0, 200_000), max_size=6)
OTHERS = st.lists(st.sampled_from(["tool", "user", "system", "developer"]), max_size=3)


def sampled(builder: TraceBuilder, ids: list[int], turn: int) -> None:
    logprobs = [-0.5 - turn - place / 16 for place in range(len(ids))]
    builder.sampled(ids, logprobs, turn=turn, finish_reason="stop", versions=[(3, 0, len(ids))])


def check(trajectory: Trajectory, trace: Trace, messages: list[dict[str, Any]]) -> None:
    ids, mask, logprobs = as_trained(messages)
    assert ids == list(trace.token_ids)
    assert mask == list(trace.mask)
    assert trace.logprobs is not None
    assert logprobs == list(trace.logprobs)
    # The trainer takes everything before the first assistant message as the prompt, and finds no prompt at index 0.
    at = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    span = next(span for span in trace.spans if span.is_owned)
    assert at > 0
    assert messages[at]["input_ids"] == [id for message in messages[:at] for id in message["token_ids"]]
    assert messages[at]["input_ids"] == ids[: span.start]
    assert messages[at]["token_ids"] == ids[span.start : span.end]


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Turns as of an agent: prompt, then sampled; with examples in the prompt, and turns that sampled nothing."""
    builder = TraceBuilder(sampling=Sampling(), policy="default", model="m")
    messages: list[dict[str, Any]] = [{"role": role, "content": "x"} for role in draw(OTHERS)]
    messages += [{"role": "assistant", "content": "an example"}] * draw(st.integers(0, 2))
    turns = draw(st.integers(1, 6))
    for turn in range(turns):
        messages += [{"role": role, "content": role} for role in draw(OTHERS)]
        builder.context(draw(CONTEXT_IDS) if turn else draw(IDS))
        is_empty = turn and draw(st.booleans()) and turn != turns - 1
        sampled(builder, [] if is_empty else draw(IDS), turn)
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": f"turn {turn}", "tool_calls": [call]})
    messages += [{"role": role, "content": role} for role in draw(OTHERS)]
    return Trajectory("r", 1, traces=(builder.build(),), messages=tuple(messages), turns=turns)


@given(trajectories())
def test_joined_tokens_are_the_trace_and_assistants_are_the_mask(trajectory: Trajectory) -> None:
    trace, messages = trajectory.traces[0], messages_of(trajectory)
    check(trajectory, trace, messages)
    assistant_messages = [message for message in messages if message["role"] == "assistant" and message["token_ids"]]
    assert [message["content"] for message in assistant_messages] == [f"turn {span.turn}" for span in trace.spans]
    assert all(message["tool_calls"] == [{"name": "shell", "arguments": "{}"}] for message in assistant_messages)


@given(trajectories(), st.lists(st.sampled_from(["assistant", "user"]), max_size=3))
def test_messages_that_do_not_match_the_spans_lose_no_token(trajectory: Trajectory, roles: list[str]) -> None:
    other = tuple({"role": role, "content": "another's"} for role in roles)
    altered = Trajectory("r", 1, traces=trajectory.traces, messages=other, turns=trajectory.turns)
    check(altered, altered.traces[0], messages_of(altered))


@given(trajectories(), IDS, IDS)
def test_only_tokens_that_a_fork_owns_are_on_assistant_messages(
    trajectory: Trajectory, context_ids: list[int], sampled_ids: list[int]
) -> None:
    """A second trace that contains the first as a copy, and samples more than it."""
    first = trajectory.traces[0]
    fork = TraceBuilder(sampling=Sampling(), policy="default", model="m", fork_reason="rewritten")
    fork.context([*first.token_ids, *context_ids])
    fork.copies(first.spans)
    sampled(fork, sampled_ids * (len(first) + 1), trajectory.turns)
    messages = (*trajectory.messages, {"role": "user", "content": "go on"}, {"role": "assistant", "content": "more"})
    both = Trajectory("r", 1, traces=(first, fork.build()), messages=messages, turns=trajectory.turns + 1)
    assert trained_trace(both) == 1
    check(both, both.traces[1], messages_of(both))


def test_without_traces_there_is_only_text_and_without_an_assistant_nothing() -> None:
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "tool", "content": "x"},
    )
    assert [it["content"] for it in messages_of(Trajectory("r", 1, messages=messages, turns=1))] == ["hi", "ho"]
    assert messages_of(Trajectory("r", 1, messages=messages[:1])) == []
    assert messages_of(Trajectory("r", 1)) == []


def test_content_parts_are_joined_to_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = messages_of(Trajectory("r", 1, messages=({"role": "assistant", "content": parts},), turns=1))
    assert (message["content"], message["token_ids"], message["logprobs"]) == ("ab", [], None)
