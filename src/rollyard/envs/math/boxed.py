"""The \\boxed{} in which models give their final answer: the prompt for it, and its parser."""

from __future__ import annotations

import re

HINT = "Reason step by step, and put your final answer within \\boxed{}."

_BRACE = re.compile(r"\\boxed\{|(?<!\\)[{}]")


def all_boxed(text: str) -> list[str]:
    """The content of each \\boxed{…} that is closed and contains no other box, in order.

    One pass over the text: a model in a loop writes thousands of unclosed or nested boxes.
    """
    last = -1
    contents: list[str] = []
    opened: list[tuple[int, bool]] = []  # for each open brace: where its content starts, and whether it is a box
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last = start
                contents.append(text[start : brace.start()].strip())
    return contents


def last_boxed(text: str) -> str | None:
    """The content of the last box; None if there is none or it is empty."""
    boxes = all_boxed(text)
    return (boxes[-1] or None) if boxes else None
