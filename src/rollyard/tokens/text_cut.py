"""Splits a turn at markers that are plain text, for vocabularies without ids for them (SmolLM2): complete or streamed.

Thinking, if it comes first, ends at the first `</think>`. The text after it is content, up to the first `<tool_call>`.
From there on there are only calls, each ended by the first `</tool_call>` after it or by the next `<tool_call>`. Read
from left to right, nothing has to be withdrawn, and a marker is recognised at its last character.

Invariant (tests/tokens/test_reader.py): `TextCut` returns what `cut_text` returns for the whole text, stripped. Work
per piece does not grow with the turn: the text held back is never longer than a marker.
"""

from __future__ import annotations

import re
from typing import Literal

from rollyard.tokens.text_stream import Trim

Kind = Literal["text", "reasoning"]

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{CALL}|{CALL_END}")


def cut_text(text: str) -> tuple[str, str, list[tuple[str, bool]]]:
    """(content, reasoning, calls, each with whether it was closed)."""
    reasoning = ""
    if text.lstrip().startswith(THINK):
        reasoning, _, text = text.lstrip().removeprefix(THINK).partition(THINK_END)
    content, *blocks = text.split(CALL)
    calls: list[tuple[str, bool]] = []
    for block in blocks:
        body, closing, _ = block.partition(CALL_END)
        calls.append((body, bool(closing)))
    return content, reasoning, calls


class TextCut:
    """Splits text as it arrives. Calls are only counted; the renderer parses them."""

    def __init__(self) -> None:
        self._part: Literal["start", "reasoning", "text", "calls"] = "start"
        self._trim = Trim()
        self._pending = ""  # it may be the start of a marker
        self._opened = 0
        self.settled_calls = 0  # the number of calls up to the last closed one

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """Returns what is certain now, without white space at the ends."""
        self._pending += text
        out: list[tuple[Kind, str]] = []
        if self._part == "start":
            self._start()
        if self._part == "reasoning" and self._up_to(THINK_END, "reasoning", out):
            self._part, self._trim = "text", Trim()
        if self._part == "text" and self._up_to(CALL, "text", out):
            self._part, self._opened = "calls", 1
        if self._part == "calls":
            self._count()
        return out

    def flush(self) -> list[tuple[Kind, str]]:
        """Returns the text held back, at the end of the turn."""
        kind: Kind = "reasoning" if self._part == "reasoning" else "text"
        pending, self._pending = self._pending, ""
        return [] if self._part == "calls" else [(kind, self._trim.take(pending))]

    def _start(self) -> None:
        self._pending = self._pending.lstrip()
        if self._pending.startswith(THINK):
            self._part, self._pending = "reasoning", self._pending.removeprefix(THINK)
        elif not THINK.startswith(self._pending):
            self._part = "text"

    def _up_to(self, marker: str, kind: Kind, out: list[tuple[Kind, str]]) -> bool:
        """Emits the text before the marker, or before a possible start of it; returns whether the marker was found."""
        before, matched, after = self._pending.partition(marker)
        if not matched:
            at = before.rfind("<", max(0, len(before) - len(marker) + 1))  # no marker has a second "<"
            if at >= 0 and marker.startswith(before[at:]):
                before, after = before[:at], before[at:]
        self._pending = after
        out.append((kind, self._trim.take(before)))
        return bool(matched)

    def _count(self) -> None:
        end = 0
        for match in _CALLS.finditer(self._pending):
            end = match.end()
            if match[0] == CALL:
                self._opened += 1
            else:
                self.settled_calls = self._opened
        self._pending = self._pending[end:][1 - len(CALL_END) :]
