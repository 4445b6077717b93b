"""Tools for testing environments, engines, runtimes and stores: a scripted engine, and the conformance suites.

The names below are imported on first use, so that `python -m rollyard.testing.scripted_engine` prints no warning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.testing.script import ByteTokenizer, FolderTokenizer, Reply, Rules, Turn
    from rollyard.testing.scripted_engine import ScriptedEngine

__all__ = ["ByteTokenizer", "FolderTokenizer", "Reply", "Rules", "ScriptedEngine", "Turn"]

_HOMES = {
    "ByteTokenizer": "script",
    "FolderTokenizer": "script",
    "Reply": "script",
    "Rules": "script",
    "ScriptedEngine": "scripted_engine",
    "Turn": "script",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
