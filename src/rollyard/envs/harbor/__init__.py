"""Runs task folders of Harbor and Terminal-Bench unchanged."""

from rollyard.envs.harbor.environment import HarborEnvironment

__all__ = ["HarborEnvironment"]
