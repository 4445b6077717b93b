"""Demonstrations: an environment's reference solution, in the same tokens as the native agent's."""

import asyncio
import functools
import json
import re
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rollyard.cli.rig import service
from rollyard.client import AsyncClient
from rollyard.client.batching import collate
from rollyard.core import (
    AgentSpec,
    Blame,
    Json,
    Limits,
    Message,
    Outcome,
    Rollout,
    Run,
    Sampling,
    Score,
    Task,
    Trace,
    Trajectory,
)
from rollyard.core.failure import TaskInvalid
from rollyard.core.trace import DEMONSTRATION
from rollyard.engines import EngineSpec, Kind
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Solution, Start
from rollyard.envs.yardwork import FAMILIES, YardworkEnvironment
from rollyard.testing.script import FolderTokenizer, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import verify_trace
from rollyard.tools.base import Tool
from tests.pipeline.site import Site, open_site

pytestmark = pytest.mark.slow

LIMITS = Limits(init_s=20, run_s=20, eval_s=20, tool_s=10, model_s=10, max_turns=12)
CHAIN: dict[str, Json] = {"family": "chain", "template": "t0", "level": 2, "seed": 42, "split": "train"}


def yardwork(data: Mapping[str, Json], agent: str = "demonstrate", **options: Json) -> Task:
    return Task("yardwork", data, agent=AgentSpec(agent, options), limits=LIMITS, sampling=Sampling(max_tokens=512))


@dataclass
class Stage:
    """A pipeline with one engine, which returns the given replies and fails without them."""

    site: Site
    engine: ScriptedEngine
    replies: list[str] = field(default_factory=list)

    def reply(self, turn: Turn) -> str:
        if not turn.session_id:
            return "a probe"
        assert turn.number < len(self.replies), "the engine was called"
        return self.replies[turn.number]

    async def rolled(self, task: Task, **fields: Any) -> tuple[Rollout, tuple[Trace, ...]]:
        rollout = await self.site.rolled(task, **fields)
        trajectory = await self.site.store.trajectory(rollout.id)
        return rollout, trajectory.traces if trajectory else ()

    async def demonstrated(self, task: Task) -> Trajectory:
        rollout = await self.site.rolled(task)
        assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
        assert rollout.ending.score.reward == 1.0
        trajectory = await self.site.store.trajectory(rollout.id)
        assert trajectory is not None
        return trajectory


@functools.cache
def tokenizer_of(model: Path) -> FolderTokenizer:
    """Loads a tokenizer once: a large one takes a third of a second."""
    return FolderTokenizer(model)


@asynccontextmanager
async def stage(folder: Path, model: Path, environments: Environments | None = None) -> AsyncGenerator[Stage, None]:
    async with open_site(folder, None, engines=0, environments=environments) as opened:
        staged = Stage(opened, None)  # type: ignore[arg-type]
        async with ScriptedEngine(staged.reply, tokenizer=tokenizer_of(model)) as engine:
            staged.engine = engine
            await opened.router.add(EngineSpec("e0", engine.url, Kind.VLLM, tokenizer=str(model)))
            yield staged


@pytest.fixture(params=["small", "smollm2"])
def model(request: pytest.FixtureRequest) -> Path:
    """A tokenizer in which the markers of tool calls are tokens, and one in which they are text."""
    return tokenizer_dir() if request.param == "small" else request.getfixturevalue("vllm_model")


def turn_texts(trace: Trace, model: Path) -> list[str]:
    """Returns a trace's turns as text, without stop tokens: the replies of a policy that does the same."""
    tokenizer = tokenizer_of(model)
    return [tokenizer.decode(trace.token_ids[span.start : span.end - 1]) for span in trace.spans]


def tasks() -> Iterator[dict[str, Json]]:
    for index, family in enumerate(FAMILIES):
        split = ("train", "held_out")[index % 2]
        options = {"count": "1", "families": family, "levels": str(1 + index % 5), "split": split}
        yield from (dict(body["data"]) for body in YardworkEnvironment().generate(options))  # type: ignore[arg-type]


async def test_a_replay_by_the_native_agent_gives_the_same_tokens(tmp_path: Path, model: Path):
    async with stage(tmp_path, model) as on:
        for data in tasks():
            on.replies = []
            demonstration = await on.demonstrated(yardwork(data))
            (trace,) = demonstration.traces
            verify_trace(trace)
            on.replies = turn_texts(trace, model)
            rollout = await on.demonstrated(yardwork(data, "native"))
            (played,) = rollout.traces
            assert (data, played.token_ids, played.mask) == (data, trace.token_ids, trace.mask)
            assert rollout.messages == demonstration.messages
            assert (rollout.ended_by, rollout.turns) == (demonstration.ended_by, len(trace.spans))
            assert [(span.start, span.end, span.turn) for span in played.spans] == [
                (span.start, span.end, span.turn) for span in trace.spans
            ]


@pytest.mark.parametrize(
    "options",
    [{"system_prompt": "Be quick."}, {"tools": ["finish", "shell"]}, {"schemas": False}],
    ids=["system_prompt", "tools", "schemas"],
)
async def test_the_native_agents_options_apply(tmp_path: Path, options: dict[str, Json]):
    """They change the prompt, and so the tokens: another order of tools is another prompt."""
    async with stage(tmp_path, tokenizer_dir()) as on:
        (plain,) = (await on.demonstrated(yardwork(CHAIN))).traces
        (trace,) = (await on.demonstrated(yardwork(CHAIN, "demonstrate", **options))).traces
        assert trace.token_ids != plain.token_ids
        on.replies = turn_texts(trace, tokenizer_dir())
        _, (played,) = await on.rolled(yardwork(CHAIN, "native", **options))
        assert (played.token_ids, played.mask) == (trace.token_ids, trace.mask)


async def test_nothing_is_invented_and_nothing_counts_as_sampled(tmp_path: Path):
    async with stage(tmp_path, tokenizer_dir()) as on:
        rollout, (trace,) = await on.rolled(yardwork(CHAIN))
        trajectory = await on.site.store.trajectory(rollout.id)
        assert on.engine.calls == [], "no model call was made"
        assert (trace.is_trainable, trace.untrainable_reason, trace.logprobs) == (False, DEMONSTRATION, None)
        assert trace.versions == array("i", (-1,)) * len(trace)
        (engine,) = on.site.router.list()
        assert engine.info is not None and (trace.policy, trace.model) == ("default", engine.info.model)
        assert {span.finish_reason for span in trace.spans} == {"stop"}
        assert sum(trace.mask) == sum(span.end - span.start for span in trace.spans) > 0
        assert trajectory is not None and trajectory.sampled_tokens == trace.sampled_tokens == 0
        ending = rollout.ending
        assert ending is not None and ending.outcome is Outcome.COMPLETED and not ending.is_trainable
        assert (ending.summary.turns, ending.summary.sampled_tokens, ending.summary.traces) == (0, 0, 1)
        assert (ending.summary.oldest_version, ending.summary.ended_by) == (-1, "finish")
        roles = [message["role"] for message in trajectory.messages]
        assert roles == ["system", "user", *["assistant", "tool"] * len(trace.spans)]
        on.site.nothing_left()


# --- solutions that cannot be demonstrated


class FixedSolution(Environment):
    """An environment whose solution is set by the test."""

    name = "given"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")

    def __init__(self, solution: Solution) -> None:
        self.solution = solution

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "please"},))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        return self.solution

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float(evidence.answer == "42"))


def calls(name: str, **arguments: Json) -> Message:
    function: Json = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}


def tool_message(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "x", "name": "shell", "content": content}


def text(content: str) -> Message:
    return {"role": "assistant", "content": content}


async def _run_solution(folder: Path, messages: Sequence[Message], answer: str | None = None, **fields: Any) -> Any:
    solution = Solution(answer, tuple(messages))
    async with stage(folder, tokenizer_dir(), Environments({"given": FixedSolution(solution)})) as on:
        task = Task("given", {}, agent=AgentSpec("demonstrate"), limits=LIMITS)
        rollout, traces = await on.rolled(replace(task, **fields))
        assert on.engine.calls == []
        return rollout.ending, traces


async def test_an_answer_alone_is_a_turn_if_the_task_has_no_tools(tmp_path: Path):
    ending, (trace,) = await _run_solution(tmp_path, (), "42", agent=AgentSpec("demonstrate", {"tools": []}))
    assert (ending.score.reward, ending.summary.ended_by) == (1.0, "stop")
    assert turn_texts(trace, tokenizer_dir()) == ["42"]


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ((), {}, "is empty"),
        ((text("The patch is applied."),), {}, "calls no tool, though the task has a sandbox"),
        ((tool_message("2"), text("42")), {}, "does not begin with an assistant's turn"),
        ((text("I look."), calls("finish")), {}, "turn 0 of its solution has 0 calls"),
        ((calls("shell", command="ls"), calls("finish")), {}, "turn 0 of its solution has 1 calls"),
        ((calls("ipython", code="1"),), {}, "calls the tool ipython, which this task does not have"),
        ((calls("shell", order="ls"),), {}, "calls shell with wrong arguments"),
        (
            (calls("shell", command="ls"), tool_message("a"), calls("finish")),
            {"limits": replace(LIMITS, max_turns=1)},
            "more turns than limits.max_turns, 1",
        ),
        ((calls("finish", answer="x " * 50),), {"sampling": Sampling(max_tokens=40)}, "sampling.max_tokens is 40"),
        ((calls("finish", answer="42"),), {"limits": replace(LIMITS, max_tokens=5)}, "limits.max_tokens, 5"),
    ],
    ids=["nothing", "behind", "order", "no calls", "no result", "no tool", "arguments", "turns", "turn", "tokens"],
)
async def test_a_solution_that_cannot_be_replayed_is_refused(
    tmp_path: Path, messages: Sequence[Message], fields: dict[str, Any], reason: str
):
    ending, _ = await _run_solution(tmp_path, messages, **fields)
    assert ending.score is None and (ending.failure.code, ending.failure.blame) == ("task_invalid", Blame.TASK)
    assert reason in ending.failure.detail


async def test_a_demonstration_that_does_not_fit_the_context_is_the_task_s_fault(tmp_path: Path):
    ending, traces = await _run_solution(tmp_path, (calls("finish"),), limits=replace(LIMITS, max_context=64))
    assert (ending.failure.code, ending.failure.blame, traces) == ("prompt_too_long", Blame.TASK, ())


async def test_a_task_without_a_solution_is_refused(tmp_path: Path):
    async with stage(tmp_path, tokenizer_dir()) as on:
        task = Task(
            "shell", {"instruction": "do it", "checks": ["true"]}, agent=AgentSpec("demonstrate"), limits=LIMITS
        )
        rollout, traces = await on.rolled(task)
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert (rollout.ending.failure.code, traces) == ("task_invalid", ())
        assert "there is no oracle for it" in rollout.ending.failure.detail


async def test_an_engine_that_returns_only_text_is_refused(tmp_path: Path):
    async with open_site(tmp_path, None, engines=0) as site, ScriptedEngine(lambda turn: "hi") as engine:
        await site.router.add(EngineSpec("e0", engine.url, Kind.OPENAI))
        ending = (await site.rolled(yardwork(CHAIN))).ending
        assert ending is not None and ending.failure is not None
        assert ending.failure.code == "engine_refused" and "returns only text" in ending.failure.detail


async def test_only_tool_calls_are_demonstrated(tmp_path: Path):
    async with stage(tmp_path, tokenizer_dir()) as on:
        with pytest.raises(TaskInvalid, match="only tools was expected"):
            on.site.pipeline.resources.check(yardwork(CHAIN, format="bash_block"), Run("run"))
        on.site.pipeline.resources.check(yardwork(CHAIN, format="tools"), Run("run"))


# --- through the service


async def test_the_example_of_the_page_returns_training_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "yardwork.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "yardwork.md", "exec"), names := {})
    lines = [json.dumps(body) for body in YardworkEnvironment().generate({"count": "6", "levels": "1-2"})]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    async with (
        ScriptedEngine(lambda turn: "nothing to say", tokenizer=FolderTokenizer(tokenizer_dir())) as engine,
        service(tmp_path, {}) as served,
        AsyncClient(served.url, served.token) as client,
    ):
        monkeypatch.setenv("ROLLYARD_URL", served.url)
        monkeypatch.setenv("ROLLYARD_TOKEN", served.token)
        await client.add_engine(url=engine.url, kind="vllm", tokenizer=str(tokenizer_dir()))
        arrays = await asyncio.to_thread(lambda: list(names["demonstrations"](tmp_path / "train.jsonl")))
        assert len(arrays) == 6
        for ids, mask in arrays:
            assert (ids.dtype, mask.dtype, ids.shape) == (np.int32, np.uint8, mask.shape)
            assert 0 < mask.sum() < len(mask) and mask[0] == 0 and mask[-1] == 1
        group = await client.group(json.loads(lines[0]), run="warm-start", size=2)
        group = await client.get_group(group.id, wait_s=30, traces=True)
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
        assert [len(rollout.traces) for rollout in group.rollouts] == [1, 1]
        assert engine.calls == []
        for is_dropping in (True, False):
            assert collate([group], drop_untrainable=is_dropping)["input_ids"].shape == (0, 0), "no logprobs, so no row"
