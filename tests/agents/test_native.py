"""The native loop, with a scripted engine over HTTP as the model."""

import asyncio
from importlib.metadata import EntryPoint

import msgspec
import pytest

from rollyard.agents import Agents, NativeAgent
from rollyard.agents.arguments import wrong_arguments
from rollyard.agents.native import bash_blocks
from rollyard.core import AgentSpec, Limits, Sampling, Task, Trajectory
from rollyard.core.failure import (
    AgentBroken,
    ContextLimit,
    RunDeadline,
    SandboxLost,
    TaskInvalid,
    TokenLimit,
    TurnLimit,
    UnknownAgent,
)
from rollyard.engines import Kind
from rollyard.testing.script import Reply
from rollyard.tokens import verify
from rollyard.tools.finish import SPEC as FINISH_SPEC
from rollyard.tools.finish import Finish

from .conftest import USER, Jotter, call


async def test_it_calls_tools_until_it_finishes(scene):
    async with scene([call("shell", command="ls"), call("finish", answer="42")]) as s:
        assert await s.run() == "finish"
        assert s.contents("tool") == ["did ls", "Done."]
        assert s.context.info["answer"] == "42"
        assert s.context.info["tool_calls"] == 2
        assert 0 <= s.context.info["tool_s"] <= s.context.clock.used_s
        assert s.context.info["model_s"] > 0
        assert len(s.beats) == 4
        verify(Trajectory("r1", 1, traces=s.conversation.traces()))
        assert "<tools>" in s.renderer.decode(s.prompts[0])


async def test_an_answer_without_a_call_ends_it(scene):
    async with scene(["It is 42."]) as s:
        assert await s.run() == "stop"
        assert s.contents("assistant") == ["It is 42."]


async def test_several_calls_of_a_turn_run_in_order_and_none_after_a_final_one(scene):
    tool = Jotter()
    turn = call("shell", command="a") + call("shell", command="b") + call("finish") + call("shell", command="c")
    async with scene([turn], tools=[tool, Finish()]) as s:
        assert await s.run() == "finish"
        assert [c["command"] for c in tool.calls] == ["a", "b"]
        assert s.contents("tool") == ["did a", "did b", "Done."]


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("<tool_call>{nope}</tool_call>", "not valid JSON"),
        ("<tool_call>{}</tool_call>", 'no "name"'),
        (call("rocket"), 'no tool "rocket"; there are: shell, finish'),
        (call("shell"), 'required argument "command" is missing'),
        (call("shell", command=1), 'argument "command" must be of type string, not integer'),
        (call("shell", command="x", count=True), "must be of type integer, not boolean"),
        (call("shell", command="x", colour="red"), 'no argument "colour"; there are: command, count'),
    ],
)
async def test_a_malformed_call_is_an_observation_not_an_end(scene, text, observation):
    tool = Jotter()
    async with scene([text, "I see."], tools=[tool, Finish()]) as s:
        assert await s.run() == "stop"
        assert tool.calls == []
        assert observation in s.contents("tool")[0]


async def test_the_turn_limit_truncates_and_keeps_the_last_observation(scene):
    async with scene([call("shell", command="ls")], limits=Limits(max_turns=2)) as s:
        with pytest.raises(TurnLimit, match="all 2 turns"):
            await s.run()
        assert s.conversation.turns == 2
        assert len(s.contents("tool")) == 2


async def test_the_token_limit_bounds_all_turns_together(scene):
    async with scene([call("shell", command="ls")], limits=Limits(max_tokens=60)) as s:
        with pytest.raises(TokenLimit):
            await s.run()
        assert s.conversation.sampled_tokens == 60
        budgets = [c.body["sampling_params"]["max_tokens"] for c in s.engine.calls]
        assert budgets[0] == 60
        assert budgets[-1] < 60


async def test_a_reply_cut_off_with_nothing_to_run_is_a_truncation(scene):
    async with scene(["word " * 50], sampling=Sampling(max_tokens=10)) as s:
        with pytest.raises(TokenLimit, match="cut off after 10 tokens"):
            await s.run()
        assert s.conversation.sampled_tokens == 10


async def test_the_context_limit_truncates(scene):
    tool = Jotter(answer=lambda _: "word " * 300)
    async with scene([call("shell", command="ls")], limits=Limits(max_context=400), tools=[tool]) as s:
        with pytest.raises(ContextLimit):
            await s.run()
        assert s.conversation.turns == 1


async def test_time_used_up_in_a_model_call_is_the_run_s_deadline(scene):
    async with scene([Reply("one two three", stall_after=2)], run_s=0.3) as s:
        with pytest.raises(RunDeadline):
            await s.run()
        assert s.conversation.sampled_tokens == 2
        assert s.context.info["model_s"] > 0


async def test_time_used_up_in_a_tool_is_the_run_s_deadline(scene):
    tool = Jotter(answer=lambda _: asyncio.Event().wait())
    async with scene([call("shell", command="x")], run_s=0.3, tools=[tool]) as s:
        with pytest.raises(RunDeadline):
            await s.run()
        assert s.context.clock.is_expired
        assert s.conversation.turns == 1


async def test_a_tool_that_hangs_beyond_its_time_is_an_observation(scene):
    tool = Jotter(answer=lambda _: asyncio.Event().wait())
    async with scene([call("shell", command="x"), "ok"], limits=Limits(tool_s=0.05), tools=[tool]) as s:
        agent = NativeAgent()
        agent.tool_grace_s = 0.05
        assert await agent.run(s.context, USER) == "stop"
        assert "did not answer within 0.05 s" in s.contents("tool")[0]


async def test_a_tools_own_timeout_error_is_not_mistaken_for_the_agents(scene):
    def fail(_):
        raise TimeoutError("its own")

    async with scene([call("shell", command="x")], tools=[Jotter(answer=fail)]) as s:
        with pytest.raises(TimeoutError, match="its own"):
            await s.run()


async def test_a_lost_sandbox_is_not_an_observation(scene):
    def fail(_):
        raise SandboxLost("gone")

    async with scene([call("shell", command="x")], tools=[Jotter(answer=fail)]) as s:
        with pytest.raises(SandboxLost):
            await s.run()


async def test_bash_blocks_run_by_the_shell(scene):
    tool = Jotter()
    replies = ["Look:\n```bash\nls -la\necho `date`\n```\n", "All done."]
    async with scene(replies, options={"format": "bash_block"}, tools=[tool, Finish()]) as s:
        assert await s.run() == "stop"
        assert tool.calls == [{"command": "ls -la\necho `date`\n"}]
        assert s.contents("user")[1].startswith("did ls")
        first = s.renderer.decode(s.prompts[0])
        assert "exactly one block" in first
        assert "<tools>" not in first
        assert len(s.conversation.traces()) == 1


@pytest.mark.parametrize("kind", [Kind.VLLM, Kind.OPENAI])
async def test_half_a_surrogate_pair_is_handled_end_to_end(scene, kind):
    """Neither an engine's HTTP nor the store's JSON can encode it."""
    half = r'<tool_call>{"name": "shell", "arguments": {"command": "\ud83d"}}</tool_call>'
    last = r'<tool_call>{"name": "finish", "arguments": {"answer": "\ud83d"}}</tool_call>'
    async with scene([half, last], kind=kind) as s:
        await s.run()
        msgspec.json.encode([list(s.conversation.messages), s.context.info])


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("```bash\na\n```\nand\n```bash\nb\n```", "there were 2"),
        ("```bash\nls", "it was not closed"),
    ],
)
async def test_anything_but_one_block_is_an_observation(scene, text, observation):
    tool = Jotter()
    async with scene([text, "ok"], options={"format": "bash_block"}, tools=[tool]) as s:
        assert await s.run() == "stop"
        assert tool.calls == []
        assert observation in s.contents("user")[1]


async def test_bash_blocks_without_a_shell_are_the_task_s_fault(scene):
    async with scene(["```bash\nls\n```"], options={"format": "bash_block"}, tools=[Finish()]) as s:
        with pytest.raises(TaskInvalid, match="needs the tool shell"):
            await s.run()
        assert s.conversation.turns == 0


async def test_a_block_of_another_language_is_an_answer(scene):
    async with scene(["```python\nprint(1)\n```"], options={"format": "bash_block"}) as s:
        assert await s.run() == "stop"


async def test_without_schemas_the_prompt_does_not_contain_the_tools_and_calls_work(scene):
    replies = [call("shell", command="ls"), call("rocket"), call("finish", answer="42")]
    async with scene(replies) as s:
        await s.run()
        plain = s.renderer.decode(s.prompts[0])
        assert "<tools>" in plain and "Runs a command." in plain
    async with scene(replies, options={"schemas": False}) as s:
        assert await s.run() == "finish"
        first, *_ = prompts = [s.renderer.decode(prompt) for prompt in s.prompts]
        assert not any(word in prompt for prompt in prompts for word in ("<tools>", "Runs a command."))
        assert "please" in first and len(s.prompts[0]) < len(plain)
        ran, unknown, _ = s.contents("tool")
        assert ran == "did ls" and 'no tool "rocket"; there are: shell, finish' in unknown
        assert s.context.info["answer"] == "42"
        verify(Trajectory("r1", 1, traces=s.conversation.traces()))


async def test_a_tool_s_latency_is_time_in_the_tool(scene):
    replies = [call("shell", command="a") + call("shell", command="b"), call("finish")]
    async with scene(replies, options={"tool_latency_s": 0.05}) as s:
        assert await s.run() == "finish"
        assert s.contents("tool") == ["did a", "did b", "Done."]
        assert s.context.info["tool_s"] >= 3 * 0.05
        assert s.context.clock.used_s >= s.context.info["tool_s"] - 1e-3, "it counts as RUN's time, like a slow tool"


async def test_latency_is_not_taken_from_the_tool_s_own_time(scene):
    """The latency alone is longer than the tool's limit, and the tool still completes."""
    options, limits = {"tool_latency_s": 2.1}, Limits(tool_s=0.5)
    async with scene([call("shell", command="x"), "ok"], options=options, limits=limits) as s:
        agent = NativeAgent()
        agent.tool_grace_s = 1.5
        assert await agent.run(s.context, USER) == "stop"
        assert s.contents("tool") == ["did x"]


@pytest.mark.parametrize(
    ("options", "messages", "expected"),
    [
        ({}, [{"role": "system", "content": "env"}, *USER], ["env"]),
        ({"system_prompt": "mine"}, [{"role": "system", "content": "env"}, *USER], ["mine"]),
        ({"system_prompt": "mine"}, USER, ["mine"]),
        ({"system_prompt": None}, USER, []),
    ],
)
async def test_a_tasks_system_prompt_replaces_the_environments(scene, options, messages, expected):
    async with scene(["ok"], options=options) as s:
        await s.run(messages)
        assert s.contents("system") == expected


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"formt": "tools"}, "agent.options.formt: unknown"),
        ({"format": "xml"}, "agent.options.format: one of tools, bash_block"),
        ({"tools": "shell"}, "agent.options.tools: a list"),
        ({"system_prompt": 3}, "agent.options.system_prompt"),
        ({"format": "bash_block", "tools": ["finish"]}, "needs the tool shell"),
        ({"schemas": 0}, "agent.options.schemas: true or false"),
        ({"schemas": "false"}, "agent.options.schemas: true or false"),
        ({"schemas": None}, "agent.options.schemas: true or false"),
        ({"tool_latency_s": -0.1}, "agent.options.tool_latency_s: seconds from 0 to 60"),
        ({"tool_latency_s": 60.5}, "agent.options.tool_latency_s: seconds from 0 to 60"),
        ({"tool_latency_s": float("nan")}, "agent.options.tool_latency_s"),
        ({"tool_latency_s": True}, "agent.options.tool_latency_s"),
        ({"tool_latency_s": "1"}, "agent.options.tool_latency_s"),
        ({"tool_latency_s": None}, "agent.options.tool_latency_s"),
    ],
)
def test_invalid_options_are_refused_at_submit(options, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        NativeAgent().check(Task("shell", agent=AgentSpec("native", options)))


def test_valid_options_are_accepted():
    NativeAgent().check(Task("shell"))
    NativeAgent().check(Task("shell", agent=AgentSpec("native", {"format": "bash_block", "system_prompt": None})))
    for options in ({"schemas": False}, {"schemas": True, "tool_latency_s": 0}, {"tool_latency_s": 60}):
        NativeAgent().check(Task("shell", agent=AgentSpec("native", options)))


def test_an_entry_point_that_is_not_an_agent_is_refused(monkeypatch: pytest.MonkeyPatch):
    points = [EntryPoint("odd", "builtins:dict", "rollyard.agents")]
    monkeypatch.setattr("rollyard.agents.registry.plugins", lambda group: points)
    agents = Agents()
    for _ in range(2):
        with pytest.raises(AgentBroken, match=r"'odd' cannot be used: .* TypeError: dict is not a"):
            agents.get("odd")


def test_agents_are_found_by_entry_point_and_may_be_added():
    agents = Agents()
    assert isinstance(agents.get("native"), NativeAgent)
    assert agents.get("native") is agents.get("native")
    with pytest.raises(UnknownAgent, match=r"'nobody'.*; there are: .*native"):
        agents.get("nobody")
    mine = NativeAgent()
    assert Agents({"mine": mine}).get("mine") is mine


@pytest.mark.parametrize(
    ("schema", "value", "wrong"),
    [
        ({"type": "object"}, {}, ""),
        ({"properties": {"n": {"type": ["integer", "null"]}}}, {"n": None}, ""),
        ({"properties": {"n": {"type": "integer"}}}, {"n": 2.0}, ""),
        ({"properties": {"n": {"type": "integer"}}}, {"n": 2.5}, "must be of type integer, not number"),
        ({"properties": {"n": {"enum": ["a", "b"]}}}, {"n": "c"}, "one of 'a', 'b'"),
        ({"properties": {"n": {"type": "array", "items": {"type": "string"}}}}, {"n": ["a", 1]}, '"n[1]"'),
        ({"properties": {"n": {"type": "object", "required": ["m"]}}}, {"n": {}}, '"n.m" is missing'),
        ({"properties": {"n": {"type": "anything"}}}, {"n": 1}, ""),
        (FINISH_SPEC.parameters, {"answer": 1}, "must be of type string"),
    ],
)
def test_arguments_are_checked_against_the_schema(schema, value, wrong):
    problem = wrong_arguments(schema, value)
    assert wrong in problem
    assert bool(problem) == bool(wrong)


def test_blocks_that_never_close_are_read_once():
    """A model in a loop writes thousands of them; searching from each to the end would block the event loop."""
    assert bash_blocks("```bash\n" * 200_000) == []
    assert bash_blocks("a\n```bash \nls\n``` \nb\n```bash\n") == ["ls\n"]
    assert bash_blocks("```bash\n```\n```bash\nb\n```") == ["", "b\n"]
    assert bash_blocks("```bash\nx ```\n```bash") == bash_blocks("```python\nx\n```") == []
