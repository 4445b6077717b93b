"""The `gym` environment: runs any agent against a NeMo Gym resources server."""

from rollyard.envs.gym.environment import GymEnvironment

__all__ = ["GymEnvironment"]
