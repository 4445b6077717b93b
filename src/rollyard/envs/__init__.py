"""Environments: they prepare a task's sandbox, give the agent its instruction and tools, and score the result.

Everything that an environment needs is importable from here.
"""

from rollyard.core import DataField, Message, Score, Task
from rollyard.core.failure import SetupFailed, TaskInvalid
from rollyard.envs.base import ArtifactRule, EnvContext, Environment, Evidence, Judge, Plan, Solution, Start
from rollyard.envs.protected import PROTECTED
from rollyard.envs.registry import Environments
from rollyard.sandbox.base import Bind

__all__ = [
    "PROTECTED",
    "ArtifactRule",
    "Bind",
    "DataField",
    "EnvContext",
    "Environment",
    "Environments",
    "Evidence",
    "Judge",
    "Message",
    "Plan",
    "Score",
    "SetupFailed",
    "Solution",
    "Start",
    "Task",
    "TaskInvalid",
]
