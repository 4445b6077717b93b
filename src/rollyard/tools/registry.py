"""The built-in tools by name. An environment's own come with its `Start`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from rollyard.core.failure import UnknownTool
from rollyard.tools.base import ToolKind

BUILT_IN = {
    "finish": ("rollyard.tools.finish", "FINISH"),
    "shell": ("rollyard.tools.shell", "SHELL"),
}
"""Name → where its kind is. Imported when asked for: a tool may bring much along."""


def tool_kind(name: str) -> ToolKind:
    """The kind of that name, or `UnknownTool`."""
    try:
        module, attribute = BUILT_IN[name]
    except KeyError:
        raise UnknownTool(f"there is no tool {name!r}; there are: {', '.join(sorted(BUILT_IN))}") from None
    return cast("ToolKind", getattr(import_module(module), attribute))
