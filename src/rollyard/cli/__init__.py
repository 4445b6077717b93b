"""The commands that a person types. Everything heavy is imported by the command that needs it."""

from rollyard.cli._main import main

__all__ = ["main"]
