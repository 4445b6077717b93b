"""Fills a store with ended rollouts, through the store's own interface: texts of a few kilobytes, as agents write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

from rollyard.core import (
    Blame,
    Ending,
    Failure,
    Json,
    Message,
    Outcome,
    Position,
    Rollout,
    Run,
    Score,
    Task,
    Trace,
    Trajectory,
    ids_array,
    key_of,
    logprobs_array,
)
from rollyard.core.rollout import Summary, Timings
from rollyard.core.task import Sampling
from rollyard.core.trace import Span
from rollyard.store import open_store
from rollyard.store.base import Submission

RUNS = ("grpo-1", "grpo-2", "ablation", "nightly")
ENVIRONMENTS = ("shell", "math", "code", "swe")
CODES = (("turn_limit", Blame.POLICY), ("run_deadline", Blame.POLICY), ("sandbox_lost", Blame.INFRA))
TOKENS = 256
AT_ONCE = 500
VOCABULARY = 20_000


class Writer:
    """Writes messages from a vocabulary with a long tail, like that of code and logs."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "ist")]
        self.words = [
            "".join(random.choices(syllables, k=random.choice((1, 2, 2, 3)))) + ("" if rank < 500 else str(rank % 97))
            for rank in range(VOCABULARY)
        ]
        self._weights = [*accumulate(1 / (rank + 2) for rank in range(VOCABULARY))]

    def text(self, words: int) -> str:
        return " ".join(self._random.choices(self.words, cum_weights=self._weights, k=words))

    def messages(self, number: int) -> tuple[Message, ...]:
        """About 4 KB: an instruction, and three turns with a tool call."""
        messages: list[Message] = [{"role": "user", "content": f"Task {number}: fix the failing test. {self.text(60)}"}]
        for turn in range(3):
            arguments = json.dumps({"command": f"cat src/{self.text(1)}.py | grep -n {self.text(1)}"})
            call: dict[str, Json] = {"name": "shell", "arguments": arguments}
            messages += [
                {
                    "role": "assistant",
                    "reasoning_content": self.text(60),
                    "content": self.text(20),
                    "tool_calls": [{"id": f"call-{turn}", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": f"call-{turn}", "content": self.text(120)},
            ]
        return tuple(messages)


async def fill(path: Path, count: int, seed: int = 1) -> Writer:
    """Stores `count` ended rollouts in a new store. Returns the writer of their texts."""
    writer = Writer(seed)
    async with await open_store(path) as store:
        for run in RUNS:
            await store.put_run(Run(run), {})
        for start in range(0, count, AT_ONCE):
            rollouts = [_rollout(number) for number in range(start, min(start + AT_ONCE, count))]
            await store.submit([Submission(rollout, {}) for rollout in rollouts])
            pairs = zip(rollouts, _endings(start, writer), strict=False)
            await asyncio.gather(*(store.end(one.id, Position(), ending, traced) for one, (ending, traced) in pairs))
    return writer


def _rollout(number: int) -> Rollout:
    run = RUNS[number % 10 % len(RUNS)]
    task = Task(ENVIRONMENTS[number % 7 % len(ENVIRONMENTS)], {"instruction": f"Task {number}: fix the failing test."})
    group = key_of(run, f"g{number // 40}")
    return Rollout(key_of(run, f"r{number}"), run, task, group=group, index=number % 8)


def _endings(start: int, writer: Writer) -> Iterator[tuple[Ending, Trajectory]]:
    number = start
    while True:
        version = number // 1000
        summary = Summary(
            turns=3,
            sampled_tokens=TOKENS // 2,
            prompt_tokens=TOKENS // 2,
            traces=1,
            engine="engine-1",
            oldest_version=max(0, version - number % 3),
            newest_version=version,
        )
        timings = Timings(queued_s=1.0, init_s=0.2, run_s=20.0, model_s=12.0, tool_s=6.0, eval_s=1.0)
        if number % 20 == 19:
            code, blame = CODES[number // 20 % len(CODES)]
            outcome = Outcome.TRUNCATED if blame is Blame.POLICY else Outcome.FAILED
            ending = Ending(outcome, failure=Failure(code, blame, "why"), summary=summary, timings=timings)
        else:
            score = Score(float(number % 3 == 0))
            ending = Ending(Outcome.COMPLETED, score, is_trainable=True, summary=summary, timings=timings)
        yield ending, Trajectory("", 1, (_trace(version),), writer.messages(number), turns=3, ended_by="finish")
        number += 1


def _trace(version: int) -> Trace:
    half = TOKENS // 2
    return Trace(
        token_ids=ids_array([*range(TOKENS)]),
        mask=bytearray([0] * half + [1] * half),
        logprobs=logprobs_array([0.0] * half + [-0.5] * half),
        versions=ids_array([-1] * half + [version] * half),
        spans=(Span(half, TOKENS, 1, "stop", "digest"),),
        sampling=Sampling(),
        policy="default",
        model="model",
    )
