"""Finds the code in an answer: its last fenced code block."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"([ \t]*)(```+(?!.*`)|~~~+)\s*([^\s]*)")
"""The indentation, the fence and the tag. No backtick may follow a fence of backticks: that is inline code."""


def last_block(text: str, tags: Collection[str] = ()) -> str | None:
    """The last block with one of the tags; if there is none, the last block. An unclosed block was cut off and does not
    count. As in Markdown, a block in a list is indented like its fence, and a fence of at least the same length closes
    it."""
    tagged: str | None = None
    last: str | None = None
    indent, fence, tag, lines = "", "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        bare = line.strip()
        if not fence:
            if (opened := _FENCE.match(line)) is not None:
                indent, fence, tag = opened.groups()
                lines = []
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            last = "\n".join(lines) + "\n"
            tagged = last if tag.lower() in tags else tagged
            fence = ""
        else:
            lines.append(line.removeprefix(indent))
    return tagged if tagged is not None else last
