"""Tests that ../test_public.py runs in their own network namespace. Elsewhere they are not collected."""

from tests.fleet import netns

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]
