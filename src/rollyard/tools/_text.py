"""A text file as the editor sees it: lines that end with `\\n`, whatever they end with on the disk.

Invariants. `TextFile.of(data).data == data` for every file that is taken: line endings, a missing final newline and a
byte order mark survive. Where all lines end with CRLF the model neither sees nor has to send it; where endings are
mixed the text is left exactly as it is. What is not UTF-8, or holds NUL, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTEXT_LINES = 4
"""Shown before and after an edit, as models know it."""

MOST_MATCHES = 50
"""So many places are looked for when a text is not unique; a model needs no more of them."""


class NotText(ValueError):
    """Says what it is instead."""


@dataclass(frozen=True, slots=True)
class TextFile:
    text: str
    is_crlf: bool = False

    @classmethod
    def of(cls, data: bytes) -> TextFile:
        if b"\0" in data:
            raise NotText("a binary file")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NotText(f"not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})") from None
        endings = text.count("\r\n")
        if endings and endings == text.count("\n"):
            return cls(text.replace("\r\n", "\n"), is_crlf=True)
        return cls(text)

    @property
    def data(self) -> bytes:
        return (self.text.replace("\n", "\r\n") if self.is_crlf else self.text).encode("utf-8")

    @property
    def has_mixed_endings(self) -> bool:
        return not self.is_crlf and "\r\n" in self.text

    def given(self, text: str) -> str:
        """A text that the model sent, in this file's terms."""
        return text.replace("\r\n", "\n") if self.is_crlf else text

    def lines(self) -> list[str]:
        """Without their ends; a newline at the end of the file begins no further line."""
        lines = self.text.split("\n")
        return lines if lines[-1] else lines[:-1]

    def places(self, text: str) -> list[int]:
        """Where it begins, overlaps counted: a text that fits in two ways is not unique."""
        found: list[int] = []
        at = self.text.find(text)
        while at >= 0 and len(found) < MOST_MATCHES:
            found.append(at)
            at = self.text.find(text, at + 1)
        return found

    def line_of(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def replaced(self, at: int, old: str, new: str) -> TextFile:
        return replace(self, text=self.text[:at] + new + self.text[at + len(old) :])

    def inserted(self, after_line: int, text: str) -> TextFile:
        """As lines of its own; 0 is before the first."""
        lines = self.text.split("\n")
        return replace(self, text="\n".join([*lines[:after_line], *text.split("\n"), *lines[after_line:]]))

    def numbered(self, first: int = 1, last: int | None = None) -> str:
        """Those lines as `cat -n` prints them."""
        shown = self.lines()[first - 1 : last]
        return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(shown, first))

    def around(self, line: int, new: str) -> tuple[int, int]:
        """The first and the last of the lines about a text that now begins in that line."""
        return max(1, line - CONTEXT_LINES), line + CONTEXT_LINES + new.count("\n")
