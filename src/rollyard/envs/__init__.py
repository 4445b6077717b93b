"""Environments: they prepare a task's sandbox, give the agent its instruction and tools, and score the result."""

from rollyard.envs.base import ArtifactRule, EnvContext, Environment, Evidence, Judge, Plan, Solution, Start
from rollyard.envs.registry import Environments

__all__ = [
    "ArtifactRule",
    "EnvContext",
    "Environment",
    "Environments",
    "Evidence",
    "Judge",
    "Plan",
    "Solution",
    "Start",
]
