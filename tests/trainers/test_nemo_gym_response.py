"""For any trajectory, NeMo RL builds the trace from the response, up to its last sampled token."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.client import Record, Trace, Trajectory
from rollyard.core import Sampling
from rollyard.core import Trace as CoreTrace
from rollyard.core import Trajectory as Played
from rollyard.tokens.trace import TraceBuilder
from rollyard.trainers._nemo_gym_response import response_of
from tests.service.test_prorl_messages import IDS, sampled, trajectories
from tests.trainers.test_nemo_gym import learned


def as_read(trace: CoreTrace, index: int, siblings: int) -> Trace:
    columns: dict[str, Any] = {
        "token_ids": np.array(trace.token_ids, dtype=np.int32),
        "mask": np.frombuffer(bytes(trace.mask), dtype=np.uint8),
        "logprobs": np.array(trace.logprobs, dtype=np.float32),
        "versions": np.array(trace.versions, dtype=np.int32),
    }
    known = {"spans": trace.spans, "trainable": trace.is_trainable, "index": index, "siblings": siblings}
    return Trace(**columns, **known)


def check(played: Played, expected_index: int) -> None:
    traces = tuple(as_read(trace, index, len(played.traces)) for index, trace in enumerate(played.traces))
    read = Trajectory(Record(id="r"), traces=traces, messages=played.messages, turns=played.turns)
    ids, mask, logprobs = learned({"response": response_of({}, read)})
    trace = traces[expected_index]
    assert trace.logprobs is not None
    end = int(np.flatnonzero(trace.mask)[-1]) + 1
    assert (ids, mask) == (trace.token_ids[:end].tolist(), trace.mask[:end].tolist())
    assert logprobs == pytest.approx(trace.logprobs[:end].tolist())


@given(trajectories())
def test_the_learned_sequence_is_the_trace(played: Played) -> None:
    check(played, 0)


@given(trajectories(), st.lists(st.sampled_from(["assistant", "user"]), max_size=3))
def test_messages_that_do_not_match_lose_no_token(played: Played, roles: list[str]) -> None:
    other = tuple({"role": role, "content": "another's"} for role in roles)
    check(Played("r", 1, traces=played.traces, messages=other, turns=played.turns), 0)


@given(trajectories(), IDS, IDS)
def test_only_owned_tokens_of_a_fork_are_generated(
    played: Played, context_ids: list[int], sampled_ids: list[int]
) -> None:
    """A second trace contains the first as a copy, and has more sampled tokens."""
    first = played.traces[0]
    fork = TraceBuilder(sampling=Sampling(), policy="default", model="m", fork_reason="rewritten")
    fork.context([*first.token_ids, *context_ids])
    fork.copies(first.spans)
    sampled(fork, sampled_ids * (len(first) + 1), played.turns)
    messages = (*played.messages, {"role": "user", "content": "go on"}, {"role": "assistant", "content": "more"})
    check(Played("r", 1, traces=(first, fork.build()), messages=messages, turns=played.turns + 1), 1)
