"""Traces and trajectories: the data that a trainer learns from.

A trace is one training sequence in parallel columns. A span is a part of it that the policy sampled in one model call.

Invariants of a trace. All columns have the same length. The mask is 1 exactly on sampled tokens that this trace owns;
where it is 0, the logprob is 0.0 and the version −1. Spans are in order and do not overlap. A trace without
logprobs (None) is never trainable. `rollyard.tokens.verify` checks all of this.

A demonstration is a trace of turns that were given, not sampled. It has ids, mask and spans like a sampled trace, but
no logprobs and no versions, and is never trainable by its reward. Its tokens never count as sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollyard.core.json import Json
from rollyard.core.task import Sampling

LogprobsKind = Literal["processed", "raw", "unknown"]

DEMONSTRATION = "a demonstration: nothing was sampled"
"""The `untrainable_reason` of a demonstration; it identifies one wherever traces are stored or sent."""

Message = Mapping[str, Json]
"""A chat message in the OpenAI shape: role, content, tool_calls, tool_call_id, reasoning_content."""


def ids_array(values: list[int] | array[int] | tuple[int, ...] = ()) -> array[int]:
    return array("i", values)


def logprobs_array(values: list[float] | array[float] | tuple[float, ...] = ()) -> array[float]:
    return array("f", values)  # engines compute in float32; no precision is lost


def common_prefix(one: array[int], other: array[int], beyond: int = 0) -> int:
    """The length of the common prefix; 0 if it is not longer than `beyond`, which is checked cheaply."""
    low, high = beyond, min(len(one), len(other))
    if high <= low or one[low] != other[low] or one[:low] != other[:low]:
        return 0
    if one[low:high] == other[low:high]:  # the usual case
        return high
    while high - low > 1:  # equal up to `low`, different before `high`; slices are compared in C
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Span:
    """`token_ids[start:end]` of a trace was sampled in one model call, given exactly `token_ids[:start]`."""

    start: int
    end: int
    turn: int
    finish_reason: str  # stop | length | abort, as the engine reported
    prompt_digest: str  # of the ids sent to the engine: proves the prompt, without storing it again
    sampled_digest: str = ""  # of those and the ids that it returned: proves the completion
    engine: str = ""
    request_id: str = ""
    cached_tokens: int | None = None
    is_owned: bool = True  # False: the copy of a span that another trace owns


@dataclass(frozen=True, slots=True)
class Trace:
    """One training sequence. The module's docstring lists its invariants."""

    token_ids: array[int]
    mask: bytearray
    logprobs: array[float] | None
    versions: array[int]
    spans: tuple[Span, ...]
    sampling: Sampling
    policy: str
    model: str
    logprobs_kind: LogprobsKind = "unknown"
    is_trainable: bool = True
    untrainable_reason: str | None = None
    fork_reason: str | None = None  # why this is not the continuation of an earlier trace
    columns: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # opaque, from the engine
    is_tokenizer_verified: bool = True  # False: the tokenizer of an engine that sampled in it could not be verified

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        return 0 if self.untrainable_reason == DEMONSTRATION else sum(self.mask)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that RUN left and EVAL needs, stored outside the sandbox."""

    name: str
    path: str  # where it was in the sandbox
    bytes: int
    sha256: str
    kind: Literal["file", "tar"] = "file"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Everything that one attempt produced."""

    rollout_id: str
    attempt: int
    traces: tuple[Trace, ...] = ()
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Json], ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    turns: int = 0
    ended_by: str = ""  # stop | finish | the code of the limit that ended it
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    requests: bytes = b""  # of an agent program, as JSON: for people; not part of what trainers and `eval` read

    @property
    def sampled_tokens(self) -> int:
        return sum(trace.sampled_tokens for trace in self.traces)

    @property
    def is_cut_off(self) -> bool:
        """Whether its last reply ended at a token limit, whatever the agent did next."""
        spans = [span for trace in self.traces for span in trace.spans if span.is_owned]
        return bool(spans) and max(spans, key=lambda span: span.turn).finish_reason == "length"
