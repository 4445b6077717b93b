"""The tests of `inside`, each file in a process of the embedded engine's own environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.embedded.environment import run_inside

INSIDE = Path(__file__).parent / "inside"
LIMIT_S = 120.0


@pytest.mark.local
@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("file", sorted(INSIDE.glob("test_*.py")), ids=lambda file: file.stem)
def test_all_that_needs_torch_passes(file: Path, tmp_path: Path):
    run_inside(file, tmp_path, LIMIT_S)
