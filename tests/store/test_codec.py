from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import (
    Artifact,
    Blame,
    Ending,
    Failure,
    LostAttempt,
    Mode,
    Outcome,
    Run,
    Sampling,
    Score,
    Span,
    Summary,
    Task,
    Timings,
    Trace,
    Trajectory,
    TurnReward,
)
from rollyard.store.codec import CorruptRecord, decode_trajectory, encode_trajectory, from_json, to_json
from rollyard.testing.store_conformance import trajectory

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
json = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, json, max_size=4)
int32 = st.integers(-(2**31), 2**31 - 1)
small = st.integers(0, 2**31)

samplings = st.builds(
    Sampling, finite, finite, int32, int32, st.dictionaries(text, st.integers(-(2**63), 2**64 - 1) | text, max_size=3)
)
spans = st.builds(Span, small, small, small, text, text, text, text, text, st.none() | small, st.booleans())


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(0, 30))
    ids = draw(st.lists(int32, min_size=n, max_size=n))
    logprobs = draw(st.none() | st.lists(st.floats(width=32, allow_nan=False), min_size=n, max_size=n))
    return Trace(
        token_ids=array("i", ids),
        mask=bytearray(draw(st.binary(min_size=n, max_size=n))),
        logprobs=None if logprobs is None else array("f", logprobs),
        versions=array("i", draw(st.lists(int32, min_size=n, max_size=n))),
        spans=tuple(draw(st.lists(spans, max_size=3))),
        sampling=draw(samplings),
        policy=draw(text),
        model=draw(text),
        logprobs_kind=draw(st.sampled_from(["processed", "raw", "unknown"])),
        is_trainable=draw(st.booleans()),
        untrainable_reason=draw(st.none() | text),
        fork_reason=draw(st.none() | text),
        columns=draw(st.dictionaries(text, st.binary(max_size=50), max_size=2)),
    )


artifacts = st.builds(Artifact, text, text, small, text, st.sampled_from(["file", "tar"]))
trajectories = st.builds(
    Trajectory,
    text,
    small,
    st.lists(traces(), max_size=3).map(tuple),
    st.lists(objects, max_size=3).map(tuple),
    st.lists(objects, max_size=2).map(tuple),
    st.lists(artifacts, max_size=2).map(tuple),
    small,
    text,
    objects,
)


@given(trajectories)
def test_a_trajectory_round_trips(value: Trajectory) -> None:
    assert decode_trajectory(bytes(encode_trajectory(value))) == value


numbers = st.floats(-1e150, 1e150)
scores = st.builds(
    Score,
    numbers,
    st.dictionaries(text, numbers, max_size=3),
    st.dictionaries(text, numbers, max_size=3),
    st.lists(st.builds(TurnReward, small, small, numbers), max_size=2).map(tuple),
)
failures = st.builds(
    Failure, text, st.just(Blame.POLICY), text, st.booleans(), st.booleans(), st.none() | text, objects
)
summaries = st.builds(
    Summary, small, small, small, small, text, text, text, text, st.dictionaries(text, text, max_size=2)
)
endings = st.builds(Ending, st.just(Outcome.COMPLETED), scores, summary=summaries, timings=st.builds(Timings, finite))
failed = st.builds(Ending, st.just(Outcome.TRUNCATED), scores, failures, st.booleans(), summaries)
tasks = st.builds(Task, text, objects, sampling=st.builds(Sampling, extra=objects))
runs = st.builds(
    Run,
    text,
    st.sampled_from(Mode),
    text,
    objects,
    small,
    int32,
    st.none() | small,
    st.none() | small,
    trainable_on_deadline=st.booleans(),
    mask_truncated=st.booleans(),
    created_at=finite,
)


@given(st.one_of(endings, failed, tasks, runs))
def test_a_record_round_trips(value: object) -> None:
    assert from_json(to_json(value), type(value)) == value


@given(st.lists(st.builds(LostAttempt, small, text, text), max_size=3).map(tuple))
def test_lost_attempts_round_trip(lost: tuple[LostAttempt, ...]) -> None:
    assert from_json(to_json(lost), tuple[LostAttempt, ...]) == lost


def test_records_of_an_older_version_have_no_requests_and_no_timings() -> None:
    stored = bytes(encode_trajectory(replace(trajectory("a"), requests=b'{"requests":[]}')))
    assert decode_trajectory(stored).requests == b'{"requests":[]}'
    fields = msgspec.msgpack.decode(stored[4:])
    older = stored[:4] + msgspec.msgpack.encode(fields[:-1])
    assert decode_trajectory(older) == trajectory("a")
    (lost,) = from_json('[{"attempt":1,"code":"drained","detail":""}]', tuple[LostAttempt, ...])
    assert lost == LostAttempt(1, "drained", "") and lost.timings == Timings()


def test_a_trace_of_8000_tokens_is_about_100_kb() -> None:
    n = 8000
    trace = Trace(
        array("i", range(n)), bytearray(n), array("f", [0.5] * n), array("i", [3]) * n, (), Sampling(), "p", "m"
    )
    assert len(encode_trajectory(Trajectory("r", 1, (trace,)))) < 105_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin"),
        (b"JSON?", "does not begin"),
        (b"RYT", "format none"),
        (b"RYT\x09whatever", "format 9"),
        (b"RYT\x01\xc1", "cannot be read"),
        (bytes(encode_trajectory(trajectory("a")))[:-3], "cannot be read"),
    ],
)
def test_bytes_that_are_not_a_trajectory_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptRecord, match=message):
        decode_trajectory(data)


def test_a_record_that_breaks_an_invariant_is_refused() -> None:
    with pytest.raises(CorruptRecord):
        from_json('{"outcome": "completed", "failure": {"code": "x", "blame": "infra", "detail": ""}}', Ending)


def test_a_column_of_the_wrong_type_is_refused() -> None:
    value = trajectory("a")
    wide = replace(value, traces=(replace(value.traces[0], token_ids=array("q", [1, 2, 3, 4, 5])),))
    with pytest.raises(TypeError, match="array"):
        encode_trajectory(wide)


def test_threads_may_decode_their_first_records_at_the_same_time():
    """msgspec must not build a type in a reader's thread: two threads that do so at once cause a segmentation fault."""
    code = """
import sys, threading
sys.setswitchinterval(1e-6)
from rollyard.core import Ending, Run, Task
from rollyard.store.codec import from_json
go = threading.Barrier(4)
def work():
    go.wait()
    from_json(b'{"environment": "shell", "limits": {"run_s": 3}}', Task)
    from_json(b'{"outcome": "completed", "score": {"reward": 1}}', Ending)
    from_json(b'{"id": "run"}', Run)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
"""
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_type_without_a_decoder_built_at_import_cannot_be_decoded():
    with pytest.raises(KeyError):
        from_json(b"{}", dict[str, bytes])
