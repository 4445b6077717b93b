"""Reads an Arrow stream of traces as numpy arrays, without a copy.

There is one row per trace. A column of tokens is a list column, whose child buffer contains the tokens of all rows. A
trace's column is therefore a slice of that buffer: a read-only numpy view that keeps the response's bytes alive.
(Measured, one trace of 8,000 tokens: 0.04 ms, against 0.9 ms for the same trace as JSON.)

pyarrow and numpy are imported when the first trace is read, not when the client is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollyard.client._errors import UnexpectedReply
from rollyard.client.records import Trace
from rollyard.client.traces import build

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("token_ids", "mask", "logprobs", "versions")


def read_traces(data: bytes) -> list[Trace]:
    """The traces of a stream."""
    return read_stream(data)[1]


def read_stream(data: bytes) -> tuple[Mapping[bytes, bytes], list[Trace]]:
    """The metadata of a stream's schema, and its traces."""
    import pyarrow as pa

    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            batches = list(reader)
            return reader.schema.metadata or {}, _traces(reader.schema, batches)
    except (pa.ArrowInvalid, OSError) as error:
        raise UnexpectedReply(f"the traces are not an Arrow stream: {error}") from error


def _traces(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> list[Trace]:
    import pyarrow as pa

    missing = [name for name in COLUMNS if name not in schema.names]
    if missing:
        raise UnexpectedReply(f"the traces lack the column {missing[0]!r}")
    tokens: list[dict[str, Any]] = []
    for batch in batches:
        views = {name: _Column(batch.column(name)) for name in COLUMNS}
        tokens += [{name: view[i] for name, view in views.items()} for i in range(batch.num_rows)]
    others = [name for name in schema.names if name not in COLUMNS]
    if not batches or not others:
        return [_trace(each, {}) for each in tokens]
    # All rows at once: a batch usually has one row, and batch by batch it takes twice as long (0.04 ms a trace).
    rows = pa.Table.from_batches([batch.select(others) for batch in batches]).to_pylist()
    return [_trace(*each) for each in zip(tokens, rows, strict=True)]


def _trace(tokens: Mapping[str, Any], row: Mapping[str, Any]) -> Trace:
    sampling = row.get("sampling")
    columns = dict(row.get("columns") or ())
    return build({**row, "sampling": msgspec.json.decode(sampling) if sampling else {}, "columns": columns}, tokens)


class _Column:
    """A list column. `[i]` is the view of row i, or None for a null."""

    def __init__(self, column: pa.ListArray) -> None:
        self._column = column
        self._offsets = column.offsets.to_numpy(zero_copy_only=True)
        self._values = column.values.to_numpy(zero_copy_only=True)

    def __getitem__(self, i: int) -> Any:
        if not self._column[i].is_valid:
            return None
        return self._values[self._offsets[i] : self._offsets[i + 1]]
