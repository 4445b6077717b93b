"""These tests create networks: `tests/fleet/test_reach.py` runs them in their own namespaces."""

from tests.fleet import netns

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]
