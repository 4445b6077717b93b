# pyright: reportMissingImports=false
"""These tests run where torch is: `tests/embedded/test_inside.py` starts them in an environment of their own."""

from __future__ import annotations

import pytest
import torch

from tests.embedded.inside.parts import KINDS, tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Beside other tests, more of them only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(KINDS))
def module(request: pytest.FixtureRequest) -> object:
    """A tiny model with random weights, of each kind of attention."""
    return tiny(request.param)
