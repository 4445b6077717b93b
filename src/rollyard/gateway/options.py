"""The agent options of a task that configure its gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from rollyard.core import Json, Task
from rollyard.core.failure import TaskInvalid
from rollyard.tokens.splice import Reasoning

REASONING: tuple[Reasoning, ...] = ("as_sent", "keep")
NAMES = ("reasoning_history", "strict", "structured_output")


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """`is_strict`: parameters that would be overridden or are unknown are refused. `has_structured_output`: a client
    may constrain a completion to JSON or to a call, which makes its trace untrainable."""

    reasoning: Reasoning = "as_sent"
    is_strict: bool = False
    has_structured_output: bool = False


def options_of(task: Task) -> GatewayOptions:
    """Raises TaskInvalid if an option is invalid."""
    options = task.agent.options
    reasoning = options.get("reasoning_history", "as_sent")
    if reasoning not in REASONING:
        raise TaskInvalid(f"agent.options.reasoning_history: one of {', '.join(REASONING)} was expected")
    return GatewayOptions(
        cast("Reasoning", reasoning),
        is_strict=_flag("strict", options.get("strict", False)),
        has_structured_output=_flag("structured_output", options.get("structured_output", False)),
    )


def _flag(name: str, value: Json) -> bool:
    if not isinstance(value, bool):
        raise TaskInvalid(f"agent.options.{name}: true or false was expected")
    return value
