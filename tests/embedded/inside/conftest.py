# pyright: reportMissingImports=false
"""These tests run where torch is: `tests/embedded/test_inside.py` starts them in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Generator

os.environ["TRITON_INTERPRET"] = "1"  # for our kernels; Triton asks when torch imports it

import pytest
import torch

from tests.embedded.inside.parts import CACHES, KINDS, SETTINGS, tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Beside other tests, more of them only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(KINDS))
def module(request: pytest.FixtureRequest) -> object:
    """A tiny model with random weights, of each kind of attention."""
    return tiny(request.param)


@pytest.fixture(params=["ragged", "paged", "paged, padded", "paged, in bursts"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str, None, None]:
    """What a CPU uses and what a GPU uses, both here; without graphs and our kernel, which only a GPU has."""
    if request.param == "paged, padded":
        monkeypatch.setattr("rollyard.embedded.paged.ROUNDED", {"cpu"})
    if request.param == "paged, in bursts":
        monkeypatch.setitem(SETTINGS, "burst", 4)
    CACHES.append(request.param.partition(",")[0])
    yield request.param
    CACHES.pop()
