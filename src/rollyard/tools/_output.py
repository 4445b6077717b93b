"""What a terminal, or a tool, said: bounded, as text for a model.

Invariants. At most `limit_bytes` are held: the first half and the last half; what lay between is counted. A
character that a cut or a chunk's border split never breaks anything.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS and other strings
    r"|[ -/]*[0-~])"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Output:
    def __init__(self, limit_bytes: int) -> None:
        self._half = max(limit_bytes // 2, 1)
        self.clear()

    def clear(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.seen_bytes = 0

    def feed(self, data: bytes) -> None:
        self.seen_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:  # a ring, kept by cutting seldom
                del self._tail[: -self._half]

    def text(self) -> tuple[str, int]:
        """(the text, how many bytes were left out of its middle)."""
        tail = self._tail[-self._half :]
        omitted = self.seen_bytes - len(self._head) - len(tail)
        if omitted == 0:
            return plain(bytes(self._head + tail)), 0
        head = bytes(self._head)
        head_end, tail_start = _whole_end(head), _whole_start(bytes(tail))
        omitted += len(head) - head_end + tail_start
        return plain(head[:head_end]) + _marker(omitted) + plain(bytes(tail[tail_start:])), omitted


def cut(text: str, limit_bytes: int) -> str:
    """Text that is whole already: its first and last half where it is longer, otherwise as it is."""
    data = text.encode("utf-8", "replace")  # half a surrogate pair is no character, and could not be sent
    if len(data) <= limit_bytes:
        return data.decode()
    half = max(limit_bytes // 2, 1)
    head, tail = data[:half], data[-half:]
    head, tail = head[: _whole_end(head)], tail[_whole_start(tail) :]
    return head.decode() + _marker(len(data) - len(head) - len(tail)) + tail.decode()


def _marker(omitted: int) -> str:
    return f"\n[… {omitted} bytes left out …]\n"


def _whole_end(data: bytes) -> int:
    """Where the last whole UTF-8 character ends."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the start of a character of 2 to 4 bytes
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - (back if needs > back else 0)
        if byte < 0x80:
            break
    return len(data)


def _whole_start(data: bytes) -> int:
    """Where the first whole UTF-8 character starts."""
    most = min(3, len(data))  # no character has more than three bytes after its first
    return next((start for start in range(most) if data[start] & 0xC0 != 0x80), most)


def plain(data: bytes) -> str:
    """Without colours and control characters; of a line that was overwritten by `\\r`, what stood there last."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", text)
