"""The `reasoning_gym` environment: an item of one of reasoning-gym's families, generated from a few numbers.

    {"family": "leg_counting", "seed": 42, "index": 3, "config": {"max_animals": 5}}

The same data give the same question in every process. The reward is the family's own score, from 0 to 1, often with
credit for a partly correct answer. The answer is the text between the last <answer> and </answer>, or what was passed
to the `finish` tool; a missing answer gets the family's score for None. A child process generates the item and scores
the answer (`child`, which also decides whether a failure is the answer's fault).
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.core.failure import EvalDeadline, SetupDeadline, TaskInvalid, VerifierCrashed
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Solution, Start, check_options
from rollyard.envs.children import Children
from rollyard.envs.fields import Fields
from rollyard.tools.base import Tool

CHILD = "rollyard.envs.reasoning.child"
COMMAND = ("env", "PYTHONHASHSEED=0", sys.executable, "-P", "-m", CHILD)
"""Some families iterate over sets: without PYTHONHASHSEED=0 their questions differ from process to process."""

HINT = "Reason step by step, and give your final answer, and nothing else, between <answer> and </answer>."
SIZE = 500
"""The size of a family's dataset if the task has none: reasoning-gym's default. The items of `acre` depend on it."""
MAX_SIZE = 1_000_000
MAX_SEED = (1 << 32) - 1
MAX_ANSWER_CHARS = 100_000
"""A longer answer scores 0."""
CHILD_S = 120.0
"""The time limit for a child's reply. The slowest items take 3 s to make; scoring is limited by `child.SCORE_CPU_S`,
twice."""
COUNT = 100
FIELDS = (
    DataField("family", "string", "A family of reasoning-gym."),
    DataField("seed", f"whole number, 0 to {MAX_SEED}", "The seed of the family's dataset."),
    DataField("index", "whole number, 0 to size - 1", "The item of the dataset."),
    DataField("size", f"whole number, 1 to {MAX_SIZE}", "The size of the dataset.", f"{SIZE}"),
    DataField("config", "object", "The family's own options.", "{}"),
    DataField("system_prompt", "string or null", "Replaces the hint about the form of the answer.", "the hint"),
)
ROW = tuple(field.name for field in FIELDS)


class ReasoningEnvironment(Environment):
    """Asks reasoning-gym's questions and returns its scores. `system_prompt` in the data replaces the hint."""

    name: ClassVar[str] = "reasoning_gym"
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def __init__(self) -> None:
        self.children = Children("reasoning-gym", command=COMMAND)
        self.child_s = CHILD_S

    def check(self, task: Task) -> None:
        _need_package()
        _read(task)

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        item, system_prompt = _read(context.task)
        generated = await self._ask_first({"do": "make", **item}, context)
        question, info = str(generated["question"]), {"question_sha256": generated["sha256"]}
        if system_prompt is None:
            return Start(({"role": "user", "content": f"{question}\n\n{HINT}"},), info=info)
        system: Message = {"role": "system", "content": system_prompt}
        return Start((system, {"role": "user", "content": question}), info=info)

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        item, _ = _read(context.task)
        known = (await self._ask_first({"do": "solve", **item}, context))["answer"]
        if not isinstance(known, str):
            raise TaskInvalid(f"{self.name}: this item of {item['family']} has no known answer")
        return Solution(messages=({"role": "assistant", "content": f"<answer>{known}</answer>"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        item, _ = _read(context.task)
        answer = final_answer(evidence)
        is_too_long = answer is not None and len(answer) > MAX_ANSWER_CHARS
        if is_too_long:
            return _score(0.0, is_answered=True, is_unscorable=True)
        try:
            judged = await self.children.ask(
                {"do": "score", **item, "answer": answer},
                answer_s=self.child_s,
                wait_s=context.task.limits.eval_s / 2,
                owner=context.owner,
            )
        except EvalDeadline as error:  # the child limits the answer's own time, so this is not its fault
            raise VerifierCrashed(error.detail) from error
        if "invalid" in judged:
            raise VerifierCrashed(f"{self.name}: the item cannot be made again: {judged['invalid']}")
        if evidence.trajectory.info.get("question_sha256", judged["sha256"]) != judged["sha256"]:
            raise VerifierCrashed(f"{self.name}: in INIT these data gave another question; has reasoning-gym changed?")
        reward = judged["score"]
        if not isinstance(reward, int | float):
            raise VerifierCrashed(f"{self.name}: the child returned no score")
        text = f"given: {'none' if answer is None else answer}\nscore: {reward:g}"
        context.findings.add("check", str(item["family"]), text, passed=reward >= 1)
        return _score(float(reward), is_answered=answer is not None, is_unscorable=judged["why"] is not None)

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        """A row is a task's data. `config` may be a JSON string, as in tables."""
        check_options(self.name, options)
        for name in ("family", "seed", "index"):
            if row.get(name) is None:
                raise TaskInvalid(f"{self.name}: this row has no {name!r}, without which the item cannot be generated")
        data = {name: row[name] for name in ROW if row.get(name) is not None}
        config = data.get("config")
        if isinstance(config, str):
            data["config"] = _config(config)
        elif isinstance(config, Mapping):  # in a table each row has the options of all rows, as nulls
            data["config"] = {name: value for name, value in config.items() if value is not None}
        self.check(Task(self.name, data))
        return {"environment": self.name, "data": data}

    def generate(self, options: Mapping[str, str]) -> Iterator[Mapping[str, Json]]:
        """The first `count` items of each family in `family`: one, several separated by commas, or all."""
        _need_package()
        check_options(self.name, options, ("family", "count", "seed", "config"))
        families = _families(options.get("family", ""))
        count = _number(options, "count", COUNT, 1, MAX_SIZE)
        seed = _number(options, "seed", 0, 0, MAX_SEED)
        more: dict[str, Json] = {"size": count} if count > SIZE else {}
        if "config" in options:
            if len(families) > 1:
                raise TaskInvalid(f"{self.name}: config applies to one family, not to {len(families)}")
            more["config"] = _config(options["config"])
        for family in families:
            for index in range(count):
                yield {
                    "environment": self.name,
                    "data": {"family": family, "seed": seed, "index": index, **more},
                }

    async def close(self) -> None:
        await self.children.close()

    async def _ask_first(self, question: Json, context: EnvContext) -> Mapping[str, Json]:
        """For requests before there is an answer: a failure is the fault of the task or of the service."""
        try:
            wait_s = context.task.limits.init_s / 2
            reply = await self.children.ask(question, answer_s=self.child_s, wait_s=wait_s, owner=context.owner)
        except EvalDeadline as error:
            raise SetupDeadline(error.detail) from error
        if "invalid" in reply:
            raise TaskInvalid(f"{self.name}: {reply['invalid']}")
        return reply


def final_answer(evidence: Evidence) -> str | None:
    """The agent's answer, or None."""
    finished = evidence.trajectory.info.get("answer")
    if isinstance(finished, str) and finished.strip():
        tagged = last_tagged(finished)
        return finished.strip() if tagged is None else tagged
    return last_tagged(evidence.answer)


def last_tagged(text: str) -> str | None:
    """The text between the last </answer> and the <answer> before it; may be empty."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def near(name: str, names: Iterable[str]) -> str:
    """The end of an error message for an unknown name: similar names."""
    matches = difflib.get_close_matches(name, list(names), n=5, cutoff=0.5)
    return f"; similar names: {', '.join(matches)}" if matches else ""


def _score(reward: float, *, is_answered: bool, is_unscorable: bool) -> Score:
    metrics = {"answered": float(is_answered), "unscorable": float(is_unscorable)}
    return Score(reward, components={"score": reward}, metrics=metrics)


def _read(task: Task) -> tuple[dict[str, Json], str | None]:
    """Returns the item as the child expects it, and the system prompt."""
    fields = Fields(task)
    family = fields.text("family")
    size = _whole(fields, "size", SIZE, 1, MAX_SIZE)
    config = fields.get("config")
    if config is not None and not isinstance(config, Mapping):
        raise fields.wrong("config", "an object")
    for name in ("seed", "size"):
        if config and name in config:
            raise fields.wrong(f"config.{name}", f"nothing (use data.{name})")
    item: dict[str, Json] = {
        "family": family,
        "seed": _whole(fields, "seed", None, 0, MAX_SEED),
        "index": _whole(fields, "index", None, 0, size - 1),
        "size": size,
        "config": dict(config or {}),
    }
    system_prompt = fields.optional_text("system_prompt")
    fields.done()
    return item, system_prompt


def _whole(fields: Fields, name: str, default: int | None, low: int, high: int) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        below = " (below data.size)" if name == "index" else ""
        raise fields.wrong(name, f"a whole number from {low} to {high}{below}")
    return value


def _families(option: str) -> list[str]:
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})  # composite needs a config
    requested = [name.strip() for name in option.split(",") if name.strip()]
    if not requested:
        raise TaskInvalid("reasoning_gym: family: give one family, several separated by commas, or all")
    if requested == ["all"]:
        return names
    for name in requested:
        if name not in DATASETS:
            raise TaskInvalid(f"reasoning_gym: there is no family {name!r}{near(name, names)}")
    return list(dict.fromkeys(requested))


def _number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or not low <= int(text) <= high:
        raise TaskInvalid(f"reasoning_gym: {name}={text}: a whole number from {low} to {high} was expected")
    return int(text)


def _config(text: str) -> dict[str, Json]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise TaskInvalid(f"reasoning_gym: config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise TaskInvalid("reasoning_gym: config: an object was expected")
    return config


def _need_package() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise TaskInvalid("reasoning_gym: the package reasoning-gym is not installed here: install rollyard[reasoning]")
