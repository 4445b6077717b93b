"""Reads JSON from the body of a call, so that no body holds the event loop for long.

A parser creates the objects of all values in one call, at up to 0.6 µs each, and every later step takes time for each
value again: 16 MiB of empty arrays held the loop for 20 s. So values are counted in the bytes first, and a body that is
not small is decoded in a thread, in pieces: the elements of its arrays, one call each.

Invariants. A body has at most `MOST_VALUES` values and each of its tasks `MOST_PIECE_VALUES`, nested at most
`MOST_DEPTH` (`schemas/body.py`) deep where a task or its options are read. Code behind this module walks values without
a limit of its own.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request

from rollyard.core.failure import InvalidRequest
from rollyard.gateway.body_size import has_more_values

SMALL_BYTES = 32 << 10
"""Decoded on the event loop, and in one call: at most about 5 ms, usually 0.1 ms."""

MOST_VALUES = 1_000_000
"""1,000 tasks with lists of 1,000 tests each."""

MOST_PIECE_VALUES = 200_000
"""A task with 131,072 token ids; decoding that many empty arrays takes 0.1 s, that many numbers 20 ms."""

LEVELS = 3
"""Of objects around an array of tasks: the body, a draw's source, and one to spare."""


async def read_json(request: Request) -> object:
    """Returns the body as JSON. Raises `InvalidRequest` if it is not valid JSON, or has too many values."""
    data = await request.body()
    try:
        if len(data) <= SMALL_BYTES:
            return msgspec.json.decode(data)
        return await asyncio.to_thread(decode, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}" if data else "the body is empty") from error


def decode(data: bytes) -> object:
    """Decodes a body of any size, in a thread. Raises `InvalidRequest` for too many values, else as `msgspec.json`."""
    if has_more_values(data, MOST_VALUES):
        raise InvalidRequest(f"the body has more than {MOST_VALUES} JSON values: send it in several calls")
    return _in_pieces(data, LEVELS)


def _in_pieces(data: bytes | msgspec.Raw, levels: int) -> object:
    data = bytes(data)
    if len(data) > SMALL_BYTES and levels:
        first = data.lstrip(b" \t\r\n")[:1]
        if first == b"{":
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            return {name: _in_pieces(raw, levels - 1) for name, raw in fields.items()}
        if first == b"[":
            return [_in_pieces(raw, 0) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    if len(data) > SMALL_BYTES and has_more_values(data, MOST_PIECE_VALUES):
        raise InvalidRequest(
            f"a part of the body has more than {MOST_PIECE_VALUES} JSON values: put large data into files"
        )
    return msgspec.json.decode(data)
