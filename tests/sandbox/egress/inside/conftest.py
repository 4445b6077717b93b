"""Tests that run in a network namespace of their own, by ../test_public.py. Elsewhere they are not collected."""

from tests.fleet import netns

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]
