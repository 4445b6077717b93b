"""The commit that this package was built from, or that it runs from."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def commit() -> str:
    """Returns twelve digits, with `-dirty` in a changed checkout, or an empty string if the commit is not known.

    Wheels contain it (`hatch_build.py`). A package in the `src` folder of a checkout asks git.
    """
    built = _PACKAGE / "_commit.txt"
    if built.exists():
        return built.read_text().strip()
    checkout = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (checkout / ".git").exists():
        return ""
    argv = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout)]  # the checkout may belong to another user
    argv += ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        completed = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return ""
    return completed.stdout.strip()
