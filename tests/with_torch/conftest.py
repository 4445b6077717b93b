# pyright: reportMissingImports=false
"""These tests need torch: `tests/embedded/test_with_torch.py` runs all of them in one process of a separate
environment, without the other conftest files."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # for our kernels; Triton reads it when torch imports it
# As when train.py is run: its modules import each other by name.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "yardwork"))

import pytest
import torch

from tests.with_torch.parts import CACHES, KINDS, SETTINGS, tiny


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # later collections skip torch's half a million objects


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """With other tests running, more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=sorted(KINDS))
def module(request: pytest.FixtureRequest) -> object:
    """A tiny model with random weights, of each kind of attention."""
    return tiny(request.param)


@pytest.fixture(params=["ragged", "paged", "paged, padded", "paged, in bursts"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[str, None, None]:
    """The caches for CPUs and for GPUs, both on the CPU, without graphs and kernels, which need a GPU."""
    if request.param == "paged, padded":
        monkeypatch.setattr("rollyard.embedded.transformer.paged.ROUNDED", {"cpu"})
    if request.param == "paged, in bursts":
        monkeypatch.setitem(SETTINGS, "burst", 4)
    CACHES.append(request.param.partition(",")[0])
    yield request.param
    CACHES.pop()
