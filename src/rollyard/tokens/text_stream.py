"""Decodes ids as they arrive: whole characters only, and no white space at the ends.

Ids are decoded together with the piece before them (some tokenizers decode a token differently at the start of a text),
so each id is decoded a few times, however long the text becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_WINDOW = 32
"""The number of ids without a complete character at which a cut between them is searched. A character has at most 4
bytes."""


class CharacterStream:
    """Decodes whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # the last piece that was decoded whole
        self._pending: list[int] = []

    @property
    def has_more(self) -> bool:
        """Whether an incomplete character is pending."""
        return bool(self._pending)

    def add(self, token: int) -> None:
        self._pending.append(token)

    def take(self) -> str:
        """Returns the characters that are complete."""
        if not self._pending:
            return ""
        text = self._decode_after_context(self._pending)
        if not text.endswith("\ufffd"):
            self._before, self._pending = self._pending, []
            return text
        if len(self._pending) <= _WINDOW:
            return ""
        for cut in range(len(self._pending) - 1, len(self._pending) - 5, -1):  # invalid bytes
            head, tail = self._decode_after_context(self._pending[:cut]), self._decode(self._pending[cut:])
            if tail and head + tail == text:
                self._before, self._pending = self._pending[:cut], self._pending[cut:]
                return head
        return ""

    def flush(self) -> str:
        """Returns what is pending, at the end of the text."""
        pending, self._pending = self._pending, []
        return self._decode_after_context(pending) if pending else ""

    def _decode_after_context(self, ids: Sequence[int]) -> str:
        if not self._before:
            return self._decode(ids)
        return self._decode([*self._before, *ids])[len(self._decode(self._before)) :]


class Trim:
    """`str.strip` for a text that arrives in pieces."""

    def __init__(self) -> None:
        self._whitespace = ""  # white space that is returned if more text follows
        self._has_started = False

    def take(self, text: str) -> str:
        text = self._whitespace + text
        if not self._has_started:
            text = text.lstrip()
        stripped = text.rstrip()
        self._whitespace = text[len(stripped) :]
        self._has_started = self._has_started or bool(stripped)
        return stripped


class TextStream(CharacterStream):
    """Decodes whole characters and strips the text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(decode)
        self._trim = Trim()

    def take(self) -> str:
        return self._trim.take(super().take())

    def flush(self) -> str:
        return self._trim.take(super().flush())
