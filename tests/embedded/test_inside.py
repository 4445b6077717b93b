"""The tests of `inside`, each file in a process of the embedded engine's own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedded.environment import run_inside

INSIDE = Path(__file__).parent / "inside"
LIMIT_S = 240.0


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", sorted(INSIDE.glob("test_*.py")), ids=lambda file: file.stem)
def test_all_that_needs_torch_passes(file: Path, tmp_path: Path):
    run_inside(file, tmp_path, LIMIT_S)


def test_the_wing_is_imported_without_its_packages():
    code = """
import sys
import rollyard.embedded, rollyard.embedded.server, rollyard.embedded.worker, rollyard.embedded.batching
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
