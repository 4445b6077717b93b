"""The rollouts of `rollyard bench fleet`: an agent that only waits, and a realistic result.

The agent and its environment are found by entry points, like those of any other package. The entry points are in a
folder that is on PYTHONPATH for this bench only (`write_entry_points`), so its head is a plain `rollyard serve` and its
nodes are plain nodes. They need no sandbox and no model, so the bench measures the cost of the fleet itself.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar

from rollyard.agents.base import Agent, AgentContext
from rollyard.core import (
    Ending,
    Json,
    Message,
    Outcome,
    Sampling,
    Score,
    Span,
    Summary,
    Task,
    Timings,
    Trace,
    Trajectory,
)
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Start
from rollyard.store.codec import encode_trajectory, to_json

NAME = "bench-wait"

TOKENS, TURNS = 2_000, 5
"""The size of the trace in a hollow node's result; half of the tokens are sampled."""


class WaitEnvironment(Environment):
    """An environment without a sandbox. `data.seconds` is how long the agent waits."""

    name: ClassVar[str] = NAME

    def check(self, task: Task) -> None:
        if not isinstance(task.data.get("seconds"), int | float):
            raise TaskInvalid(f"{NAME}: data.seconds must be a number")

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "Wait."},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(1.0)


class WaitAgent(Agent):
    name: ClassVar[str] = NAME
    needs_model: ClassVar[bool] = False

    def check(self, task: Task) -> None:
        """Does nothing: the environment checks the task."""

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        seconds = context.task.data["seconds"]
        assert isinstance(seconds, int | float)
        async with context.clock.counting():
            await asyncio.sleep(seconds)
        context.conversation.append(messages)
        return "stop"


def wait_task(seconds: float) -> dict[str, Json]:
    return {"environment": NAME, "data": {"seconds": seconds}, "agent": {"name": NAME}}


def write_entry_points(folder: Path) -> None:
    """Writes the metadata of an installed package into the folder, for processes that have it on PYTHONPATH."""
    about = folder / "rollyard_bench-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rollyard-bench\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[rollyard.environments]\n{NAME} = {__name__}:WaitEnvironment\n"
        f"[rollyard.agents]\n{NAME} = {__name__}:WaitAgent\n"
    )


def math_task(number: int) -> dict[str, Json]:
    """Returns a task of the usual size for hollow nodes, which do not run it."""
    question = f"Question {number}: what is 2 + 2? " + "Think it over before you answer. " * 8
    return {
        "environment": "math",
        "data": {"question": question, "answer": "4"},
        "agent": {"options": {"tools": ["shell", "finish"]}},
    }


class Result:
    """A finished rollout as a node sends it: one trace of TOKENS tokens, the messages, a score, timings."""

    def __init__(self) -> None:
        random = Random(0)
        part = TOKENS // (2 * TURNS)
        mask = (bytes(part) + b"\1" * part) * TURNS
        trace = Trace(
            token_ids=array("i", (random.randrange(150_000) for _ in mask)),
            mask=bytearray(mask),
            logprobs=array("f", (-random.expovariate(2.0) if is_sampled else 0.0 for is_sampled in mask)),
            versions=array("i", (3 if is_sampled else -1 for is_sampled in mask)),
            spans=tuple(
                Span((2 * turn + 1) * part, (2 * turn + 2) * part, turn + 1, "stop", "0" * 64, "1" * 64, "e0", "q")
                for turn in range(TURNS)
            ),
            sampling=Sampling(),
            policy="default",
            model="bench",
            logprobs_kind="processed",
        )
        text = "The quick brown fox jumps over the lazy dog. " * 18  # about 200 tokens
        messages = tuple({"role": role, "content": text} for _ in range(TURNS) for role in ("user", "assistant"))
        self._trajectory = Trajectory("", 1, (trace,), messages, turns=TURNS, ended_by="finish", info={"answer": "4"})
        self.sampled_tokens = self._trajectory.sampled_tokens
        self.info = to_json({"answer": "4"})
        summary = Summary(TURNS, self.sampled_tokens, TOKENS, 1, "finish", "e0", "hollow")
        timings = Timings(1.5, 0.02, 0.0, 0.01, 57.2, 51.4, 4.3, 0.1, 1.3)
        score = Score(1.0, {"correct": 1.0}, {"turns": 5.0})
        self.ending = to_json(Ending(Outcome.COMPLETED, score, is_trainable=True, summary=summary, timings=timings))

    def encoded(self, rollout_id: str, attempt: int) -> bytes:
        return bytes(encode_trajectory(replace(self._trajectory, rollout_id=rollout_id, attempt=attempt)))
