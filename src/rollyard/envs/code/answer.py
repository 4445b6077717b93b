"""The code in an answer: its last block between fences."""

from __future__ import annotations

from collections.abc import Collection

FENCES = ("```", "~~~")


def last_block(text: str, tags: Collection[str] = ()) -> str | None:
    """The last block that is marked with one of the tags; where there is none, the last of all. One that is not closed
    was cut off, and does not count."""
    tagged: str | None = None
    last: str | None = None
    fence, tag, lines = "", "", list[str]()
    for line in text.splitlines():
        bare = line.strip()
        if not fence:
            if bare.startswith(FENCES):
                fence = bare[:3]
                tag = bare.lstrip(fence[0]).strip().split(" ")[0].lower()
                lines = []
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            last = "\n".join(lines) + "\n"
            tagged = last if tag in tags else tagged
            fence = ""
        else:
            lines.append(line)
    return tagged if tagged is not None else last
