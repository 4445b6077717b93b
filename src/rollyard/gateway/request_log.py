"""`RequestLog`: the requests of an agent program as it sent them, each as the difference to the one that it extends.

A program sends its whole conversation with every request. The log keeps what is new: the messages after the longest
exact common prefix with an earlier request of the session, and the other fields. Long fields that have not changed (a
system prompt) are only named.

Everything here is untrusted. A request is cut while it is copied, so the cost of an entry depends on `MOST_ENTRY_CHARS`
and on the comparison, not on the size of the body. The log has at most `MOST_BYTES`: the first and the last requests
are kept, those between are counted. Entries are made in the thread that reads the body; they are added by the event
loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import orjson

from rollyard.core import Json
from rollyard.core.texts import cut_text

MOST_BYTES = 512 << 10
"""Of all requests of a rollout, encoded."""

MOST_ENTRY_CHARS = 64 << 10
MOST_FIELDS_CHARS = 16 << 10
MOST_TEXT_CHARS = 16 << 10
SMALL_BYTES = 256 << 10
"""A smaller body is encoded first, in 0.2 ms or less, and cut only if what is new in it is too long."""

MOST_DEPTH = 32
MOST_NAME_CHARS = 64
MOST_NAMES = 64
LONG_CHARS = 256
"""A field with a longer text is left out if it equals that of the request that this one extends."""

LINES = 4
"""Conversations that are compared with: a program may have sub-agents, whose requests alternate."""

LINE_BYTES = 4 << 20
"""The bodies of those conversations together."""

OVERHEAD_BYTES = 400
"""Of an entry, without its fields and messages."""

_CONVERSATION = ("messages", "input")


@dataclass(slots=True, eq=False)
class RequestLine:
    """The last request of a conversation. The messages are those of the parsed body, not copies."""

    number: int
    messages: Sequence[Json]
    fields: Mapping[str, Json]
    bytes: int


@dataclass(slots=True, eq=False)
class SentRequest:
    """One request, cut to its bounds. The session sets the fields that are known later."""

    dialect: str
    bytes: int
    line: RequestLine | None  # dropped when it is added: it holds the whole conversation
    extends: RequestLine | None  # likewise
    kept_messages: int
    new_messages: bytes  # JSON
    fields: bytes  # JSON
    same_fields: list[str]
    tools: int
    is_cut: bool
    number: int = -1
    extends_number: int | None = None
    turn: int = 0
    start_s: float = 0.0
    overruled: list[str] = field(default_factory=list[str])

    @property
    def size_bytes(self) -> int:
        names = sum(map(len, self.same_fields)) + sum(map(len, self.overruled))
        return OVERHEAD_BYTES + len(self.new_messages) + len(self.fields) + 6 * names  # 6: as \\uXXXX

    def encoded(self) -> bytes:
        return orjson.dumps(
            {
                "number": self.number,
                "extends": self.extends_number,
                "turn": self.turn,
                "start_s": round(self.start_s, 6),
                "dialect": self.dialect,
                "fields": orjson.Fragment(self.fields),
                "same_fields": self.same_fields,
                "new_messages": orjson.Fragment(self.new_messages),
                "kept_messages": self.kept_messages,
                "tools": self.tools,
                "overruled": self.overruled,
                "bytes": self.bytes,
                "is_cut": self.is_cut,
            }
        )


class RequestLog:
    """The requests of one session."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._half_bytes = most_bytes // 2
        self._first: list[SentRequest] = []
        self._last: deque[SentRequest] = deque()
        self._first_bytes = self._last_bytes = 0
        self._is_first_full = False
        self._lines: tuple[RequestLine, ...] = ()  # replaced, never changed: threads read it
        self._count = 0
        self.dropped = 0

    def read(self, dialect: str, body: Mapping[str, Json], size_bytes: int) -> SentRequest:
        """Makes the entry of a parsed body, which is not changed. May be called by any thread."""
        name = next((name for name in _CONVERSATION if name in body), "")
        sent = body.get(name)
        messages: Sequence[Json] = sent if isinstance(sent, list) else [] if sent is None else [sent]
        extends, kept = _longest(self._lines, messages)
        others = {key: value for key, value in body.items() if key != "tools" and key != name}
        before = {} if extends is None else extends.fields
        same = [key for key in others if key in before and _is_long(others[key]) and _is_same(before[key], others[key])]
        fields = {key: value for key, value in others.items() if key not in same} if same else others
        is_small = size_bytes <= SMALL_BYTES
        new_messages, is_cut = _encoded(messages[kept:], MOST_ENTRY_CHARS, is_small=is_small)
        other_fields, are_fields_cut = _encoded(fields, MOST_FIELDS_CHARS, is_small=is_small)
        tools = body.get("tools")
        shared = messages if extends is None else [*extends.messages[:kept], *messages[kept:]]
        return SentRequest(
            dialect=dialect,
            bytes=size_bytes,
            line=RequestLine(-1, shared, others, size_bytes),
            extends=extends,
            kept_messages=kept,
            new_messages=new_messages,
            fields=other_fields,
            same_fields=[key[:MOST_NAME_CHARS] for key in same[:MOST_NAMES]],
            tools=len(tools) if isinstance(tools, list) else 0,
            is_cut=is_cut or are_fields_cut,
        )

    def add(self, sent: SentRequest, *, turn: int, start_s: float, overruled: Sequence[str] = ()) -> None:
        """Adds an entry whose completion starts now."""
        sent.number, self._count = self._count, self._count + 1
        sent.extends_number = None if sent.extends is None else sent.extends.number
        sent.turn, sent.start_s = turn, start_s
        sent.overruled = [name[:MOST_NAME_CHARS] for name in overruled[:MOST_NAMES]]
        if sent.line is not None:
            sent.line.number = sent.number
            self._continue(sent, sent.line)
        sent.line = sent.extends = None
        size_bytes = sent.size_bytes
        self._is_first_full |= self._first_bytes + size_bytes > self._half_bytes
        if not self._is_first_full:
            self._first.append(sent)
            self._first_bytes += size_bytes
            return
        self._last.append(sent)
        self._last_bytes += size_bytes
        while self._last_bytes > self._half_bytes:
            self._last_bytes -= self._last.popleft().size_bytes
            self.dropped += 1

    def _continue(self, sent: SentRequest, line: RequestLine) -> None:
        """Remembers its conversation, in place of the one that it continues."""
        lines = [it for it in self._lines if it is not sent.extends or len(it.messages) > sent.kept_messages]
        lines.append(line)
        while len(lines) > LINES or (len(lines) > 1 and sum(it.bytes for it in lines) > LINE_BYTES):
            del lines[0]
        self._lines = tuple(lines) if lines[-1].bytes <= LINE_BYTES else ()

    def encoded(self) -> bytes:
        """Returns the log as JSON: `requests`, `dropped` and `is_complete`."""
        entries = [*self._first, *self._last]
        is_complete = not self.dropped and not any(entry.is_cut for entry in entries)
        tail = orjson.dumps({"dropped": self.dropped, "is_complete": is_complete})
        return b'{"requests":[' + b",".join(entry.encoded() for entry in entries) + b"]," + tail[1:]


def _longest(lines: Sequence[RequestLine], messages: Sequence[Json]) -> tuple[RequestLine | None, int]:
    """Returns the conversation that shares the most messages with these, the newest of several, and their number."""
    found: RequestLine | None = None
    most = 0
    for line in reversed(lines):
        kept = min(len(line.messages), len(messages))
        if kept > most and not _is_same(line.messages[:kept], messages[:kept]):
            pairs = enumerate(zip(line.messages, messages, strict=False))
            kept = next((index for index, (before, now) in pairs if not _is_same(before, now)), kept)
        if kept > most:
            found, most = line, kept
    return found, most


def _is_same(before: object, now: object) -> bool:
    try:
        return before == now
    except RecursionError:
        return False


def _encoded(value: Json, room: int, *, is_small: bool) -> tuple[bytes, bool]:
    """Returns the value as JSON of a few times `room` bytes, and whether something was left out."""
    if is_small:
        with suppress(TypeError):  # it is nested too deeply
            data = orjson.dumps(value)
            if len(data) <= room:
                return data, False
    clip = _Clip(room)
    data = orjson.dumps(clip.value(value, 0))
    if len(data) > 2 * room:  # a character may take 6 bytes in JSON
        clip = _Clip(room // 3)
        data = orjson.dumps(clip.value(value, 0))
    return data, clip.is_cut


def _is_long(value: Json) -> bool:
    return isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > LONG_CHARS)


class _Clip:
    """Copies JSON until its room is used up. What is left out is replaced by a note in its place."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.is_cut = False

    def value(self, value: Json, depth: int) -> Json:
        self._room -= 8
        if isinstance(value, str):
            return self._text(value, MOST_TEXT_CHARS)
        if isinstance(value, Mapping):
            if depth >= MOST_DEPTH:
                return self._note(f"(an object with {len(value)} fields)")
            copy: dict[str, Json] = {}
            for name, item in value.items():
                if self._room <= 0:
                    copy["…"] = self._note(f"({len(value) - len(copy)} more fields)")
                    break
                copy[self._text(name, MOST_NAME_CHARS)] = self.value(item, depth + 1)
            return copy
        if isinstance(value, list):
            if depth >= MOST_DEPTH:
                return self._note(f"(a list of {len(value)})")
            return self._items(value, depth + 1)
        return value

    def _items(self, values: Sequence[Json], depth: int) -> list[Json]:
        copy: list[Json] = []
        for item in values:
            if self._room <= 0:
                copy.append(self._note(f"({len(values) - len(copy)} more)"))
                break
            copy.append(self.value(item, depth))
        return copy

    def _text(self, text: str, most: int) -> str:
        most = max(0, min(most, self._room))
        if len(text) <= most:
            self._room -= len(text)
            return text
        self._room -= most
        return self._note(cut_text(text, most))

    def _note(self, text: str) -> str:
        self.is_cut = True
        return text
