"""The \\boxed{} that models put their final answer in: how it is asked for, and how it is read."""

from __future__ import annotations

import re

HINT = "Reason step by step, and put your final answer within \\boxed{}."

_BRACE = re.compile(r"\\boxed\{|(?<!\\)[{}]")


def all_boxed(text: str) -> list[str]:
    """The content of each \\boxed{…} whose braces match and that holds no other, in order.

    The text is read once: a model in a loop writes thousands of boxes that never close, or in each other.
    """
    last = -1
    found: list[str] = []
    opened: list[tuple[int, bool]] = []  # where each open brace's inside begins, and whether it is a box
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box and start > last:
                last = start
                found.append(text[start : brace.start()].strip())
    return found


def last_boxed(text: str) -> str | None:
    """The content of the last of them; None if there is none, or nothing in it."""
    found = all_boxed(text)
    return (found[-1] or None) if found else None
