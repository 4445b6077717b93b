"""The `swe` environment: a repository with an issue, scored by its hidden tests. See `environment`."""

from rollyard.envs.swe.environment import SweEnvironment

__all__ = ["SweEnvironment"]
