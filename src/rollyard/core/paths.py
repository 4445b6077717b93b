"""Default paths, from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def data_home(environ: Mapping[str, str]) -> Path:
    """The default data folder: $XDG_DATA_HOME/rollyard, else ~/.local/share/rollyard."""
    base = environ.get("XDG_DATA_HOME")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (Path(base).expanduser() if base else home / ".local" / "share") / "rollyard"
