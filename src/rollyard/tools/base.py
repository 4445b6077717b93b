"""The interface of tools: a `Tool` is declared once with a JSON schema and opened once per rollout.

Invariant: an error of a tool is an observation for the model (`is_error`), never an exception, unless the sandbox
itself has ended; that is a failure with its own blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from rollyard.core import Json
from rollyard.sandbox.base import Sandbox
from rollyard.sandbox.python import PortablePython


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The tool's definition as the model sees it. `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Json]

    def schema(self) -> dict[str, Json]:
        """Returns the definition in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """An observation. `is_final` ends the agent's work (the finish tool)."""

    content: str
    is_error: bool = False
    is_final: bool = False
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The resources of a tool. `sandbox` is None only for tools that need none."""

    sandbox: Sandbox | None
    output_bytes: int = 16_384
    python: PortablePython | None = None  # Rollyard's portable Python, bound into the sandbox if a kind `needs_python`


class Tool(Protocol):
    """One tool, opened for one rollout."""

    @property
    def spec(self) -> ToolSpec:
        """The tool's definition as the model sees it."""
        ...

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        """Executes one call. An error is a result with `is_error`; it raises only if the sandbox has ended."""
        ...

    async def close(self) -> None:
        """Releases what the tool holds."""
        ...


@runtime_checkable
class ToolKind(Protocol):
    """Creates tools of one kind, one for each rollout."""

    @property
    def spec(self) -> ToolSpec:
        """The definition of the tools that it creates."""
        ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether a rollout with this tool has to start a sandbox."""
        ...

    @property
    def needs_python(self) -> bool:
        """Whether Rollyard's portable Python is bound into the sandbox, for images that have none."""
        ...

    async def open(self, context: ToolContext) -> Tool:
        """Returns the tool of one rollout."""
        ...


class ToolSource(Protocol):
    """Creates tools that are known only after it is opened: those of an MCP server. Closing one of them closes all."""

    @property
    def name(self) -> str:
        """The name of the source, which is part of its tools' names."""
        ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether a rollout with this source has to start a sandbox."""
        ...

    @property
    def needs_python(self) -> bool:
        """Whether Rollyard's portable Python is bound into the sandbox."""
        ...

    async def open(self, context: ToolContext) -> Sequence[Tool]:
        """Returns its tools for one rollout. Raises SetupFailed or ToolUnreachable if it cannot be reached."""
        ...
