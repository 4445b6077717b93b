"""Puts the commit into wheels and source distributions, as rollyard/_commit.txt, for `rollyard --version`.

The commit is $ROLLYARD_COMMIT, or that of the checkout. Without either, as in a wheel that is built from a source
distribution, nothing is written: the source distribution has the file already.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds one file to what is built. Editable installations ask git when they run."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        commit = "" if version == "editable" else os.environ.get("ROLLYARD_COMMIT") or self._checked_out()
        if commit:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "_commit.txt"
            file.write_text(commit[:12] + "\n")
            place = "rollyard" if self.target_name == "wheel" else "src/rollyard"
            build_data["force_include"][str(file)] = f"{place}/_commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()

    def _checked_out(self) -> str:
        if not (Path(self.root) / ".git").exists():
            return ""
        argv = ["git", "-c", f"safe.directory={self.root}", "-C", self.root, "rev-parse", "HEAD"]
        completed = subprocess.run(argv, capture_output=True, text=True, check=False)
        return completed.stdout.strip()
