"""The tools that the native agent offers to the model."""

from rollyard.tools.base import Tool, ToolContext, ToolKind, ToolResult, ToolSpec
from rollyard.tools.function import tool
from rollyard.tools.registry import tool_kind, tool_names

__all__ = ["Tool", "ToolContext", "ToolKind", "ToolResult", "ToolSpec", "tool", "tool_kind", "tool_names"]
