"""Traces of random multi-turn rollouts: they verify, and every corruption of one is caught."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollyard.core import Sampling, Trajectory
from rollyard.core.failure import TraceInvalid
from rollyard.core.trace import LogprobsKind
from rollyard.tokens import TraceBuilder, prompt_digest, verify, verify_trace

from .strategies import conversations, replies, spiked

pytestmark = pytest.mark.slow

token = st.integers(0, 1262)
logprob = st.floats(-50, 0, width=32)
generation = st.lists(st.tuples(token, logprob), min_size=1, max_size=8)


def builder(**options):
    return TraceBuilder(sampling=Sampling(), policy="p", model="m", **options)


def append(trace, turn, sampled, finish_reason="stop", version=3):
    ids, logprobs = [s[0] for s in sampled], [s[1] for s in sampled]
    trace.sampled(
        ids, logprobs, turn=turn, finish_reason=finish_reason, versions=[(version, 0, len(ids))], request_id=f"r{turn}"
    )


@st.composite
def traces(draw):
    trace = builder()
    for turn in range(draw(st.integers(1, 4))):
        trace.context(draw(st.lists(token, min_size=1, max_size=8)))
        append(trace, turn, draw(generation), draw(st.sampled_from(["stop", "length", "abort"])))
    return trace.build()


@given(messages=conversations(spiked), turns=st.lists(st.tuples(generation, replies(spiked)), min_size=1, max_size=4))
def test_the_trace_of_a_conversation_proves_every_prompt_that_was_sent(chatml, messages, turns):
    trace, sent = builder(), []
    trace.context(chatml.render(messages))
    for turn, (sampled, new) in enumerate(turns):
        prompt = trace.prompt()
        sent.append(prompt)
        append(trace, turn, sampled, "length")
        longer = chatml.extend(prompt, [s[0] for s in sampled], new)
        assert longer[: len(trace)] == trace.prompt()
        trace.context(longer[len(trace) :])
    built = trace.build()
    verify_trace(built)
    assert [span.prompt_digest for span in built.spans] == [prompt_digest(prompt) for prompt in sent]
    assert [built.token_ids[: span.start].tolist() for span in built.spans] == sent
    assert built.sampled_tokens == sum(len(sampled) for sampled, _ in turns)


@given(trace=traces(), data=st.data())
def test_a_changed_id_anywhere_is_caught(trace, data):
    ids = trace.token_ids[:]
    ids[data.draw(st.integers(0, len(ids) - 1))] += 1
    with pytest.raises(TraceInvalid, match=r"was not sampled from|did not sample the tokens"):
        verify_trace(replace(trace, token_ids=ids))


@given(trace=traces(), data=st.data(), by=st.sampled_from([-1, 1]))
def test_a_shifted_span_is_caught(trace, data, by):
    spans = list(trace.spans)
    index = data.draw(st.integers(0, len(spans) - 1))
    spans[index] = replace(spans[index], start=spans[index].start + by, end=spans[index].end + by)
    with pytest.raises(TraceInvalid):
        verify_trace(replace(trace, spans=tuple(spans)))


@given(trace=traces(), data=st.data(), name=st.sampled_from(["token_ids", "mask", "logprobs", "versions"]))
def test_a_dropped_entry_is_caught(trace, data, name):
    column = getattr(trace, name)[:]
    del column[data.draw(st.integers(0, len(column) - 1))]
    with pytest.raises(TraceInvalid):
        verify_trace(replace(trace, **{name: column}))


@given(trace=traces(), data=st.data())
def test_a_flipped_mask_is_caught(trace, data):
    mask = trace.mask[:]
    mask[data.draw(st.integers(0, len(mask) - 1))] ^= 1
    with pytest.raises(TraceInvalid, match="mask is"):
        verify_trace(replace(trace, mask=mask))


@given(trace=traces(), data=st.data())
def test_a_version_on_the_wrong_side_of_the_mask_is_caught(trace, data):
    versions = trace.versions[:]
    at = data.draw(st.integers(0, len(versions) - 1))
    versions[at] = -1 if trace.mask[at] else 3
    with pytest.raises(TraceInvalid, match="weight version"):
        verify_trace(replace(trace, versions=versions))


@given(trace=traces(), data=st.data(), value=st.sampled_from([float("nan"), float("-inf"), 0.5]))
def test_an_impossible_logprob_is_caught(trace, data, value):
    logprobs = trace.logprobs[:]
    logprobs[data.draw(st.integers(0, len(logprobs) - 1))] = value
    with pytest.raises(TraceInvalid, match="logprob"):
        verify_trace(replace(trace, logprobs=logprobs))


@given(trace=traces(), data=st.data())
def test_a_lost_or_doubled_span_is_caught(trace, data):
    index = data.draw(st.integers(0, len(trace.spans) - 1))
    for spans in (
        trace.spans[:index] + trace.spans[index + 1 :],
        trace.spans[: index + 1] + trace.spans[index:],
    ):
        with pytest.raises(TraceInvalid):
            verify_trace(replace(trace, spans=spans))


@given(trace=traces())
def test_a_trace_without_logprobs_must_be_untrainable(trace):
    with pytest.raises(TraceInvalid, match="without logprobs"):
        verify_trace(replace(trace, logprobs=None))
    verify_trace(replace(trace, logprobs=None, is_trainable=False, untrainable_reason="none given"))


@pytest.mark.parametrize(
    "change",
    [
        {"is_trainable": False},
        {"untrainable_reason": "?"},
        {"spans": ()},
        {"token_ids": array("i", [-1, 2, 3])},
    ],
)
def test_inconsistent_fields_are_caught(change):
    trace = builder()
    trace.context([1, 2])
    append(trace, 0, [(3, -0.5)])
    verify_trace(trace.build())
    with pytest.raises(TraceInvalid):
        verify_trace(replace(trace.build(), **change))


def test_an_unknown_finish_reason_and_a_turn_out_of_order_are_caught():
    trace = builder()
    trace.context([1])
    append(trace, 1, [(3, -0.5)])
    trace.context([1])
    append(trace, 2, [(3, -0.5)])
    first, second = trace.build().spans
    with pytest.raises(TraceInvalid, match="finish_reason"):
        verify_trace(replace(trace.build(), spans=(first, replace(second, finish_reason="error"))))
    with pytest.raises(TraceInvalid, match="comes after"):
        verify_trace(replace(trace.build(), spans=(first, replace(second, turn=1))))


def test_missing_logprobs_and_versions_make_a_trace_untrainable():
    trace = builder()
    trace.context([1])
    trace.sampled([5, 6], None, turn=0, finish_reason="stop", versions=[(1, 0, 2)])
    built = trace.build()
    assert built.logprobs is None
    assert (built.is_trainable, built.untrainable_reason) == (False, "the engine gave no logprobs")
    verify_trace(built)
    trace = builder()
    trace.context([1])
    trace.sampled([5, 6], [-1.0, -1.0], turn=0, finish_reason="stop", versions=[(1, 0, 1)])
    assert trace.build().untrainable_reason == "the engine named no weight version"
    verify_trace(trace.build())


def test_versions_may_change_within_a_span():
    trace = builder()
    trace.context([1])
    trace.sampled([5, 6, 7], [-1.0] * 3, turn=0, finish_reason="stop", versions=[(4, 0, 1), (5, 1, 3)])
    assert trace.build().versions.tolist() == [-1, 4, 5, 5]


def test_fewer_logprobs_than_tokens_are_refused():
    with pytest.raises(TraceInvalid, match="2 tokens were sampled, with 1 logprobs"):
        builder().sampled([1, 2], [-1.0], turn=0, finish_reason="stop")


def test_a_built_trace_does_not_change_and_ends_with_a_sampled_token():
    trace = builder()
    trace.context([1])
    append(trace, 0, [(2, -1.0)])
    trace.context([3])
    before = trace.build()
    append(trace, 1, [(4, -1.0)])
    assert before.token_ids.tolist() == [1, 2]
    assert trace.build().token_ids.tolist() == [1, 2, 3, 4]


@given(trace=traces(), cut=st.integers(0, 60), tail=st.lists(token, max_size=5), beyond=st.integers(0, 60))
def test_the_common_prefix_is_found(trace, cut, tail, beyond):
    own = builder()
    own.context(trace.token_ids)
    other = trace.token_ids[:cut].tolist() + tail
    expected = next(
        (i for i, (a, b) in enumerate(zip(trace.token_ids, other, strict=False)) if a != b),
        min(len(trace), len(other)),
    )
    assert own.common_prefix(other) == expected
    assert own.common_prefix(other, beyond) == (expected if expected > beyond else 0)


@given(trace=traces(), tail=generation)
def test_a_span_has_one_owner_across_forks(trace, tail):
    fork = builder(fork_reason="rewritten")
    fork.context(trace.token_ids)
    fork.copies(trace.spans)
    fork.context([7])
    append(fork, 9, tail)
    forked = fork.build()
    trajectory = Trajectory("r", 1, traces=(trace, forked))
    verify(trajectory)
    assert trajectory.sampled_tokens == trace.sampled_tokens + len(tail)
    with pytest.raises(TraceInvalid, match="two owners"):
        verify(replace(trajectory, traces=(trace, forked, forked)))
    with pytest.raises(TraceInvalid, match="no owner"):
        verify(replace(trajectory, traces=(forked,)))


def test_a_span_under_another_request_id_is_still_the_same_span():
    """Otherwise the same tokens would be trained on twice, the second time under another request id."""
    trace = builder()
    trace.context([1])
    append(trace, 0, [(2, -0.5)])
    owner = trace.build()
    renamed = replace(owner.spans[0], request_id="another")
    with pytest.raises(TraceInvalid, match="two owners"):
        verify(Trajectory("r", 1, traces=(owner, replace(owner, spans=(renamed,)))))
    fork = builder(fork_reason="rewritten")
    fork.context(owner.token_ids)
    fork.copies([renamed])
    append(fork, 1, [(3, -0.5)])
    with pytest.raises(TraceInvalid, match="differs from its owner"):
        verify(Trajectory("r", 1, traces=(owner, fork.build())))


def test_a_close_token_that_was_not_sampled_has_mask_0(chatml, small):
    """A turn that was cut off is closed by the renderer, not by the model."""
    trace, close = builder(), small.special_id("<|im_end|>")
    trace.context(chatml.render([{"role": "user", "content": "hi"}]))
    prompt, sampled = trace.prompt(), small.encode("and then")
    append(trace, 0, [(token, -0.5) for token in sampled], "length")
    longer = chatml.extend(prompt, sampled, [{"role": "user", "content": "go on"}])
    trace.context(longer[len(trace) :])
    append(trace, 1, [(close, -0.5)])
    built = trace.build()
    verify_trace(built)
    at = len(prompt) + len(sampled)
    assert built.token_ids[at] == close and not built.mask[at] and built.versions[at] == -1
    assert built.logprobs is not None
    mask, versions, logprobs = built.mask[:], built.versions[:], built.logprobs[:]
    mask[at], versions[at], logprobs[at] = 1, 3, -0.5
    with pytest.raises(TraceInvalid, match=f"mask is 1 at token {at}, where it has to be 0"):
        verify_trace(replace(built, mask=mask))
    with pytest.raises(TraceInvalid, match="has a weight version"):
        verify_trace(replace(built, versions=versions))
    with pytest.raises(TraceInvalid, match="has a logprob"):
        verify_trace(replace(built, logprobs=logprobs))
    longer_span = replace(built.spans[0], end=at + 1)  # as if it had sampled the close token
    with pytest.raises(TraceInvalid, match="did not sample the tokens"):
        verify_trace(replace(built, mask=mask, versions=versions, spans=(longer_span, built.spans[1])))


@given(trace=traces(), other=traces())
def test_a_copy_that_differs_from_its_owner_is_caught(trace, other):
    assume(trace.token_ids[: trace.spans[0].end] != other.token_ids[: other.spans[0].end])
    fork = builder()
    fork.context(other.token_ids)
    fork.copies(other.spans[:1])
    append(fork, 9, [(1, -1.0)])
    with pytest.raises(TraceInvalid, match="differs from its owner"):
        verify(Trajectory("r", 1, traces=(trace, fork.build())))


def test_logprobs_of_two_kinds_are_of_unknown_kind():
    trace = builder()
    kinds: list[LogprobsKind] = ["processed", "processed", "raw"]
    for turn, (kind, known) in enumerate(zip(kinds, ["processed", "processed", "unknown"], strict=True)):
        trace.context([1])
        trace.sampled([2], [-1.0], turn=turn, finish_reason="stop", versions=[(0, 0, 1)], logprobs_kind=kind)
        assert trace.build().logprobs_kind == known
