"""The `math` environment: a question with a known answer, scored by `math-verify`.

    {"question": "What is 6 × 7?", "answer": "42"}

The reward is 1 if the agent's answer is equivalent to the known one, else 0. The answer is what the agent passed to the
`finish` tool, or the last \\boxed{} of its last message. A missing or unreadable answer, or one on which the verifier
hangs, scores 0. If the verifier crashes, the policy is not at fault and there is no score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.fields import Fields
from rollyard.envs.math.boxed import HINT, last_boxed
from rollyard.envs.math.judge import MathJudge
from rollyard.envs.math.rows import math_row
from rollyard.tools.base import Tool

FIELDS = (
    DataField("question", "string", "The question."),
    DataField("answer", "string", "The known answer, in LaTeX or as text."),
    DataField("system_prompt", "string or null", "Replaces the hint about the form of the answer.", "the hint"),
)


class MathEnvironment(Environment):
    """Scores an answer with math-verify. `system_prompt` in the data replaces the hint."""

    name: ClassVar[str] = "math"
    tools: ClassVar[tuple[str, ...]] = ()
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def __init__(self) -> None:
        self._judge = MathJudge()

    def check(self, task: Task) -> None:
        _read(task)

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        question, _, system_prompt = _read(context.task)
        if system_prompt is None:
            return Start(({"role": "user", "content": f"{question}\n\n{HINT}"},))
        system: Message = {"role": "system", "content": system_prompt}
        return Start((system, {"role": "user", "content": question}))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        """Answers as a model without tools would, so that a known answer that does not fit into a box is found."""
        _, known, _ = _read(context.task)
        return Solution(messages=({"role": "assistant", "content": f"The answer is \\boxed{{{known}}}."},))

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        data = math_row(row, options)
        self.check(Task(self.name, data))
        return {"environment": self.name, "data": data}

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        _, known, _ = _read(context.task)
        answer = final_answer(evidence)
        if answer is None:
            context.findings.add("check", "math-verify", "there is no answer in \\boxed{}", passed=False)
            return Score(0.0, components={"correct": 0.0}, metrics={"answered": 0.0})
        # Wait for half of EVAL's time at most; else other rollouts' slow answers could use up this one's time.
        wait_s = context.task.limits.eval_s / 2
        is_right = await self._judge.is_same(known, answer, wait_s=wait_s, owner=context.owner)
        context.findings.add("check", "math-verify", f"known: {known}\ngiven: {answer}", passed=is_right)
        correct = float(is_right)
        return Score(correct, components={"correct": correct}, metrics={"answered": 1.0})

    async def close(self) -> None:
        await self._judge.close()


def final_answer(evidence: Evidence) -> str | None:
    """The agent's answer, or None."""
    finished = evidence.trajectory.info.get("answer")
    if isinstance(finished, str) and finished.strip():
        return last_boxed(finished) or finished
    return last_boxed(evidence.answer)


def _read(task: Task) -> tuple[str, str, str | None]:
    fields = Fields(task)
    read = fields.text("question"), fields.text("answer"), fields.optional_text("system_prompt")
    fields.done()
    return read
