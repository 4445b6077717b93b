"""Tools by name: the built-in ones, then those that packages provide by entry point (`rollyard.tools`).

A name has one owner: if a package uses the name of another tool, built-in or not, that name is an error and nothing is
shadowed. An environment's own tools are not in the registry; they are part of its `Start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import cast

from rollyard.core.failure import UnknownTool
from rollyard.plugins import plugins
from rollyard.tools.base import ToolKind

BUILT_IN = {
    "editor": ("rollyard.tools.editor", "EDITOR"),
    "finish": ("rollyard.tools.finish", "FINISH"),
    "ipython": ("rollyard.tools.ipython", "IPYTHON"),
    "shell": ("rollyard.tools.shell", "SHELL"),
}
"""Name → the location of its kind. Imported on first use: a tool may have large dependencies."""


_PARTS = ("spec", "needs_sandbox", "needs_python", "open")

GROUP = "rollyard.tools"


def tool_kind(name: str) -> ToolKind:
    """Returns the kind of that name. Raises `UnknownTool`."""
    points = _installed().get(name, ())
    owners = [*(["Rollyard itself"] if name in BUILT_IN else []), *[_owner(point) for point in points]]
    if len(owners) > 1:
        raise UnknownTool(f"the tool name {name!r} is claimed by {' and by '.join(owners)}; uninstall all but one")
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name]
        return cast("ToolKind", getattr(import_module(module), attribute))
    if not points:
        raise UnknownTool(f"there is no tool {name!r}; there are: {', '.join(tool_names())}")
    try:
        kind = points[0].load()
    except Exception as error:
        raise UnknownTool(
            f"the tool {name!r} of {owners[0]} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if isinstance(kind, type) or not all(hasattr(kind, part) for part in _PARTS):
        raise UnknownTool(f"the tool {name!r} of {owners[0]} is not a ToolKind: {points[0].value} is {kind!r}")
    return cast("ToolKind", kind)


def tool_names() -> tuple[str, ...]:
    """Returns the names of all tools that a task may use."""
    return tuple(sorted({*BUILT_IN, *_installed()}))


def _installed() -> Mapping[str, Sequence[EntryPoint]]:
    by_name: dict[str, list[EntryPoint]] = {}
    for point in plugins(GROUP):
        by_name.setdefault(point.name, []).append(point)
    return by_name


def _owner(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist is not None else f"an unknown package ({point.value})"
