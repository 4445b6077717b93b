"""The `yardwork` environment: small shell tasks generated from a seed, with separate splits for training and testing.

    {"family": "chain", "template": "t0", "level": 2, "seed": 42, "split": "train"}

A task's files, instruction and expected result depend on these data alone, on every machine. Every task needs
exploration: some information that the solution needs is in the sandbox and not in the instruction. Level 1 takes one or
two commands; higher levels, up to 5, have more files, more steps and more distractors.

The reward is 1 or 0. If a task asks for an answer, the answer is what was passed to `finish`, else the last message. If
files are to be changed, the workspace must be exactly as expected, with nothing else in it. The comparison runs on the
host: EVAL executes nothing that RUN left. `held_out` has other templates than `train`, some with their own rules, and
other words and numbers (`words`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from rollyard.core import DataField, Json, Message, Score, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import ArtifactRule, EnvContext, Environment, Evidence, Plan, Solution, Start, check_options
from rollyard.envs.yardwork.families import FAMILIES, FIELDS, MAX_SEED, YardworkData
from rollyard.envs.yardwork.judging import is_answer, pack, share_right, unpacked
from rollyard.envs.yardwork.puzzle import LEVELS, Family, Template
from rollyard.envs.yardwork.words import SPLITS, Split
from rollyard.sandbox.base import WORKDIR
from rollyard.tools.base import Tool

SYSTEM_PROMPT = (
    "You work in a Linux shell. Look first, then act. Call finish at the end, with the answer if one is asked."
)

WORKSPACE = "workspace"
"""The name of the artifact of tasks that change files."""

WORKSPACE_BYTES = 4 << 20
"""A task's files have a few kilobytes. A larger workspace cannot be right."""

RULES = ("all", "trained", "new")
"""Selects held-out templates: `trained` ones reword a trained task, `new` ones have a rule that is not trained."""

COUNT = 1000
MAX_COUNT = 1_000_000


class YardworkEnvironment(Environment):
    """Generates shell tasks from a seed and compares the answer or the workspace with the expected one."""

    name: ClassVar[str] = "yardwork"
    tools: ClassVar[tuple[str, ...]] = ("shell", "finish")
    data_fields: ClassVar[tuple[DataField, ...]] = FIELDS

    def check(self, task: Task) -> None:
        YardworkData.read(task)

    def plan(self, task: Task) -> Plan:
        if YardworkData.read(task).puzzle().scene.after is None:
            return Plan(eval_needs_sandbox=False)
        return Plan(artifacts=(ArtifactRule(WORKSPACE, WORKDIR, WORKSPACE_BYTES),))

    def layer_key(self, task: Task) -> str | None:
        """Depends on the files themselves, so it covers the families' sources but not the wordings."""
        files = YardworkData.read(task).puzzle().scene.files
        return self.key_of([[path, None if file is None else [file.text, file.mode]] for path, file in files.items()])

    async def prepare(self, context: EnvContext) -> None:
        files = YardworkData.read(context.task).puzzle().scene.files
        with tempfile.TemporaryDirectory(prefix="yardwork-") as folder:
            archive = Path(folder) / "files.tar"
            await asyncio.to_thread(pack, files, archive)
            await context.box.unpack(archive, WORKDIR)

    async def init(self, context: EnvContext) -> Start:
        data = YardworkData.read(context.task)
        system = SYSTEM_PROMPT if data.system_prompt is None else data.system_prompt
        user: Message = {"role": "user", "content": data.puzzle().instruction}
        return Start(({"role": "system", "content": system}, user) if system else (user,))

    async def solve(self, context: EnvContext, tools: Mapping[str, Tool]) -> Solution:
        """Calls the tools turn by turn, as in `demonstration`."""
        puzzle = YardworkData.read(context.task).puzzle()
        if "shell" not in tools:
            raise TaskInvalid(f"{self.name}: the oracle needs the tool shell, which this task does not have")
        messages: list[Message] = []
        for index, turn in enumerate(puzzle.turns):
            arguments = json.dumps(dict(turn.arguments), ensure_ascii=False)
            call: Json = {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": turn.tool, "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": turn.text, "tool_calls": [call]})
            if (tool := tools.get(turn.tool)) is not None:
                result = await tool.call(turn.arguments, timeout_s=context.task.limits.tool_s)
                tool_message: Message = {"role": "tool", "tool_call_id": f"call_{index}", "name": turn.tool}
                messages.append({**tool_message, "content": result.content})
        return Solution(answer=puzzle.scene.answer, messages=tuple(messages))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        scene = YardworkData.read(context.task).puzzle().scene
        if scene.after is None:
            answered = bool(evidence.answer.strip())
            is_right = scene.answer is not None and is_answer(scene.answer, evidence.answer)
            text = f"known: {scene.answer}\ngiven: {evidence.answer}"
            context.findings.add("check", "answer", text, passed=is_right)
            return Score(float(is_right), components={"answer": float(is_right)}, metrics={"answered": float(answered)})
        share = 0.0
        if WORKSPACE in evidence.artifacts:
            with tempfile.TemporaryDirectory(prefix="yardwork-") as folder:
                archive = Path(folder) / "left.tar"
                try:
                    await context.box.download(WORKDIR, archive, limit_bytes=WORKSPACE_BYTES)
                    files = await asyncio.to_thread(unpacked, archive)
                except ValueError:  # RUN removed the folder, or it exceeds the limit
                    files = None
            if files is not None:
                share = share_right(scene.after, files, checks_modes=scene.checks_modes)
        is_right = share == 1.0
        context.findings.add("check", "files", f"{share:.0%} of the files are right", passed=is_right)
        return Score(float(is_right), components={"files": float(is_right)}, metrics={"files_right": share})

    def generate(self, options: Mapping[str, str]) -> Iterator[Mapping[str, Json]]:
        """`count` tasks of a split, alternating between families and levels. Another seed gives other tasks."""
        check_options(self.name, options, ("count", "seed", "split", "families", "levels", "rules"))
        split = _split(options.get("split", "train"))
        rules = _rules(options.get("rules", "all"), split)
        families = _families(options.get("families", "all"))
        levels = _levels(options.get("levels", f"{LEVELS[0]}-{LEVELS[-1]}"))
        count = _number(options, "count", COUNT, 1, MAX_COUNT)
        seed = _number(options, "seed", 0, 0, MAX_SEED)
        family_templates = [
            [one for one in family.templates[split] if _is_of(family, one, rules)] for family in families
        ]
        for index in range(count):
            family, templates = families[index % len(families)], family_templates[index % len(families)]
            digest = hashlib.sha256(f"{split}/{seed}/{index}".encode()).digest()
            # One byte is uneven over dozens of templates. For three it suffices, and held-out tasks must not change.
            chance = int.from_bytes(digest[6:8], "little") if split == "train" else digest[6]
            data: dict[str, Json] = {
                "family": family.name,
                "template": templates[chance % len(templates)].name,
                "level": levels[index // len(families) % len(levels)],
                "seed": int.from_bytes(digest[:6], "big"),
                "split": split,
            }
            yield {"environment": self.name, "data": data}


def _split(option: str) -> Split:
    for split in SPLITS:
        if split == option:
            return split
    raise TaskInvalid(f"yardwork: split={option}: {' or '.join(SPLITS)} was expected")


def _rules(option: str, split: Split) -> str:
    if option not in RULES:
        raise TaskInvalid(f"yardwork: rules={option}: one of {', '.join(RULES)} was expected")
    if (option, split) == ("new", "train"):
        raise TaskInvalid("yardwork: rules=new: only the split held_out has rules that are not trained")
    return option


def _is_of(family: Family, template: Template, rules: str) -> bool:
    trained = {one.rule for one in family.templates["train"]}
    return rules == "all" or (template.rule in trained) == (rules == "trained")


def _families(option: str) -> list[Family]:
    if option == "all":
        return list(FAMILIES.values())
    names = list(dict.fromkeys(name.strip() for name in option.split(",")))
    for name in names:
        if name not in FAMILIES:
            raise TaskInvalid(f"yardwork: families: there is no family {name!r}; there are {', '.join(FAMILIES)}")
    return [FAMILIES[name] for name in names]


def _levels(option: str) -> list[int]:
    """`2`, or `1-3`."""
    low, _, high = option.partition("-")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise TaskInvalid(f"yardwork: levels={option}: a level, or a range such as 1-3, was expected")
    levels = [level for level in LEVELS if int(low) <= level <= int(high or low)]
    if not levels or int(low) not in LEVELS or int(high or low) not in LEVELS:
        raise TaskInvalid(f"yardwork: levels={option}: levels are {LEVELS[0]} to {LEVELS[-1]}")
    return levels


def _number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or not low <= int(text) <= high:
        raise TaskInvalid(f"yardwork: {name}={text}: a whole number from {low} to {high} was expected")
    return int(text)
