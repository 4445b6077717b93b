"""`finish`: ends RUN, with the model's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core import Json
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

SPEC = ToolSpec(
    name="finish",
    description="Ends the task. Call it when the work is done, with your answer if one was asked for.",
    parameters={
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer, if the task asks for one."}},
        "additionalProperties": False,
    },
)


@dataclass(frozen=True, slots=True)
class Finish:
    """The tool. It has no state."""

    spec: ToolSpec = SPEC

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        answer = arguments.get("answer")
        info = {"answer": answer} if isinstance(answer, str) else {}
        return ToolResult("Done.", is_final=True, info=info)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class FinishKind:
    spec: ToolSpec = SPEC
    needs_sandbox: bool = False
    needs_python: bool = False

    async def open(self, context: ToolContext) -> Finish:
        return Finish()


FINISH = FinishKind()
