"""Encodes records as bytes and decodes them.

Short records (Task, Run, Ending, LostAttempt…) are JSON: a person can read them with any SQLite shell, and a field that
a later version adds gets its default in older records. A trajectory is msgpack whose token columns are raw
little-endian buffers: no number is boxed.

Measured (2-core aarch64, one trace of 8,000 tokens): 104 KB, 15 µs to encode, 20 µs to decode.

Invariants. `decode_trajectory(encode_trajectory(t)) == t`. The first four bytes are the format and its version; bytes
of an unknown version are refused. The messages, tools and info of a trajectory are stored as JSON: integers of any size
are preserved.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rollyard.core import (
    Artifact,
    Batch,
    Draw,
    Ending,
    EngineSpec,
    Group,
    Json,
    LostAttempt,
    Message,
    Run,
    Sampling,
    Span,
    Task,
    Trace,
    Trajectory,
)
from rollyard.core.access import AuditEntry, LoginRecord, TokenRecord
from rollyard.core.policy import PolicyRecord
from rollyard.core.trace import LogprobsKind
from rollyard.store.base import EvalRecord, QueuedRow

T = TypeVar("T")

MAGIC = b"RYT"
VERSION = 1
_HEADER = MAGIC + bytes([VERSION])
_SWAP = sys.byteorder == "big"


class CorruptRecord(ValueError):
    """Bytes from the store that are not a valid record."""


class _TraceRecord(msgspec.Struct, array_like=True):
    """A trace on disk. The order of the fields is the format: only append fields, with defaults."""

    token_ids: bytes  # int32
    mask: bytearray
    logprobs: bytes | None  # float32
    versions: bytes  # int32
    spans: tuple[Span, ...]
    sampling: Sampling
    policy: str
    model: str
    logprobs_kind: LogprobsKind
    is_trainable: bool
    untrainable_reason: str | None
    fork_reason: str | None
    columns: Mapping[str, bytes]
    is_tokenizer_verified: bool = True


class _Text(msgspec.Struct):
    """The parts of a trajectory that are JSON by nature."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...]
    info: Mapping[str, Json]


class _Messages(msgspec.Struct):
    """The messages of `_Text`; the rest is skipped."""

    messages: tuple[Message, ...]


class _TextRecord(msgspec.Struct, array_like=True):
    """The start of a `_TrajectoryRecord`, without decoding its traces."""

    rollout_id: str
    attempt: int
    traces: msgspec.Raw
    text: bytes


class _TrajectoryRecord(msgspec.Struct, array_like=True):
    """A trajectory on disk. As of a trace: only append fields, with defaults."""

    rollout_id: str
    attempt: int
    traces: tuple[_TraceRecord, ...]
    text: bytes  # JSON of _Text
    artifacts: tuple[Artifact, ...]
    turns: int
    ended_by: str
    requests: bytes = b""


def to_json(record: object) -> str:
    """Encodes any dataclass of core, or any JSON value."""
    return msgspec.json.encode(record).decode()


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decodes what `to_json` returned; raises `CorruptRecord` if it is invalid."""
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError is a DecodeError
        raise CorruptRecord(f"a stored record cannot be read: {error}") from error


_DECODERS: dict[Any, Any] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        Task,
        Run,
        Ending,
        EngineSpec,
        Group,
        Draw,
        Batch,
        EvalRecord,
        PolicyRecord,
        TokenRecord,
        LoginRecord,
        AuditEntry,
        tuple[Group, ...],
        tuple[Draw, ...],
        tuple[Run, ...],
        tuple[LostAttempt, ...],
        tuple[QueuedRow, ...],
        tuple[Mapping[str, Json], ...],
        list[list[Any]],
        dict[str, Json],
        dict[str, Any],
        dict[str, int],
        _Text,
    )
}
"""Everything that the store reads, built by one thread when this module is imported. msgspec builds its description of
a dataclass on first use, and a second thread that uses it meanwhile gets it half built: the process ends with a
segmentation fault. Readers are threads, so they must not build any. (Building one costs 100 times its use, too.)"""

_TRAJECTORY_DECODER = msgspec.msgpack.Decoder(_TrajectoryRecord)
_TEXT_RECORD_DECODER = msgspec.msgpack.Decoder(_TextRecord)
_MESSAGES_DECODER = msgspec.json.Decoder(_Messages)
_ENCODER = msgspec.msgpack.Encoder()


def encode_trajectory(trajectory: Trajectory) -> bytearray:
    """Encodes a trajectory. Raises ValueError for text that is not Unicode (a lone surrogate)."""
    columns_bytes = sum(16 * len(trace) for trace in trajectory.traces)
    size_bytes = columns_bytes + len(trajectory.requests) + 4096
    buffer = bytearray(size_bytes)  # about the final size: growing it would copy the columns
    buffer[:4] = _HEADER
    record = _TrajectoryRecord(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        traces=tuple(_to_record(trace) for trace in trajectory.traces),
        text=msgspec.json.encode(_Text(trajectory.messages, trajectory.tools, trajectory.info)),
        artifacts=trajectory.artifacts,
        turns=trajectory.turns,
        ended_by=trajectory.ended_by,
        requests=trajectory.requests,
    )
    _ENCODER.encode_into(record, buffer, 4)
    return buffer


def check_trajectory(data: bytes | bytearray) -> None:
    """Raises `CorruptRecord` if the first bytes are not those of a trajectory in a supported format."""
    if data[:3] != MAGIC:
        raise CorruptRecord("a stored trajectory does not begin with its format's first bytes")
    if data[3:4] != bytes([VERSION]):
        version = data[3] if len(data) > 3 else "none"
        raise CorruptRecord(f"a stored trajectory has format {version}; this version of Rollyard reads {VERSION}")


def decode_trajectory(data: bytes | bytearray) -> Trajectory:
    check_trajectory(data)
    try:
        record = _TRAJECTORY_DECODER.decode(memoryview(data)[4:])
        text = from_json(record.text, _Text)
        return Trajectory(
            rollout_id=record.rollout_id,
            attempt=record.attempt,
            traces=tuple(_from_record(trace) for trace in record.traces),
            messages=text.messages,
            tools=text.tools,
            artifacts=record.artifacts,
            turns=record.turns,
            ended_by=record.ended_by,
            info=text.info,
            requests=record.requests,
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"a stored trajectory cannot be read: {error}") from error


def trajectory_text(data: bytes | bytearray) -> bytes:
    """Returns the JSON part of an encoded trajectory, without decoding anything else."""
    check_trajectory(data)
    try:
        return _TEXT_RECORD_DECODER.decode(memoryview(data)[4:]).text
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"a stored trajectory cannot be read: {error}") from error


def messages_of(text: bytes) -> tuple[Message, ...]:
    """Returns the messages in what `trajectory_text` returned."""
    try:
        return _MESSAGES_DECODER.decode(text).messages
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"the messages of a stored trajectory cannot be read: {error}") from error


def _to_record(trace: Trace) -> _TraceRecord:
    return _TraceRecord(
        token_ids=_raw(trace.token_ids, "i"),
        mask=trace.mask,
        logprobs=None if trace.logprobs is None else _raw(trace.logprobs, "f"),
        versions=_raw(trace.versions, "i"),
        spans=trace.spans,
        sampling=trace.sampling,
        policy=trace.policy,
        model=trace.model,
        logprobs_kind=trace.logprobs_kind,
        is_trainable=trace.is_trainable,
        untrainable_reason=trace.untrainable_reason,
        fork_reason=trace.fork_reason,
        columns=trace.columns,
        is_tokenizer_verified=trace.is_tokenizer_verified,
    )


def _from_record(record: _TraceRecord) -> Trace:
    return Trace(
        token_ids=_column(record.token_ids, "i"),
        mask=record.mask,
        logprobs=None if record.logprobs is None else _column(record.logprobs, "f"),
        versions=_column(record.versions, "i"),
        spans=record.spans,
        sampling=record.sampling,
        policy=record.policy,
        model=record.model,
        logprobs_kind=record.logprobs_kind,
        is_trainable=record.is_trainable,
        untrainable_reason=record.untrainable_reason,
        fork_reason=record.fork_reason,
        columns=record.columns,
        is_tokenizer_verified=record.is_tokenizer_verified,
    )


def _raw(column: array[Any], typecode: str) -> bytes:
    if column.typecode != typecode:
        raise TypeError(f"a token column is array({typecode!r}), not array({column.typecode!r})")
    if _SWAP:
        column = array(typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(raw: bytes, typecode: str) -> array[Any]:
    if len(raw) % 4:
        raise CorruptRecord(f"a stored token column has {len(raw)} bytes, which is not a multiple of 4")
    column: array[Any] = array(typecode, raw)
    if _SWAP:
        column.byteswap()
    return column
