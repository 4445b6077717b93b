"""Measures how much work a request is, from its bytes, without parsing them.

JSON can contain 5 million values in 16 MiB, and a parser creates objects for all of them in one uninterruptible step: 3
s in the one thread that holds the interpreter. So values are counted first, from the bytes, in steps of a fraction of a
millisecond; a body that has too many is never parsed.

A value is counted where it begins: after a comma, or as a container. Commas in strings look the same, so the quick
count is an upper bound; only a body that exceeds a limit by it is counted again without its strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

STEP_BYTES = 16 << 10
"""Per step of counting or searching: at most about 0.5 ms (a string of escapes only). Between two steps another thread
may run."""

LIGHT_BYTES, LIGHT_VALUES = 64 << 10, 1000
"""Up to both, a request is read and matched on the event loop: at most about 5 ms, and nearly always 0.1 ms."""

_STRUCTURE = b",{["
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


@dataclass(frozen=True, slots=True)
class BodySize:
    """A body's size, and at most how many JSON values it has."""

    bytes: int = 0
    values: int = 0

    @property
    def is_light(self) -> bool:
        return self.bytes <= LIGHT_BYTES and self.values <= LIGHT_VALUES


LIGHT = BodySize()


def weight_of(raw: bytes | bytearray) -> BodySize:
    """Returns a body's size. Values are counted only up to LIGHT_BYTES: a longer body is not light in any case."""
    return BodySize(len(raw), _structure(raw, 0, len(raw)) if len(raw) <= LIGHT_BYTES else 0)


def has_more_values(raw: bytes | bytearray, most: int) -> bool:
    """Returns whether a body has more than `most` JSON values. Stops counting there."""
    return _structure(raw, 0, len(raw)) > most and _values(raw, most) > most


def _values(raw: bytes | bytearray, most: int) -> int:
    at, count = 0, 1
    while count <= most:
        quote = raw.find(b'"', at)
        count += _structure(raw, at, quote if quote >= 0 else len(raw), most - count)
        if quote < 0:
            break
        at = behind_string(raw, quote + 1)
    return count


def _structure(raw: bytes | bytearray, start: int, end: int, most: int | None = None) -> int:
    count = 0
    for at in range(start, end, STEP_BYTES):
        piece = raw[at : min(end, at + STEP_BYTES)]
        count += len(piece) - len(piece.translate(None, _STRUCTURE))
        if most is not None and count > most:
            break
    return count


def behind_string(raw: bytes | bytearray, at: int) -> int:
    """Returns the position after the string that contains `at`. A step may end before an escape that it contains only
    half of; the next step begins there."""
    while True:
        match = _INSIDE.match(raw, at, at + STEP_BYTES)
        assert match is not None  # it also matches the empty string
        if match.end() == at:
            return at + 1
        at = match.end()
