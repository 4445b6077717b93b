"""The `stem` environment: a science question with choices, or with a known free answer.

    {"question": "Which gas do plants take in?", "choices": ["oxygen", "carbon dioxide"], "answer": "B", "seed": 7}
    {"question": "How fast does a stone fall after 1 s?", "answer": 9.81, "unit": "m/s", "tolerance": 0.01}
    {"question": "Why is the sky blue?", "answer": "Rayleigh scattering", "judge": true}

The reward is 1 if the answer is right, else 0; a missing or ambiguous answer scores 0. With a `seed` the choices are
shown in an order that depends on it and on the question. A free answer is right if it is the same text; or if it is a
number or formula that `math-verify` considers equal, within the `tolerance` if there is one; or, with `judge`, if an
engine of role judge considers it equivalent. If the judge fails, there is no score.

The agent has `ipython` and `finish`. Only the tools need a sandbox; EVAL scores the text of the answer and needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start
from rollyard.envs.math.judge import MAX_ANSWER_CHARS, MathJudge
from rollyard.envs.stem.answers import (
    LETTERS,
    choice_of,
    for_math_verify,
    free_answer_of,
    is_formula,
    is_same_text,
    without_unit,
)
from rollyard.envs.stem.data import FIELDS, StemData
from rollyard.envs.stem.judge import is_same_to_judge
from rollyard.envs.stem.rows import stem_row
from rollyard.tools.base import Tool

CHOICE_HINT = 'End with the letter of one choice: call finish with it, or write it as a last line "Answer: X".'
FREE_HINT = "End with your final answer, and nothing else in it: call finish with it, or put it within \\boxed{}."


class StemEnvironment(Environment):
    """Scores a choice or a free answer. `system_prompt` in the data replaces the hint."""

    name: ClassVar[str] = "stem"
    tools: ClassVar[tuple[str, ...]] = ("ipython", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def __init__(self) -> None:
        self._math = MathJudge()

    def check(self, task: Task) -> None:
        StemData.read(task)

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        data = StemData.read(context.task)
        parts = [data.question]
        if data.choices:
            parts.append("\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, data.choices, strict=False)))
        if data.unit is not None:
            parts.append(f"Give the answer as a number in {data.unit}.")
        if data.system_prompt is None:
            parts.append(CHOICE_HINT if data.choices else FREE_HINT)
        asked: Message = {"role": "user", "content": "\n\n".join(parts)}
        if data.system_prompt is None:
            return Start((asked,))
        return Start(({"role": "system", "content": data.system_prompt}, asked))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        data = StemData.read(context.task)
        return Solution(answer=LETTERS[data.right] if data.choices else data.answer)

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        data = stem_row(row, options)
        self.check(Task(self.name, data))
        return {"environment": self.name, "data": data}

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        data = StemData.read(context.task)
        if data.choices:
            chosen = choice_of(evidence, data.choices)
            given = "none" if chosen is None else LETTERS[chosen]
            text = f"known: {LETTERS[data.right]}\ngiven: {given}"
            context.findings.add("check", "choice", text, passed=chosen == data.right)
            return _score(chosen == data.right, is_answered=chosen is not None)
        answer = free_answer_of(evidence)
        if answer is None:
            return _score(False, is_answered=False)
        is_right = await self._is_right(context, data, answer)
        context.findings.add("check", "answer", f"known: {data.answer}\ngiven: {answer}", passed=is_right)
        return _score(is_right)

    async def _is_right(self, context: EnvContext, data: StemData, answer: str) -> bool:
        if is_same_text(data.answer, answer):
            return True
        if data.is_judged:
            return await is_same_to_judge(context.judge, data.question, data.answer, answer, context.findings)
        if len(answer) > MAX_ANSWER_CHARS:
            return False
        candidate = answer if data.unit is None else without_unit(answer, data.unit)
        if candidate is None or not is_formula(data.answer):
            return False
        # Wait for half of EVAL's time at most; else other rollouts' slow answers could use up this one's time.
        wait_s = context.task.limits.eval_s / 2
        known, candidate = for_math_verify(data.answer), for_math_verify(candidate)
        return await self._math.is_same(known, candidate, tolerance=data.tolerance, wait_s=wait_s, owner=context.owner)

    async def close(self) -> None:
        await self._math.close()


def _score(is_right: bool, *, is_answered: bool = True) -> Score:
    correct = float(is_right)
    return Score(correct, components={"correct": correct}, metrics={"answered": float(is_answered)})
