"""Builds a trace from a response: its token columns as numpy arrays, the rest from JSON.

The token columns are read from JSON here, or are views of Arrow buffers (arrow.py). numpy is imported on first use.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.client._errors import UnexpectedReply
from rollyard.client.records import JsonObject, Record, Trace, Trajectory, read, read_object
from rollyard.core import Sampling, Span

TYPES = {"token_ids": "int32", "mask": "uint8", "logprobs": "float32", "versions": "int32"}


def build(row: Mapping[str, Any], tokens: Mapping[str, Any]) -> Trace:
    """A trace with these token columns; fields that are null have their defaults."""
    values = {name: row[name] for name in Trace.__slots__ if name not in TYPES and row.get(name) is not None}
    try:
        values["spans"] = msgspec.convert(row.get("spans") or (), tuple[Span, ...])
        values["sampling"] = msgspec.convert(row.get("sampling") or {}, Sampling)
    except msgspec.ValidationError as error:
        raise UnexpectedReply(f"a trace's spans or sampling cannot be read: {error}") from error
    return Trace(**tokens, **values)


def read_trajectory(body: object) -> Trajectory:
    """A record with its trajectory, from JSON."""
    record = read(body, Record)
    parts = read_object(record.raw.get("trajectory") or {})
    return Trajectory(
        record=record,
        traces=tuple(from_json(item) for item in parts.get("traces") or ()),
        messages=tuple(parts.get("messages") or ()),
        tools=tuple(parts.get("tools") or ()),
        artifacts=tuple(parts.get("artifacts") or ()),
        turns=parts.get("turns") or 0,
        ended_by=parts.get("ended_by") or "",
        info=parts.get("info") or {},
    )


def from_json(item: JsonObject) -> Trace:
    """A trace from JSON."""
    import numpy as np

    try:
        tokens = {
            name: None if name == "logprobs" and item[name] is None else np.asarray(item[name], dtype=kind)
            for name, kind in TYPES.items()
        }
        columns = {name: b64decode(text) for name, text in (item.get("columns") or {}).items()}
    except (KeyError, ValueError, TypeError) as error:
        raise UnexpectedReply(f"a trace in the reply cannot be read: {error!r}") from error
    return build({**item, "columns": columns}, tokens)
