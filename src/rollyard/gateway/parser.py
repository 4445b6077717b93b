"""Parses a large JSON body in steps.

A parser decodes 16 MiB of JSON in one call of 40 ms that holds the interpreter, so that no other thread runs. Here the
long strings are taken out first and decoded piece by piece; what is left, the skeleton, is small and is parsed at once.
The result is that of `orjson.loads`.

Every later step costs time by the character, too (to join, to compare, to encode), so all long strings together may
have MOST_CHARS characters. Raises ValueError for what is not JSON, `TooMuchText` and `TooMuchStructure` for the bounds.
"""

from __future__ import annotations

import re
import secrets

import orjson

from rollyard.core import Json
from rollyard.gateway.body_size import STEP_BYTES, behind_string

WHOLE_BYTES = 1 << 20
"""Up to that, a body is parsed at once: at most 3 ms beside its values."""
LONG_BYTES = 128
"""A longer string is not part of the skeleton."""
MOST_SKELETON_BYTES = 2 << 20
"""About 5 ms, beside its values. 4,096 messages of short texts have less than 1 MiB."""
MOST_CHARS = 4 << 20
"""At four characters a token, a context of a million tokens. With one emoji in it that is 16 MiB of memory: to join or
to encode such a text takes 5 to 7 ms."""

_WHOLE_ESCAPES = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+"
)
"""As much of a string as can be decoded by itself: no part of an escape, no half of a surrogate pair."""


class TooMuchText(Exception):
    """The strings have more characters than MOST_CHARS: `chars`, counted up to there."""

    def __init__(self, chars: int) -> None:
        super().__init__(f"the texts have more than {MOST_CHARS} characters, which is the most that is read")
        self.chars = chars


class TooMuchStructure(Exception):
    """Without its long strings the body is still larger than MOST_SKELETON_BYTES."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the body has {size} bytes beside its long texts, and {MOST_SKELETON_BYTES} is the maximum: "
            "send fewer and longer texts"
        )


def parse(raw: bytes | bytearray) -> Json:
    """See the module."""
    if len(raw) <= WHOLE_BYTES:
        return orjson.loads(raw)
    mark = secrets.token_hex(16)  # a client cannot guess it, so none of its strings equals a mark
    skeleton, texts = _taken_apart(raw, mark)
    if len(skeleton) > MOST_SKELETON_BYTES:
        raise TooMuchStructure(len(skeleton))
    return _put_together(orjson.loads(skeleton), texts)


def _taken_apart(raw: bytes | bytearray, mark: str) -> tuple[bytearray, dict[str, str]]:
    """The body with names in place of its long strings, and those by name."""
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
    """Where a piece ends that begins there. What no piece can begin with is not JSON: the parser says why."""
    if end - start <= STEP_BYTES:
        return end
    found = _WHOLE_ESCAPES.match(raw, start, start + STEP_BYTES)
    assert found is not None  # it matches nothing at all, too
    cut = found.end()
    while cut > start and raw[cut] & 0xC0 == 0x80:  # within a character
        cut -= 1
    return cut if cut > start else end


def _put_together(value: Json, texts: dict[str, str]) -> Json:
    """Without recursion: it may be nested as deeply as the parser reads."""
    root: list[Json] = [value]
    left: list[list[Json] | dict[str, Json]] = [root]
    while left:
        within = left.pop()
        if isinstance(within, dict):
            for key in [key for key in within if key in texts]:
                within[texts[key]] = within.pop(key)
        for key, item in within.items() if isinstance(within, dict) else enumerate(within):
            if isinstance(item, str):
                if item in texts:
                    within[key] = texts[item]  # type: ignore[index]
            elif isinstance(item, dict | list):
                left.append(item)
    return root[0]
