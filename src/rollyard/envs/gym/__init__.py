"""The `gym` environment: any resources server of NeMo Gym, played by any agent here."""

from rollyard.envs.gym.environment import GymEnvironment

__all__ = ["GymEnvironment"]
