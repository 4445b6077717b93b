"""Parses a large JSON body in steps.

A JSON parser decodes 16 MiB in one call of 40 ms that holds the interpreter, so no other thread runs. This parser first
removes the long strings and decodes them piece by piece; the rest, the skeleton, is small and is parsed in one call.
The result is that of `orjson.loads`.

Every later step (joining, comparing, encoding) also takes time per character, so all long strings together may have
MOST_CHARS characters. Raises ValueError for invalid JSON, `TooMuchText` and `TooMuchStructure` for the bounds.
"""

from __future__ import annotations

import re
import secrets

import orjson

from rollyard.core import Json
from rollyard.gateway.body_size import STEP_BYTES, behind_string

WHOLE_BYTES = 1 << 20
"""Up to this size a body is parsed in one call: at most 3 ms plus the time for its values."""
LONG_BYTES = 128
"""A longer string is not part of the skeleton."""
MOST_SKELETON_BYTES = 2 << 20
"""About 5 ms plus the time for its values. 4,096 messages of short texts have less than 1 MiB."""
MOST_CHARS = 4 << 20
"""A context of a million tokens at four characters each. With one emoji in it that is 16 MiB of memory: joining or
encoding such a text takes 5 to 7 ms."""

_WHOLE_ESCAPES = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+"
)
"""Matches the longest part of a string that can be decoded alone: no part of an escape, no half of a surrogate pair."""


class TooMuchText(Exception):
    """The strings have more than MOST_CHARS characters. `chars`: the number counted so far."""

    def __init__(self, chars: int) -> None:
        super().__init__(f"the texts have more than {MOST_CHARS} characters, which is the maximum")
        self.chars = chars


class TooMuchStructure(Exception):
    """Without its long strings the body is still larger than MOST_SKELETON_BYTES."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the body has {size} bytes without its long texts, and {MOST_SKELETON_BYTES} is the maximum: "
            "send fewer and longer texts"
        )


def parse(raw: bytes | bytearray) -> Json:
    """Parses a body as `orjson.loads` does, in steps if it is large."""
    if len(raw) <= WHOLE_BYTES:
        return orjson.loads(raw)
    mark = secrets.token_hex(16)  # a client cannot guess it, so its strings cannot contain a mark
    skeleton, texts = _extract_texts(raw, mark)
    if len(skeleton) > MOST_SKELETON_BYTES:
        raise TooMuchStructure(len(skeleton))
    return _restore_texts(orjson.loads(skeleton), texts)


def _extract_texts(raw: bytes | bytearray, mark: str) -> tuple[bytearray, dict[str, str]]:
    """Returns the body with names in place of its long strings, and the strings by name."""
    skeleton, texts = bytearray(), dict[str, str]()
    copied, at, chars = 0, 0, 0
    while (quote := raw.find(b'"', at)) >= 0:
        at = behind_string(raw, quote + 1)
        if at - quote <= LONG_BYTES:
            continue
        if raw[at - 1 : at] != b'"':
            raise ValueError("a string has no end")
        text = _decoded(raw, quote + 1, at - 1, MOST_CHARS - chars)
        chars += len(text)
        name = f"{mark}{len(texts)}"
        texts[name] = text
        skeleton += raw[copied:quote]
        skeleton += f'"{name}"'.encode()
        copied = at
    skeleton += raw[copied:]
    return skeleton, texts


def _decoded(raw: bytes | bytearray, start: int, end: int, most_chars: int) -> str:
    pieces: list[str] = []
    chars = 0
    while start < end:
        cut = _cut(raw, start, end)
        piece = orjson.loads(b'"%s"' % bytes(raw[start:cut]))
        chars += len(piece)
        if chars > most_chars:
            raise TooMuchText(MOST_CHARS - most_chars + chars)
        pieces.append(piece)
        start = cut
    return "".join(pieces)


def _cut(raw: bytes | bytearray, start: int, end: int) -> int:
    """Returns the end of the piece that begins at `start`. If no piece can begin there, the rest is invalid JSON and is
    left to the parser, which reports the error."""
    if end - start <= STEP_BYTES:
        return end
    match = _WHOLE_ESCAPES.match(raw, start, start + STEP_BYTES)
    assert match is not None  # it also matches the empty string
    cut = match.end()
    while cut > start and raw[cut] & 0xC0 == 0x80:  # within a character
        cut -= 1
    return cut if cut > start else end


def _restore_texts(value: Json, texts: dict[str, str]) -> Json:
    """Puts the strings back. Without recursion: the value may be nested as deeply as the parser allows."""
    root: list[Json] = [value]
    pending: list[list[Json] | dict[str, Json]] = [root]
    while pending:
        within = pending.pop()
        if isinstance(within, dict):
            for key in [key for key in within if key in texts]:
                within[texts[key]] = within.pop(key)
        for key, item in within.items() if isinstance(within, dict) else enumerate(within):
            if isinstance(item, str):
                if item in texts:
                    within[key] = texts[item]  # type: ignore[index]
            elif isinstance(item, dict | list):
                pending.append(item)
    return root[0]
