"""A tool of a resources server: a POST to the path of its name, whose reply is the observation, whatever its status.

A call is sent once, for it may have changed something. A server that is too slow is an observation, as with any tool;
one that is not there at all is infrastructure's trouble, and nothing that the model should learn from.
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
"""Of a reply; the model sees limits.output_bytes of that."""


@dataclass(frozen=True, slots=True)
class GymTool:
    """Both kind and tool: INIT makes it for one rollout, and there is nothing to open or close."""

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
        """The session is the environment's."""
