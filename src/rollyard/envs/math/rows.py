"""Converts rows of public datasets to `math` tasks. Their columns identify them; case does not matter.

    problem | question, answer                            DeepScaleR, MATH-500, AIME, AMC; GSM8K ("… #### 42")
    problem | question, solution                          MATH: the last \\boxed{} of the solution
    prompt, reward_model: {ground_truth}                  DAPO and verl's other datasets; messages or a string

Other columns are ignored. If a prompt asks for the answer in a form other than \\boxed{}, and the form is one of
`_WRAPPED`, that request is removed: the task would ask for two forms.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import check_options
from rollyard.envs.math.boxed import HINT, last_boxed

OPTIONS = ("question", "answer", "system_prompt")
QUESTIONS = ("problem", "question")
ANSWERS = ("answer", "ground_truth")

_WRAPPED = (
    re.compile(
        r"\ASolve the following math problem step by step\. The last line of your response should be of the form"
        r" Answer: [^\n]*\n\n(.*?)(?:\n\nRemember to put your answer on its own line after \"Answer:\"\.)?\s*\Z",
        re.DOTALL,
    ),
    re.compile(
        r"\A(.*?)\s*Let's think step by step and output the final answer"
        r" (?:after \"####\"|within \\boxed\{\})\.?\s*\Z",
        re.DOTALL,
    ),
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|\Z))")


class Columns:
    """A row's columns by lower-case name. `named` maps parts of the task to the columns that the user chose."""

    def __init__(self, environment: str, row: Mapping[str, Json], named: Mapping[str, str]) -> None:
        self._environment = environment
        self._cells = {name.strip().lower(): value for name, value in row.items()}
        self._named = named

    def wrong(self, what: str) -> TaskInvalid:
        return TaskInvalid(f"{self._environment}: {what}; its columns are {', '.join(sorted(self._cells)) or 'none'}")

    def get(self, part: str, columns: Sequence[str]) -> Json:
        """The value of the column that the user chose for this part, else of the first non-empty one of `columns`."""
        columns = (self._named[part],) if part in self._named else columns
        return next((it for name in columns if (it := self._cells.get(name.lower())) not in (None, "")), None)

    def text(self, part: str, columns: Sequence[str]) -> str:
        text = as_text(self.get(part, columns))
        if text is None:
            expected = self._named.get(part) or " or ".join(columns)
            raise self.wrong(f"the row has no {part}: a column {expected} with a string or a number was expected")
        return text


def as_text(value: Json) -> str | None:
    """A string or a number as text: 42.0 is "42", 1e-05 is "0.00001". None if it is neither, or blank."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    return str(value).strip() or None


def math_row(row: Mapping[str, Json], options: Mapping[str, str]) -> dict[str, Json]:
    """Returns the row as a task's data."""
    check_options("math", options, OPTIONS)
    cells = Columns("math", row, {part: options[part] for part in ("question", "answer") if part in options})
    question, system_prompt = _question(cells)
    system_prompt = options.get("system_prompt", system_prompt)
    data: dict[str, Json] = {"question": question, "answer": _answer(cells)}
    if system_prompt is not None:
        data["system_prompt"] = system_prompt
        if "\\boxed" not in system_prompt + question:  # a system prompt replaces the hint
            data["question"] = f"{question}\n\n{HINT}"
    return data


def _question(cells: Columns) -> tuple[str, str | None]:
    """Returns the question, and the system prompt if the row has one."""
    asked = cells.get("question", (*QUESTIONS, "prompt"))
    if isinstance(asked, str) or not isinstance(asked, Sequence):
        return _unwrapped(cells.text("question", (*QUESTIONS, "prompt"))), None
    messages: list[tuple[str, str]] = []
    for message in asked:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise cells.wrong("prompt: messages with a role and a string as content were expected")
        messages.append((role, content))
    match messages:
        case [("user", question)] if question.strip():
            return _unwrapped(question), None
        case [("system", system_prompt), ("user", question)] if question.strip():
            return _unwrapped(question), system_prompt
    roles = ", ".join(role for role, _ in messages) or "none"
    raise cells.wrong(f"prompt: one user message, or a system and a user message, was expected; there are {roles}")


def _answer(cells: Columns) -> str:
    model = cells.get("reward_model", ("reward_model",))
    if isinstance(model, Mapping) and (truth := as_text(model.get("ground_truth"))) is not None:
        return _final(truth) or truth
    if cells.get("answer", ANSWERS) is None and (solution := as_text(cells.get("solution", ("solution",)))) is not None:
        boxed = _final(solution)
        if boxed is None:
            raise cells.wrong("solution: a \\boxed{} answer was expected, since there is no column answer")
        return boxed
    answer = cells.text("answer", ANSWERS)
    return _final(answer) or answer


def _final(text: str) -> str | None:
    """The answer at the end of a solution: after ####, or in the last box."""
    if "####" in text:
        return _THOUSANDS.sub("", text.rpartition("####")[2]).strip() or None
    return last_boxed(text)


def _unwrapped(question: str) -> str:
    for wrapped in _WRAPPED:
        if (match := wrapped.match(question)) is not None and match[1].strip():
            return match[1].strip()
    return question
