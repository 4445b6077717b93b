"""Public addresses, really connected to: the tests in inside/, in a network namespace of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import netns


@pytest.mark.slow
def test_public_hosts_are_reached_and_rebinding_is_not_in_a_network_namespace(tmp_path: Path):
    netns.run_test_inside(str(Path(__file__).parent / "inside" / "test_public.py"), tmp_path, limit_s=150)
