"""The tools of one MCP server, opened for one rollout: their names, their calls, and their results as text.

Imported when the first server is opened: the client library takes over a second to load.

Results are not validated against the server's output schemas: a hostile schema could block the event loop.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp.types import (
    AudioContent,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp.types import Tool as ListedTool
from pydantic import ValidationError

from rollyard.core import Json
from rollyard.core.failure import SetupFailed, ToolUnreachable
from rollyard.sandbox.base import Sandbox
from rollyard.tools._output import Output
from rollyard.tools.base import ToolContext, ToolResult, ToolSpec
from rollyard.tools.mcp.link import Connect, McpConnection, ServerDied, ServerNotStarted, TimedOut, connected_to
from rollyard.tools.mcp.pipes import running

if TYPE_CHECKING:
    from rollyard.tools.mcp.sources import McpSource

TOOL_NAME_CHARS = 64
"""The maximum for engines and models; longer names are cut and made unique by a part of their hash."""

MOST_TOOLS = 256
MOST_PAGES = 32
DESCRIPTION_BYTES = 8192


async def open_tools(source: McpSource, context: ToolContext) -> list[McpTool]:
    """Returns the tools under the names that the model sees. The server is ended if this fails."""
    link = McpConnection(_connect(source, context.sandbox), start_s=source.start_s)
    try:
        listed, _ = await link.request(_all_tools, timeout_s=source.start_s)
        names = _names(source.name, [tool.name for tool in listed])
        sandbox = context.sandbox if source.server is None else None
        return [
            McpTool(link, source.name, tool.name, _spec(name, tool), context.output_bytes, sandbox)
            for name, tool in zip(names, listed, strict=True)
        ]
    except (ServerNotStarted, ServerDied, TimedOut, MCPError, ValidationError) as error:
        await link.close()
        why = f"the MCP server {source.name!r} gave no tools: {_cut(str(error), 2000)}"
        raise (SetupFailed if source.server is None else ToolUnreachable)(why) from error
    except BaseException:
        await link.close()
        raise


def _connect(source: McpSource, sandbox: Sandbox | None) -> Connect:
    server = source.server
    if server is not None:
        return lambda: connected_to(server)
    if sandbox is None:
        raise RuntimeError("an MCP server that is a command needs a sandbox")
    return lambda: running(sandbox, source.command, source.env)


class McpTool:
    """One tool of a server. Closing any of them ends the server for all."""

    def __init__(
        self, link: McpConnection, server: str, name: str, spec: ToolSpec, output_bytes: int, sandbox: Sandbox | None
    ) -> None:
        self._link = link
        self._server = server
        self._name = name
        self._sandbox = sandbox
        self._output_bytes = output_bytes
        self.spec = spec

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        try:
            result, is_new = await self._link.request(self._asking(arguments), timeout_s=timeout_s)
        except ServerDied as died:
            await self._raise_if_sandbox_ended()
            return self._error(f"died: {died}. It is started again at the next call; its state is lost")
        except TimedOut as late:
            return self._error(f"{late}")
        except ServerNotStarted as failed:
            await self._raise_if_sandbox_ended()
            return self._error(f"does not start: {failed}")
        except MCPError as refused:
            return self._error(f"refused: {refused.message}")
        except ValidationError:
            return self._error("answered with something that is no tool result")
        note = f"[the server {self._server} had ended and was started anew; its state is lost]\n" if is_new else ""
        text = note + text_of(result)
        return ToolResult(_cut(text, self._output_bytes), is_error=bool(result.is_error))

    async def close(self) -> None:
        await self._link.close()

    def _asking(self, arguments: Mapping[str, Json]) -> Callable[[ClientSession], Awaitable[CallToolResult]]:
        request = CallToolRequest(params=CallToolRequestParams(name=self._name, arguments=dict(arguments)))
        return lambda session: session.send_request(request, CallToolResult)

    async def _raise_if_sandbox_ended(self) -> None:
        if self._sandbox is not None and self._sandbox.end is not None:
            await self._sandbox.exec(["true"], timeout_s=1.0)  # raises what ended the sandbox

    def _error(self, what: str) -> ToolResult:
        return ToolResult(_cut(f"Error: the MCP server {self._server}: {what}", self._output_bytes), is_error=True)


# --- the server's tools and results ---------------------------------------------------------------------


async def _all_tools(session: ClientSession) -> list[ListedTool]:
    tools: list[ListedTool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor) if cursor else None)
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MOST_TOOLS:
            raise ServerNotStarted(f"it has more than {MOST_TOOLS} tools")
        if not cursor:
            return tools
    raise ServerNotStarted(f"its list of tools has more than {MOST_PAGES} pages")


def _names(server: str, tools: Sequence[str]) -> list[str]:
    """Returns names that are valid, short and unique; the same names for the same list."""
    taken: set[str] = set()
    names: list[str] = []
    for number, tool in enumerate(tools):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{tool}")
        if len(name) > TOOL_NAME_CHARS or name in taken:
            mark = hashlib.sha256(tool.encode("utf-8", "replace") + b"%d" % (number * (tool in tools[:number])))
            name = f"{name[: TOOL_NAME_CHARS - 9]}_{mark.hexdigest()[:8]}"
        taken.add(name)
        names.append(name)
    return names


def _spec(name: str, tool: ListedTool) -> ToolSpec:
    parameters = {**tool.input_schema, "type": "object"}
    return ToolSpec(name, _cut(tool.description or tool.title or "", DESCRIPTION_BYTES), parameters)


def text_of(result: CallToolResult) -> str:
    """Returns the result as text; other content is replaced by its type and size."""
    parts = [_part(block) for block in result.content]
    has_text = any(isinstance(block, TextContent) for block in result.content)
    if not has_text and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts) or "(no output)"


def _part(block: object) -> str:
    match block:
        case TextContent(text=text):
            return text
        case ImageContent(data=data, mime_type=kind) | AudioContent(data=data, mime_type=kind):
            return f"[{kind}, {len(data) * 3 // 4} bytes]"
        case EmbeddedResource(resource=TextResourceContents(text=text)):
            return text
        case EmbeddedResource(resource=resource):
            return f"[{resource.uri}, {len(getattr(resource, 'blob', '')) * 3 // 4} bytes]"
        case ResourceLink(uri=uri):
            return f"[link to {uri}]"
        case _:
            return f"[{getattr(block, 'type', 'something unknown')}]"


def _cut(text: str, limit_bytes: int) -> str:
    output = Output(limit_bytes)
    output.feed(text.encode("utf-8", "replace"))
    return output.text()[0]
