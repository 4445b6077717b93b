# pyright: reportMissingImports=false
"""`rollyard engine --tf32` sets torch's precision before anything is loaded."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from rollyard.cli.commands import engine as command


@pytest.mark.parametrize(("is_asked", "precision"), [(True, "high"), (False, "highest")])
def test_the_option_sets_the_matmul_precision(is_asked: bool, precision: str, monkeypatch: pytest.MonkeyPatch):
    precisions: list[str] = []

    def run(served: Coroutine[Any, Any, None]) -> None:
        precisions.append(torch.get_float32_matmul_precision())
        served.close()

    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(command, "run", run)
    try:
        torch.set_float32_matmul_precision("highest")
        command.engine(model="anything", port=0, tf32=is_asked)
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions == [precision]
