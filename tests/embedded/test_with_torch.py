"""Runs the tests of `tests/with_torch` in one process of the embedded engine's own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedded.environment import run_inside

pytestmark = pytest.mark.slow

INSIDE = Path(__file__).parents[1] / "with_torch"
LIMIT_S = 900.0


@pytest.mark.local
@pytest.mark.timeout(960)
@pytest.mark.xdist_group("torch")
def test_the_tests_that_need_torch_pass(tmp_path: Path):
    run_inside(INSIDE, tmp_path, LIMIT_S)


def test_the_package_can_be_imported_without_its_extra():
    code = """
import sys
import rollyard.embedded, rollyard.embedded.server, rollyard.embedded.worker, rollyard.embedded.batching
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
