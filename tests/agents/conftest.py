"""A real engine over HTTP with scripted replies, a real router, and the package's small tokenizer."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollyard.agents import AgentContext, Conversation, NativeAgent, converse
from rollyard.core import AgentSpec, Deadline, Json, Limits, Run, Sampling, Task
from rollyard.engines import EngineSpec, Kind, Router, RouterSettings
from rollyard.testing.script import FolderTokenizer, Reply, Script, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import ChatML, Renderer, Tokenizers
from rollyard.tools.base import Tool, ToolResult, ToolSpec
from rollyard.tools.finish import FINISH

USER = ({"role": "user", "content": "please"},)


@dataclass
class Jotter:
    """A tool that records its calls and returns the result of the test's function."""

    answer: Callable[[Mapping[str, Json]], Any] = lambda arguments: f"did {arguments.get('command')}"
    calls: list[Mapping[str, Json]] = field(default_factory=list)
    spec: ToolSpec = field(
        default_factory=lambda: ToolSpec(
            "shell",
            "Runs a command.",
            {
                "type": "object",
                "properties": {"command": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        )
    )

    async def call(self, arguments: Mapping[str, Json], *, timeout_s: float) -> ToolResult:
        self.calls.append(arguments)
        answer = self.answer(arguments)
        return ToolResult(await answer if hasattr(answer, "__await__") else answer)

    async def close(self) -> None:
        pass


@dataclass
class Scene:
    """One rollout's RUN, ready to start."""

    engine: ScriptedEngine
    context: AgentContext
    renderer: Renderer
    beats: list[int]

    @property
    def conversation(self) -> Conversation:
        return self.context.conversation

    @property
    def prompts(self) -> list[list[int]]:
        return [list(call.prompt_ids) for call in self.engine.calls]

    async def run(self, messages: Sequence[Mapping[str, Json]] = USER) -> str:
        return await NativeAgent().run(self.context, messages)

    def contents(self, role: str) -> list[str]:
        return [str(m.get("content")) for m in self.conversation.messages if m["role"] == role]


Stage = Callable[..., Any]


@pytest.fixture(scope="session")
def renderer() -> ChatML:
    return ChatML(Tokenizers().load(tokenizer_dir()))


@pytest.fixture
def scene(renderer: ChatML) -> Stage:
    """`async with scene(replies, limits=…, options=…, tools=…) as s:`"""

    @asynccontextmanager
    async def make(
        script: Script | Sequence[str | Reply],
        *,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        options: Mapping[str, Json] | None = None,
        tools: Sequence[Tool] | None = None,
        kind: Kind = Kind.VLLM,
        renderer: Renderer = renderer,
        run_s: float | None = None,
        rollout_id: str = "r1",
        **engine_options: Any,
    ) -> AsyncGenerator[Scene, None]:
        def reply_to(turn: Turn) -> Reply | str | Sequence[int]:
            if not turn.session_id:
                return "a probe"
            return script(turn) if callable(script) else script[min(turn.number, len(script) - 1)]

        task = Task(
            "test",
            agent=AgentSpec("native", dict(options or {})),
            limits=limits or Limits(),
            sampling=sampling or Sampling(max_tokens=256),
        )
        tokenizer = FolderTokenizer(tokenizer_dir())
        settings = RouterSettings(max_tries=1, abort_grace_s=5.0)
        async with (
            ScriptedEngine(reply_to, tokenizer=tokenizer, **engine_options) as engine,
            Router(settings) as router,
        ):
            await router.add(EngineSpec("e1", engine.url, kind))
            async with router.session("default", rollout_id) as session:
                clock, beats = Deadline(run_s), []

                async def renderer_of(_: object) -> Renderer:
                    return renderer

                conversation = await converse(
                    session, renderer_of, task=task, run=Run("run", seed=7), rollout_id=rollout_id, clock=clock
                )
                opened = [Jotter(), await FINISH.open(None)] if tools is None else tools  # type: ignore[arg-type]
                context = AgentContext(
                    task=task,
                    rollout_id=rollout_id,
                    model=conversation,
                    tools={tool.spec.name: tool for tool in opened},
                    sandbox=None,
                    clock=clock,
                    beat=lambda: beats.append(1),
                )
                yield Scene(engine, context, renderer, beats)

    return make


def call(name: str, **arguments: Json) -> str:
    """Returns a tool call as a model writes it."""
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
