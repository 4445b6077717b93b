"""The `reasoning_gym` environment: reasoning-gym's families of puzzles and their scorers."""

from rollyard.envs.reasoning.environment import ReasoningEnvironment

__all__ = ["ReasoningEnvironment"]
