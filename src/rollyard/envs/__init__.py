"""Where a task happens, what the agent is told, how it is scored."""

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
