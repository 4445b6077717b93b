"""A text file as the editor handles it: lines that end with `\\n`, whatever they end with on disk.

Invariants. `TextFile.of(data).data == data` for every accepted file: line endings, a missing final newline and a byte
order mark are preserved. If all lines end with CRLF, the model neither sees nor has to send it; if endings are mixed,
the text is unchanged. Files that are not UTF-8 or contain NUL are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTEXT_LINES = 4
"""Lines shown before and after an edit, as models expect."""

MOST_MATCHES = 50
"""The most occurrences that are searched for if a text is not unique; a model needs no more."""


class NotText(ValueError):
    """The file is not text. The message describes what it is."""


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

    def with_file_newlines(self, text: str) -> str:
        """Converts a text that the model sent to this file's line endings."""
        return text.replace("\r\n", "\n") if self.is_crlf else text

    def lines(self) -> list[str]:
        """Returns the lines without their endings; a newline at the end of the file does not start another line."""
        lines = self.text.split("\n")
        return lines if lines[-1] else lines[:-1]

    def places(self, text: str) -> list[int]:
        """Returns the positions of a text, including overlapping ones: a text that matches twice is not unique."""
        positions: list[int] = []
        at = self.text.find(text)
        while at >= 0 and len(positions) < MOST_MATCHES:
            positions.append(at)
            at = self.text.find(text, at + 1)
        return positions

    def line_of(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def replaced(self, at: int, old: str, new: str) -> TextFile:
        return replace(self, text=self.text[:at] + new + self.text[at + len(old) :])

    def inserted(self, after_line: int, text: str) -> TextFile:
        """Inserts a text as separate lines; 0 is before the first line."""
        lines = self.text.split("\n")
        return replace(self, text="\n".join([*lines[:after_line], *text.split("\n"), *lines[after_line:]]))

    def numbered(self, first: int = 1, last: int | None = None) -> str:
        """Returns those lines in the format of `cat -n`."""
        shown = self.lines()[first - 1 : last]
        return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(shown, first))

    def around(self, line: int, new: str) -> tuple[int, int]:
        """Returns the first and the last line of the context of a text that begins in that line."""
        return max(1, line - CONTEXT_LINES), line + CONTEXT_LINES + new.count("\n")
