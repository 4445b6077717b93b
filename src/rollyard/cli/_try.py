"""Runs one rollout of an agent program through a whole service in this process, and shows the result.

Its data is in a temporary folder; only installed programs are those of the settings. Without `--engine`, a scripted
engine returns the turns of the preset's `[try]`: the program, the sandbox, the gateway and the tokens are real.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import CommandError, note, out, plain, seconds

if TYPE_CHECKING:
    from rollyard.agents.harness import HarnessAgent
    from rollyard.agents.preset import Preset
    from rollyard.cli._tasks import TaskLine
    from rollyard.core import Json, Message, Rollout, Task, Trajectory
    from rollyard.core.engine import EngineSpec
    from rollyard.service.settings import Settings

WITHIN_S = 24 * 3600.0  # the task's limits end it long before

TASK: dict[str, Json] = {
    "environment": "shell",
    "data": {
        "instruction": "greeting.txt says 'Hello, wrold!'. Correct its spelling, and check that it is right.",
        "files": {"greeting.txt": "Hello, wrold!\n"},
        "checks": ["grep -qx 'Hello, world!' greeting.txt"],
    },
    "limits": {"run_s": 120, "max_turns": 20},
}
"""The task that the turns of every preset's `[try]` solve."""

SHOWN_CHARS = 300
LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class Trial:
    """The result. `problem` is why the verification of its traces failed; empty if it did not."""

    agent: str
    version: str
    rollout: Rollout
    trajectory: Trajectory
    problem: str

    @property
    def is_fine(self) -> bool:
        ending = self.rollout.ending
        return ending is not None and ending.score is not None and not self.problem

    def as_body(self) -> dict[str, Any]:
        import msgspec

        ending, info = self.rollout.ending, self.trajectory.info
        assert ending is not None
        return {
            "agent": self.agent,
            "version": self.version,
            "outcome": ending.outcome,
            "reward": ending.score and ending.score.reward,
            "failure": msgspec.to_builtins(ending.failure),
            "turns": self.trajectory.turns,
            "sampled_tokens": self.trajectory.sampled_tokens,
            "traces": len(self.trajectory.traces),
            "forks": [trace.fork_reason for trace in self.trajectory.traces if trace.fork_reason],
            "verified": not self.problem,
            "problem": self.problem or None,
            "messages": self.trajectory.messages,
            "gateway": info.get("gateway"),
            "harness": info.get("harness"),
        }


async def try_once(agent: HarnessAgent, settings: Settings, line: TaskLine | None, engine: EngineSpec | None) -> Trial:
    from rollyard.agents.registry import Agents
    from rollyard.core import Rollout, new_id
    from rollyard.core.failure import RollyardError
    from rollyard.service.build import open_app
    from rollyard.service.security.access import OPERATOR
    from rollyard.store import Submission
    from rollyard.tokens import verify

    task = _task(agent.name, line)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-try-")))
        (settings.data_dir / "python").mkdir(parents=True, exist_ok=True)
        (folder / "python").symlink_to(settings.data_dir.absolute() / "python")  # building one takes seconds
        own = settings.model_copy(update={"data_dir": folder, "engines": ()})
        registry = Agents({agent.name: agent}, installs=agent.installs)  # pyright: ignore[reportArgumentType]
        app_state = await stack.enter_async_context(open_app(own, agents=registry))
        await app_state.router.add(await stack.enter_async_context(_engine(agent.preset, engine)))
        run = await app_state.run(OPERATOR, "default")
        rollout = Rollout(new_id("ro"), run.id, task)
        try:
            app_state.resources.check(task, run)
        except RollyardError as error:
            raise CommandError(f"{line.place if line else 'the task'}: {error.detail}", error.remedy) from error
        await app_state.pipeline.submit([Submission(rollout, {"id": rollout.id})])
        ended = await app_state.pipeline.wait(rollout.id, WITHIN_S)
        trajectory = await app_state.store.trajectory(rollout.id)
        if trajectory is None:
            failure = ended.ending.failure if ended.ending is not None else None
            raise CommandError(failure.detail if failure is not None else "the rollout left no trajectory")
        try:
            verify(trajectory)
            problem = ""
        except RollyardError as error:
            problem = error.detail
    return Trial(agent.name, agent.preset.version, ended, trajectory, problem)


def _task(name: str, line: TaskLine | None) -> Task:
    """Returns the task with this agent in place of the one that it names; it keeps its agent options."""
    from rollyard.service.schemas.task import to_task

    task = to_task(dict(TASK) if line is None else line.task, {})
    return replace(task, agent=replace(task.agent, name=name))


@asynccontextmanager
async def _engine(preset: Preset, engine: EngineSpec | None) -> AsyncGenerator[EngineSpec, None]:
    if engine is not None:
        yield engine
        return
    from rollyard.core.engine import EngineSpec, Kind
    from rollyard.testing.script import FolderTokenizer, Reply, Turn
    from rollyard.testing.scripted_engine import ScriptedEngine
    from rollyard.testing.tokenizer_files import tokenizer_dir

    replies = scripted(preset)

    def script(turn: Turn) -> Reply | str:
        return replies[min(turn.number, len(replies) - 1)] if turn.session_id else "ok"

    note("a scripted engine replaces the model; give --engine URL for a real one")
    async with ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir())) as played:
        yield EngineSpec("scripted", played.url, Kind.VLLM, tokenizer=str(tokenizer_dir()))


def scripted(preset: Preset) -> list[str]:
    """Returns the turns of the preset's `[try]`, as a model writes them."""
    replies: list[str] = []
    for turn in preset.try_.turns:
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        parts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
        replies.append("\n".join([*([turn.say] if turn.say else []), *parts]))
    return replies


# --- output -------------------------------------------------------------------------------------------


def show_trial(trial: Trial) -> None:
    console = out()
    console.print(f"[bold]{plain(trial.agent)}[/] {plain(trial.version)}\n")
    for message in trial.trajectory.messages:
        if message.get("role") in ("assistant", "tool"):
            console.print(f"[bold]{message['role']}[/]: {plain(shortened(message))}")
    ending, info = trial.rollout.ending, trial.trajectory.info
    assert ending is not None
    failure = ending.failure
    console.print()
    console.print(f"ended      {ending.outcome}" + (f": {failure.code} ({failure.blame})" if failure else ""))
    console.print(f"reward     {ending.score.reward if ending.score else 'none'}")
    traces = trial.trajectory.traces
    console.print(f"turns      {trial.trajectory.turns}, {trial.trajectory.sampled_tokens} tokens sampled")
    forks = [trace.fork_reason or "another conversation" for trace in traces[1:]]
    console.print(f"traces     {len(traces)}" + "".join(f"\n           forked: {reason}" for reason in forks))
    console.print(f"verified   {plain(trial.problem) or 'yes: every sampled token, its prompt and its owner'}")
    console.print(f"RUN took   {seconds(ending.timings.run_s)}")
    if failure is not None:
        console.print(f"\n{plain(failure.detail)}")
    harness = info.get("harness")
    if not trial.is_fine and isinstance(harness, Mapping):
        lines = str(harness.get("output", "")).strip().splitlines()[-LAST_LINES:]
        console.print("\nthe last output of the program:\n" + plain("\n".join(lines)))


def shortened(message: Message) -> str:
    text = str(message.get("content") or "").strip()
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
        call_texts = [f"{it.get('name')}({it.get('arguments')})" for it in functions if isinstance(it, Mapping)]
        text = "\n  ".join([*([text] if text else []), *(f"→ {call}" for call in call_texts)])
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + " …"
