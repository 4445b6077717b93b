"""Connections to public addresses: runs the tests in inside/ in their own network namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import netns


@pytest.mark.slow
def test_public_addresses_in_a_network_namespace(tmp_path: Path):
    netns.run_test_inside(str(Path(__file__).parent / "inside" / "test_public.py"), tmp_path, limit_s=150)
