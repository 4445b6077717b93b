"""A tool of a resources server: a POST to the path of its name. The reply is the observation, whatever its status.

A call is sent once, because it may have side effects. A timeout is an observation, as with any tool. If the server
cannot be reached, the blame is `infra`, and the model does not learn from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core import Json
from rollyard.core.failure import ToolUnreachable
from rollyard.envs.gym.session import GymSession, Unreachable, encoded
from rollyard.tools._output import cut
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec

READ_BYTES = 4 << 20
"""How much of a reply is read; the model sees limits.output_bytes of it."""


@dataclass(frozen=True, slots=True)
class GymTool:
    """Both kind and tool: INIT creates it for one rollout, and it needs no opening or closing."""

    spec: ToolSpec
    session: GymSession
    server: str
    output_bytes: int
    needs_sandbox: bool = False
    needs_python: bool = False

    async def open(self, context: ToolContext) -> GymTool:
        return self

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        name = self.spec.name
        try:
            body = encoded(arguments)
        except (ValueError, RecursionError) as error:
            return ToolResult(f"Error: {name}: the arguments cannot be sent: {error}", is_error=True)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.session.post(name, body, most_bytes=READ_BYTES)
        except TimeoutError:
            return ToolResult(f"Error: {name} did not answer within {timeout_s:g} s", is_error=True)
        except Unreachable as error:
            raise ToolUnreachable(f"the resources server {self.server}, tool {name}: {error}") from error
        return ToolResult(cut(reply.text, self.output_bytes), is_error=not reply.is_good)

    async def close(self) -> None:
        """Does nothing: the environment owns the session."""
