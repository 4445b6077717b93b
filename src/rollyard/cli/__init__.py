"""The `rollyard` command line. A command imports heavy packages only when it runs."""

from rollyard.cli._main import main

__all__ = ["main"]
