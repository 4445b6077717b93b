"""Traces as Arrow and as JSON: the same numbers, exactly."""

from array import array
from base64 import b64decode

import msgspec
import numpy as np
import pyarrow as pa

from rollyard.core import (
    Ending,
    Outcome,
    Position,
    Rollout,
    Sampling,
    Score,
    Span,
    State,
    Task,
    Trace,
    Trajectory,
    ids_array,
    logprobs_array,
)
from rollyard.core.failure import RunDeadline
from rollyard.service.schemas.arrow import SCHEMA, traces_stream
from rollyard.service.schemas.records import encode, record, trajectory_object

SPAN = Span(2, 4, turn=1, finish_reason="stop", prompt_digest="d", engine="e1", request_id="q", cached_tokens=1)


def trace(**changes: object) -> Trace:
    values: dict[str, object] = {
        "token_ids": ids_array([5, 6, 151_643, 2**31 - 1]),
        "mask": bytearray([0, 0, 1, 1]),
        "logprobs": logprobs_array([0.0, 0.0, -0.1, -1e-8]),
        "versions": ids_array([-1, -1, 3, 4]),
        "spans": (SPAN,),
        "sampling": Sampling(temperature=0.7, extra={"min_p": 0.1}),
        "policy": "default",
        "model": "m",
        "logprobs_kind": "processed",
        "columns": {"experts": b"\x00\xff"},
    }
    return Trace(**{**values, **changes})  # type: ignore[arg-type]


def ended(*traces: Trace, is_trainable: bool = True) -> tuple[Trajectory, Rollout]:
    failure = None if is_trainable else RunDeadline("slow").failure("run")
    outcome = Outcome.COMPLETED if is_trainable else Outcome.TRUNCATED
    ending = Ending(outcome, Score(0.5), failure, is_trainable)
    rollout = Rollout("r1", "run", Task("e"), Position(State.ENDED, 2), ended_seq=7, ending=ending)
    return Trajectory("r1", 2, traces), rollout


def test_the_columns_equal_the_traces() -> None:
    stream = traces_stream(*ended(trace(), trace(token_ids=ids_array(), mask=bytearray(), logprobs=logprobs_array(),
                                                 versions=ids_array(), spans=())))  # fmt: skip
    table = pa.ipc.open_stream(stream).read_all()
    table.validate(full=True)
    assert table.schema == SCHEMA
    assert table.num_rows == 2
    first, second = table.to_pylist()
    assert first["token_ids"] == [5, 6, 151_643, 2**31 - 1]
    assert first["mask"] == [0, 0, 1, 1]
    assert first["versions"] == [-1, -1, 3, 4]
    assert first["logprobs"] == array("f", [0.0, 0.0, -0.1, -1e-8]).tolist()
    assert first["spans"][0]["prompt_digest"] == "d"
    assert first["spans"][0]["is_owned"] is True
    assert (first["index"], first["siblings"], second["index"]) == (0, 2, 1)
    assert (first["reward"], first["trainable"], first["reason"]) == (0.5, True, None)
    assert msgspec.json.decode(first["sampling"])["extra"] == {"min_p": 0.1}
    assert dict(first["columns"]) == {"experts": b"\x00\xff"}
    assert second["token_ids"] == []


def test_a_reader_gets_views_not_copies() -> None:
    batch = next(iter(pa.ipc.open_stream(traces_stream(*ended(trace())))))
    ids = batch.column("token_ids").values.to_numpy(zero_copy_only=True)
    assert ids.dtype == np.int32
    assert batch.column("logprobs").values.to_numpy(zero_copy_only=True).dtype == np.float32


def test_missing_logprobs_are_null_never_zero() -> None:
    missing = trace(logprobs=None, is_trainable=False, untrainable_reason="no logprobs")
    row = pa.ipc.open_stream(traces_stream(*ended(missing))).read_all().to_pylist()[0]
    assert row["logprobs"] is None
    assert (row["trainable"], row["reason"]) == (False, "no logprobs")


def test_a_trace_of_an_untrainable_rollout_has_a_reason() -> None:
    row = pa.ipc.open_stream(traces_stream(*ended(trace(), is_trainable=False))).read_all().to_pylist()[0]
    assert (row["trainable"], row["reason"]) == (False, "its rollout ended with run_deadline")


def test_the_record_is_in_the_schemas_metadata() -> None:
    trajectory, rollout = ended(trace())
    schema = pa.ipc.open_stream(traces_stream(trajectory, rollout, with_record=True)).schema
    assert msgspec.json.decode(schema.metadata[b"record"]) == msgspec.json.decode(encode(record(rollout)))
    assert traces_stream(Trajectory("r1", 2), rollout, with_record=True)  # a stream without traces is valid too


def test_json_has_the_shortest_form_of_a_float32() -> None:
    text = encode(trajectory_object(*ended(trace())))
    assert b'"logprobs":[0.0,0.0,-0.1,-1e-8]' in text
    assert b'"mask":[0,0,1,1]' in text
    body = msgspec.json.decode(text)
    assert np.array(body["traces"][0]["logprobs"], np.float32).tobytes() == trace().logprobs.tobytes()  # type: ignore[union-attr]
    assert b64decode(body["traces"][0]["columns"]["experts"]) == b"\x00\xff"
