"""The `swe` environment: a repository with an issue, scored by hidden tests."""

from rollyard.envs.swe.environment import SweEnvironment

__all__ = ["SweEnvironment"]
