"""Converts an instance to a task, with the handler that its `data_source` names (default: `swebench`).

    swebench                                          swe    rows of SWE-bench, SWE-Gym, R2E-Gym, unchanged
    deepscaler                                        math   prompt, reward_model.ground_truth
    deepcoder…, codecontests, apps, codeforces, taco  code   prompt, reward_model.ground_truth: tests
    stem                                              stem   question or prompt, answer or reward_model.ground_truth

Any other name is the name of an environment. Its importer reads the instance as a row of a dataset (`rollyard tasks
import`), or the instance is the data of its task.

ProRL Agent's tables contain JSON as text, nulls where another dataset has a column, and bookkeeping fields. These are
undone here, and the environments' importers do the rest. Agents get the tools that ProRL Agent's handler gives its
agent, under Rollyard's names, as far as they exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.core import Json, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.registry import Environments

Row = Mapping[str, Json]

DEFAULT = "swebench"

BOOKKEEPING = frozenset({"data_source", "trajectory_id", "data_kind", "ability", "source"})
"""Fields of ProRL Agent that are not part of a task."""

CODE_HINT = "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
"""Appended to each problem by Eurus and DeepCoder; the environment has its own instruction on where to put the code."""

SEARCH = "search"
"""Name of the MCP server, in the setting `mcp_servers`, with which agents search."""


@dataclass(frozen=True, slots=True)
class InstanceHandler:
    """An environment, the conversion of an instance to a row of its importer, and the agent's tools (None: default)."""

    environment: str
    row: Callable[[Row], Row]
    tools: tuple[str, ...] | None = None
    searches: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """The operator's settings for these tasks."""

    images: str = ""  # the importer's option for `swe`
    mcp_servers: tuple[str, ...] = ()


def task_body(instance: Row, environments: Environments, choices: Choices) -> dict[str, Json]:
    """The body of a task. Raises `TaskInvalid` for an invalid instance, `UnknownEnvironment` for an unknown handler."""
    name = str(instance.get("data_source") or DEFAULT)
    handler = handler_of(name)
    environment = environments.get(handler.environment)
    row = {key: value for key, value in instance.items() if value is not None and key not in BOOKKEEPING}
    try:
        imported = environment.from_row(handler.row(row), _options(handler, choices))
    except TaskInvalid:
        if handler.row is not _as_it_is:
            raise
        data = {key: value for key, value in row.items() if key != "instance_id"}
        imported = {
            "environment": handler.environment,
            "data": data,
        }  # no importer accepts the row: it is the task's data
        environment.check(Task(handler.environment, data))
    body = dict(imported)
    options: dict[str, Json] = {}
    if handler.tools is not None:
        options["tools"] = list(handler.tools)
    if handler.searches and SEARCH in choices.mcp_servers:
        options["mcp"] = {SEARCH: {"server": SEARCH}}
    return body | {"agent": {"options": options}} if options else body


def handler_of(name: str) -> InstanceHandler:
    return (
        HANDLERS["deepcoder"]
        if name.startswith("deepcoder")
        else HANDLERS.get(name) or InstanceHandler(name, _as_it_is)
    )


def _options(handler: InstanceHandler, choices: Choices) -> dict[str, str]:
    return {"images": choices.images} if handler.environment == "swe" and choices.images else {}


# --- rows ---------------------------------------------------------------------------------------------


def _as_it_is(row: Row) -> Row:
    return row


def _math(row: Row) -> Row:
    return {**row, **_read(row, "prompt", "reward_model")}


def _code(row: Row) -> Row:
    """Tests as inputs and outputs as in APPS, or as a list as in LiveCodeBench."""
    if row.get("reward_model") is None:
        return row  # a row of a dataset that the environment can import
    tests, question = _truth(row), _question(row).replace(CODE_HINT, "").strip()
    tests = _json(tests) if isinstance(tests, str) else tests
    if isinstance(tests, Mapping):
        return {"question": question, "input_output": tests}
    if not isinstance(tests, Sequence) or isinstance(tests, str):
        raise TaskInvalid("deepcoder: reward_model.ground_truth: tests were expected, as JSON text or as a list")
    names = {name for test in tests if (name := _function(test)) is not None}
    if len(names) > 1:
        raise TaskInvalid("deepcoder: reward_model.ground_truth: its tests call more than one function")
    metadata: Json = {"func_name": names.pop()} if names else {}
    return {
        "question_content": question,
        "public_test_cases": [],
        "private_test_cases": list(tests),
        "metadata": metadata,
    }


def _stem(row: Row) -> Row:
    fields = dict(row)
    if fields.get("question") is None and fields.get("prompt") is not None:
        fields["question"] = _question(row)
    if fields.get("answer") is None and fields.get("reward_model") is not None:
        fields["answer"] = _truth(row)
    return fields


def _function(test: Json) -> str | None:
    """The function that a test calls, or None if it tests a program."""
    if not isinstance(test, Mapping):
        return None
    metadata = test.get("metadata")
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return name if isinstance(name, str) else None


def _question(row: Row) -> str:
    """The user's message in the prompt, which is a text, a list of messages, or such a list as JSON text."""
    prompt = _read(row, "prompt").get("prompt")
    if isinstance(prompt, str):
        return prompt
    messages = [it for it in prompt if isinstance(it, Mapping)] if isinstance(prompt, Sequence) else []
    texts = [it.get("content") for it in messages if it.get("role") == "user"]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise TaskInvalid("prompt: one user message with a text was expected", field="prompt")
    return texts[0]


def _truth(row: Row) -> Json:
    model = _read(row, "reward_model").get("reward_model")
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise TaskInvalid("reward_model: an object with ground_truth was expected", field="reward_model")
    return model["ground_truth"]


def _read(row: Row, *names: str) -> dict[str, Json]:
    """The fields that exist; lists and objects in JSON text are decoded."""
    fields: dict[str, Json] = {}
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            value = _json(value)
        if value is not None:
            fields[name] = value
    return fields


def _json(text: str) -> Json:
    """The decoded JSON, or the text itself if it is not JSON: a problem may start with a bracket."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_CODE = InstanceHandler("code", _code, ("shell", "editor", "ipython", "finish"))

HANDLERS: Mapping[str, InstanceHandler] = {
    "swebench": InstanceHandler("swe", dict),
    "deepscaler": InstanceHandler("math", _math, ("ipython", "finish")),
    "deepcoder": _CODE,
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _CODE),
    "stem": InstanceHandler("stem", _stem, ("ipython", "finish"), searches=True),
}
