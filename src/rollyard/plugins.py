"""Plugins of installed packages, found by entry points, and the line of a plugin's code that raised an exception."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import PurePath
from traceback import walk_tb

OWN = __name__.partition(".")[0]


def plugins(group: str) -> Sequence[EntryPoint]:
    """The installed entry points of this group."""
    return _installed(group, tuple(sys.path))


@cache
def _installed(group: str, path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Cached per `sys.path`: reading the metadata of every installed package takes 20 ms."""
    return tuple(entry_points(group=group))


def is_own(point: EntryPoint) -> bool:
    """Whether an entry point is one of Rollyard's, not of another package."""
    return point.module.partition(".")[0] == OWN


def package_of(plugin: object) -> str:
    """Returns the name of the top-level package that defines an object's class."""
    return type(plugin).__module__.partition(".")[0]


def raised(error: BaseException, package: str) -> str:
    """Describes an exception, with the innermost line of another package in its traceback: `NameError: name 'x' is not
    defined (my_package/env.py, line 12, in eval)`. Paths begin at the package: those of the host are not shown."""
    place = line_in(error, package) if package != OWN else ""
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def line_in(error: BaseException, package: str) -> str:
    """Returns the innermost line of the package in an exception's traceback; empty if none of its code ran."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            code = frame.f_code
            place = f"{_path_in(code.co_filename, package)}, line {line}, in {code.co_name}"
    return place


def not_loaded(point: EntryPoint, error: BaseException) -> str:
    """Describes why an entry point cannot be loaded, with the package that it is from."""
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.module
    return f"its package {package} cannot be loaded: {raised(error, point.module.partition('.')[0])}"


def _path_in(file: str, package: str) -> str:
    parts = PurePath(file).parts
    if package in parts[:-1]:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index(package) :])
    return parts[-1] if parts else file
