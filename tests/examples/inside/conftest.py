# pyright: reportMissingImports=false
"""These tests run where torch is: `tests/examples/test_inside.py` starts them in an environment of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# As Python does for whoever runs train.py: its parts import each other by name.
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "yardwork"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Beside other tests, more of them only wait for each other."""
    torch.set_num_threads(1)
