"""The text of a trajectory, as the catalog stores and searches it.

Invariants. The text has at most `MOST` characters: the first and the last half of a longer one. The cost is bounded,
too: JSON of more than `MOST_JSON` bytes is not decoded, but indexed as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from rollyard.core import Json, Message
from rollyard.store.codec import messages_of, trajectory_text

MOST = 256 << 10
"""Characters of one rollout: about 10 ms to index."""

MOST_JSON = 2 << 20
"""Decoding that many bytes takes about 10 ms, in which no other thread can run."""

GAP = "\n…\n"
"""Between the two halves of a text that was cut."""

LINE = "\n"

_NO_TEXT = frozenset({"role", "id", "type", "tool_call_id", "index"})
"""Fields of a message that are not words of anyone."""

_MOST_DEPTH = 8


def text_of(data: bytes) -> str:
    """Returns the searchable text of an encoded trajectory. Raises `CorruptRecord`."""
    raw = trajectory_text(data)
    if len(raw) > MOST_JSON:
        head, tail = raw[:MOST_JSON], raw[-MOST_JSON:]
        return cut([head.decode(errors="replace"), tail.decode(errors="replace")])
    return cut([text for message in messages_of(raw) for text in _strings(message)])


def cut(texts: Sequence[str], most: int = MOST) -> str:
    """Joins the texts. Of more than `most` characters, keeps the first and the last half."""
    if sum(len(text) + len(LINE) for text in texts) <= most:
        return _storable(LINE.join(texts))
    half = (most - len(GAP)) // 2
    head = _up_to(texts, half)
    tail = _up_to((text[: -half - 1 : -1] for text in reversed(texts)), half)[::-1]
    return _storable(head + GAP + tail)


def pack(text: str) -> bytes:
    return zlib.compress(text.encode(), 1)


def unpack(data: bytes) -> str:
    return zlib.decompress(data).decode()


def _up_to(texts: Iterable[str], most: int) -> str:
    taken, room = list[str](), most
    for text in texts:
        taken.append(text[:room])
        room -= len(text) + len(LINE)
        if room <= 0:
            break
    return LINE.join(taken)[:most]


def _storable(text: str) -> str:
    """Without NUL, at which SQLite would end the text, and lone surrogates, which have no encoding."""
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _strings(value: Json, depth: int = 0) -> Iterator[str]:
    """Yields the strings in a message, in order."""
    if isinstance(value, str):
        if value and not value.startswith("data:"):  # an image
            yield value
    elif depth >= _MOST_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in cast("Message", value).items():
            if key not in _NO_TEXT:
                yield from _strings(item, depth + 1)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item, depth + 1)
