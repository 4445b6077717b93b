"""What the native agent may call."""

from rollyard.tools.base import Tool, ToolContext, ToolKind, ToolResult, ToolSpec
from rollyard.tools.registry import tool_kind

__all__ = ["Tool", "ToolContext", "ToolKind", "ToolResult", "ToolSpec", "tool_kind"]
