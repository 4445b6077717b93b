"""Turns the files that a sandbox wrote into a layer: finds the excluded paths to delete, and moves the rest.

A layer is a folder with `upper/`, in overlayfs's format. Deleting a path from it makes the lower layers visible there
again: a program, a library or a start-up file that an agent planted is gone, and one that it deleted is back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque", "user.overlay.redirect", "trusted.overlay.redirect")


def covering(upper: Path, paths: Iterable[str]) -> list[Path]:
    """Returns the entries of `upper` that replace or hide the absolute `paths`: at most one entry to delete for each.

    If an ancestor of a path is not a plain folder (a link, a whiteout, a file), or hides everything below it, that
    ancestor is returned.
    """
    entries: list[Path] = []
    for path in paths:
        here = upper
        for name in Path(path).parts[1:]:
            here = here / name
            try:
                is_folder = stat.S_ISDIR(_lstat(here).st_mode)
            except FileNotFoundError:
                break
            if not is_folder or _is_opaque(here):
                entries.append(here)
                break
        else:
            if here != upper:
                entries.append(here)
    return [path for path in dict.fromkeys(entries) if not any(other in path.parents for other in entries)]


def _lstat(path: Path) -> os.stat_result:
    """Like lstat. If the folder's mode denies access, changes it: the current user owns all files of a sandbox."""
    try:
        return path.lstat()
    except PermissionError:
        path.parent.chmod(0o755)
        return path.lstat()


def _is_opaque(folder: Path) -> bool:
    try:
        return any(name in _OPAQUE for name in os.listxattr(folder, follow_symlinks=False))
    except OSError:
        return True  # not trusted, since it cannot be examined


def settle(upper: Path, target: Path) -> None:
    """Moves `upper` into the new folder `target`, by one rename: both are on one file system. Raises FileExistsError
    if the target exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(mode=0o700)
    upper.rename(target / "upper")
