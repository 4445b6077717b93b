"""Verifies a trajectory: checks every invariant of `rollyard.core.trace`, and reports which one does not hold.

Nothing computed earlier is trusted. Each sampled span has two digests, taken when the request was sent and when the
reply arrived: of the prompt, and of prompt and reply. Both are compared with digests computed here from the trace's
ids, which proves that the sampled ids were sampled from exactly this prefix. A turn is one model call of the rollout,
so its number identifies the span in every trace; its request id must agree.

Tokens that were not sampled (for example a close token added after a turn that was cut off) are outside of every span:
a mask, a logprob or a version on one of them is an error.
"""

from __future__ import annotations

from array import array
from math import isfinite

from rollyard.core import Span, Trace, Trajectory
from rollyard.core.failure import TraceInvalid
from rollyard.tokens.trace import int32_bytes, new_digest

EPSILON = 1e-3
"""A logprob may be this much above 0: engines compute a softmax in bfloat16 or float32, with rounding errors."""

_FINISH_REASONS = frozenset({"stop", "length", "abort"})


def verify(trajectory: Trajectory) -> None:
    """Raises TraceInvalid if a trace is invalid, or if the traces share spans incorrectly."""
    owners: dict[int, tuple[Trace, Span]] = {}
    for index, trace in enumerate(trajectory.traces):
        try:
            verify_trace(trace)
        except TraceInvalid as error:
            raise TraceInvalid(f"trace {index}: {error.detail}", trace=index) from error
        for span in trace.spans:
            if span.is_owned and span.turn in owners:
                raise TraceInvalid(f"trace {index}: the span of turn {span.turn} has two owners", trace=index)
            if span.is_owned:
                owners[span.turn] = (trace, span)
    for index, trace in enumerate(trajectory.traces):
        for span in trace.spans:
            if not span.is_owned:
                _verify_copy(trace, span, owners.get(span.turn), index)


def verify_trace(trace: Trace) -> None:
    """Raises TraceInvalid if this trace is invalid in itself."""
    length = len(trace.token_ids)
    for name, column in (("mask", trace.mask), ("logprobs", trace.logprobs), ("versions", trace.versions)):
        if column is not None and len(column) != length:
            raise TraceInvalid(f"{name} has {len(column)} entries for {length} tokens")
    if length and min(trace.token_ids) < 0:
        raise TraceInvalid("a token id is negative")
    if trace.is_trainable == bool(trace.untrainable_reason):
        raise TraceInvalid("a trace must have an untrainable_reason exactly if it is untrainable")
    if trace.logprobs is None and trace.is_trainable:
        raise TraceInvalid("a trace without logprobs is marked trainable")
    _verify_spans(trace)
    expected = bytearray(length)
    for span in trace.spans:
        if span.is_owned:
            expected[span.start : span.end] = b"\x01" * (span.end - span.start)
    if trace.mask != expected:
        at = next(index for index in range(length) if trace.mask[index] != expected[index])
        raise TraceInvalid(f"mask is {trace.mask[at]} at token {at}, where it has to be {expected[at]}")
    edge = 0
    for span in trace.spans:
        if span.is_owned:
            _verify_context(trace, edge, span.start)
            _verify_owned(trace, span)
            edge = span.end
    _verify_context(trace, edge, length)


def _verify_spans(trace: Trace) -> None:
    length = len(trace.token_ids)
    if length and not trace.spans:
        raise TraceInvalid("nothing in the trace was sampled")
    running = new_digest()
    edge = read = 0
    turn = -1
    for span in trace.spans:
        if not edge <= span.start < span.end <= length:
            raise TraceInvalid(f"span [{span.start}, {span.end}) is empty, overlaps, or leaves the {length} tokens")
        if span.turn <= turn:
            raise TraceInvalid(f"turn {span.turn} comes after turn {turn}")
        if span.finish_reason not in _FINISH_REASONS:
            raise TraceInvalid(f"turn {span.turn}: finish_reason {span.finish_reason!r} is not stop, length or abort")
        running.update(int32_bytes(trace.token_ids[read : span.start]))
        read = span.start
        if running.copy().hexdigest() != span.prompt_digest:
            raise TraceInvalid(f"turn {span.turn} was not sampled from the {span.start} tokens before it")
        running.update(int32_bytes(trace.token_ids[read : span.end]))
        read = span.end
        if running.copy().hexdigest() != span.sampled_digest:
            raise TraceInvalid(f"turn {span.turn} did not sample the tokens at {span.start} to {span.end}")
        edge, turn = span.end, span.turn
    if edge != length:
        raise TraceInvalid(f"{length - edge} tokens follow the last sampled one")


def _verify_owned(trace: Trace, span: Span) -> None:
    where = f"turn {span.turn}"
    if trace.logprobs is not None:
        logprobs = trace.logprobs[span.start : span.end]
        if not all(map(isfinite, logprobs)):
            raise TraceInvalid(f"{where}: a logprob is not finite")
        if max(logprobs) > EPSILON:
            raise TraceInvalid(f"{where}: a logprob is {max(logprobs)}, above 0")
    if min(trace.versions[span.start : span.end]) < (0 if trace.is_trainable else -1):
        raise TraceInvalid(f"{where}: a sampled token has no weight version")


def _verify_context(trace: Trace, start: int, end: int) -> None:
    if trace.logprobs is not None and any(trace.logprobs[start:end]):
        raise TraceInvalid(f"a token between {start} and {end} was not sampled here and has a logprob")
    if trace.versions[start:end] != array("i", (-1,)) * (end - start):
        raise TraceInvalid(f"a token between {start} and {end} was not sampled here and has a weight version")


def _verify_copy(trace: Trace, span: Span, owner: tuple[Trace, Span] | None, index: int) -> None:
    if owner is None:
        raise TraceInvalid(f"trace {index}: the span of turn {span.turn} has no owner", trace=index)
    original, owned = owner
    is_same = trace.token_ids[span.start : span.end] == original.token_ids[owned.start : owned.end]
    if not is_same or span.request_id != owned.request_id or span.sampled_digest != owned.sampled_digest:
        raise TraceInvalid(f"trace {index}: the copy of turn {span.turn} differs from its owner's", trace=index)
