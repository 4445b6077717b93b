"""A whole rollout of a `stem` task, with its own tools and a search tool from an MCP server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.core import AgentSpec, Json, Limits, Outcome, Task
from rollyard.tools.mcp.sources import OutsideServer
from tests.pipeline.site import finish, open_site, says
from tests.tools.mcp_parts import served

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

PAPERS = {
    "element 119": "As of this edition, the heaviest named element is oganesson, number 118.",
    "boiling point": "Gallium boils at 2673 K.",
}


def library() -> MCPServer:
    """An MCP server with a search over a few pages."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("library")

    @server.tool()
    def find(query: str) -> str:
        """Finds pages that have all words of the query."""
        words = query.lower().split()
        pages = [page for title, page in PAPERS.items() if all(word in f"{title} {page}".lower() for word in words)]
        return "\n".join(pages) or "nothing found"

    return server


def call(name: str, **arguments: Json) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


async def test_an_agent_searches_computes_and_answers_correctly(tmp_path: Path):
    task = Task(
        "stem",
        {
            "question": "At how many degrees Celsius does gallium boil? Look it up, then do it.",
            "choices": ["2204", "2400", "2673", "2946"],
            "answer": 1,
        },
        agent=AgentSpec(options={"mcp": {"search": {"server": "library"}}}),
        limits=Limits(init_s=30, run_s=30, eval_s=20, tool_s=20, model_s=10, max_turns=8),
    )
    turns = (call("search__find", query="gallium boils"), call("ipython", code="round(2673 - 273.15)"), finish("B"))
    async with (
        served(library().streamable_http_app()) as url,
        open_site(tmp_path, says(*turns), mcp_servers={"library": OutsideServer(url)}) as site,
    ):
        rollout = await site.rolled(task)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        tool_outputs = [str(message["content"]) for message in trajectory.messages if message["role"] == "tool"]
        assert tool_outputs[0] == "Gallium boils at 2673 K."
        assert "2400" in tool_outputs[1]
        names = [schema["function"]["name"] for schema in trajectory.tools]  # type: ignore[index,call-overload]
        assert names == ["ipython", "finish", "search__find"]
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0
        site.nothing_left()
