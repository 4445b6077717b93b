"""What installed packages add to Rollyard, by entry points."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points


def plugins(group: str) -> Sequence[EntryPoint]:
    """All that are installed under this group's name."""
    return tuple(_installed(tuple(sys.path)).select(group=group))


@cache
def _installed(path: tuple[str, ...]) -> EntryPoints:
    """Read once: it looks into every installed package, which takes 20 ms."""
    return entry_points()
