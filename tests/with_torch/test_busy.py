# pyright: reportMissingImports=false
"""The utilization of the GPU, from the output of its driver."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import overlap
import pytest


def test_only_samples_within_the_window_count(tmp_path: Path):
    file = tmp_path / "gpu.csv"
    rows = ["2026/11/16 10:00:00.000, 100", "2026/11/16 10:00:01.500, 40", "2026/11/16 10:00:02.000, 60"]
    file.write_text("\n".join([*rows, "2026/11/16 10:00:02.500, [N/A]", "2026/11/16 10:00:09.000, 7", "2026/11"]))
    since = datetime(2026, 11, 16, 10, 0, 1).astimezone().timestamp()
    busy = overlap._Busy(file)
    assert busy.share(since, since + 5) == pytest.approx(0.5)
    assert busy.share(since + 100, since + 200) is None


def test_without_a_driver_there_is_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "QUERY", ["no-such-program"])
    with overlap._Busy(tmp_path / "gpu.csv") as busy:
        pass
    assert busy.share(0, 1e12) is None
