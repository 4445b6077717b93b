"""The output of a terminal or a tool: bounded, as text for a model.

Invariants. At most `limit_bytes` are kept: the first half and the last half; the bytes between are counted. A
character that is split by a cut or between two chunks is handled correctly.
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
        self.total_bytes = 0

    def feed(self, data: bytes) -> None:
        self.total_bytes += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 4 * self._half:  # a ring buffer that is trimmed rarely
                del self._tail[: -self._half]

    def text(self) -> tuple[str, int]:
        """Returns the text, and the number of bytes that were left out of its middle."""
        tail = self._tail[-self._half :]
        omitted = self.total_bytes - len(self._head) - len(tail)
        if omitted == 0:
            return plain(bytes(self._head + tail)), 0
        head = bytes(self._head)
        head_end, tail_start = _whole_end(head), _whole_start(bytes(tail))
        omitted += len(head) - head_end + tail_start
        return plain(head[:head_end]) + _marker(omitted) + plain(bytes(tail[tail_start:])), omitted


def cut(text: str, limit_bytes: int) -> str:
    """Returns the first and last half of a text that is longer than the limit; a shorter text is unchanged."""
    data = text.encode("utf-8", "replace")  # half a surrogate pair cannot be encoded
    if len(data) <= limit_bytes:
        return data.decode()
    half = max(limit_bytes // 2, 1)
    head, tail = data[:half], data[-half:]
    head, tail = head[: _whole_end(head)], tail[_whole_start(tail) :]
    return head.decode() + _marker(len(data) - len(head) - len(tail)) + tail.decode()


def _marker(omitted: int) -> str:
    return f"\n[… {omitted} bytes left out …]\n"


def _whole_end(data: bytes) -> int:
    """Returns the end of the last complete UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the start of a character of 2 to 4 bytes
            needs = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - (back if needs > back else 0)
        if byte < 0x80:
            break
    return len(data)


def _whole_start(data: bytes) -> int:
    """Returns the start of the first complete UTF-8 character."""
    most = min(3, len(data))  # no character has more than three bytes after its first
    return next((start for start in range(most) if data[start] & 0xC0 != 0x80), most)


def plain(data: bytes) -> str:
    """Removes colours and control characters; of a line that was overwritten by `\\r`, keeps the last text."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROLS.sub("", text)
