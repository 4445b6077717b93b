"""These tests make networks: `tests/fleet/test_reach.py` runs them in a place of their own."""

from tests.fleet import netns

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]
