"""The code in an answer: its last block between fences."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"([ \t]*)(```+(?!.*`)|~~~+)\s*([^\s]*)")
"""Its indentation, the fence, the tag. Behind backticks there are no more of them: that would be code within a line."""


def last_block(text: str, tags: Collection[str] = ()) -> str | None:
    """The last block that is marked with one of the tags; where there is none, the last of all. One that is not closed
    was cut off, and does not count. As in Markdown, a block in a list is indented as its fence is, and one that is as
    long closes a fence."""
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
