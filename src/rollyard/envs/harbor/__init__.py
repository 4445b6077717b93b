"""Harbor and Terminal-Bench task folders, run as they are."""

from rollyard.envs.harbor.environment import HarborEnvironment

__all__ = ["HarborEnvironment"]
