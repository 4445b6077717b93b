"""Nodes that cannot use an engine, as processes on simulated machines: see `apart/test_reach_apart.py`."""

from pathlib import Path

import pytest

from tests.fleet import netns

pytestmark = pytest.mark.slow

FILE = Path(__file__).parent / "apart" / "test_reach_apart.py"


@pytest.mark.timeout(300)
def test_nodes_that_cannot_use_an_engine_lose_no_rollouts(tmp_path: Path) -> None:
    netns.run_test_inside(str(FILE), tmp_path, limit_s=280)
