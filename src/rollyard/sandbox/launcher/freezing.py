"""From what a sandbox wrote to a layer: what must not count is taken out, and the rest is moved to its place.

A layer is a folder with `upper/`, as overlayfs wants it. Taking a path out of it makes what lies below show through
again: so a program, a library or a start-up file that an agent planted is gone, and one that it deleted is back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque", "user.overlay.redirect", "trusted.overlay.redirect")


def covering(upper: Path, paths: Iterable[str]) -> list[Path]:
    """What in `upper` stands for, or hides, each of the absolute `paths`: for each at most one entry to delete.

    On the way to a path, whatever is no plain folder (a link, a whiteout, a file), or hides all that lies below it,
    goes as a whole.
    """
    found: list[Path] = []
    for path in paths:
        here = upper
        for name in Path(path).parts[1:]:
            here = here / name
            try:
                is_folder = stat.S_ISDIR(_looked_at(here).st_mode)
            except FileNotFoundError:
                break
            if not is_folder or _hides(here):
                found.append(here)
                break
        else:
            if here != upper:
                found.append(here)
    return [path for path in dict.fromkeys(found) if not any(other in path.parents for other in found)]


def _looked_at(path: Path) -> os.stat_result:
    """A folder that its owner has shut is opened: it is ours, whoever it was inside."""
    try:
        return path.lstat()
    except PermissionError:
        path.parent.chmod(0o755)
        return path.lstat()


def _hides(folder: Path) -> bool:
    try:
        return any(name in _OPAQUE for name in os.listxattr(folder, follow_symlinks=False))
    except OSError:
        return True  # what cannot be looked at is not trusted


def settle(upper: Path, target: Path) -> None:
    """Moves it; on one file system that is one step. FileExistsError if the target is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(mode=0o700)
    upper.rename(target / "upper")
