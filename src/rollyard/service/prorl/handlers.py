"""An instance as a task, by the handler that its `data_source` names (`swebench` where there is none).

    swebench                                          swe    rows of SWE-bench, SWE-Gym, R2E-Gym, as they are
    deepscaler                                        math   prompt, reward_model.ground_truth
    deepcoder…, codecontests, apps, codeforces, taco  code   prompt, reward_model.ground_truth: tests
    stem                                              stem   question or prompt, answer or reward_model.ground_truth

Any other name is that of an environment here, whose own importer reads the instance as a row of a dataset
(`rollyard tasks import`), or whose task's data it is.

Their tables hold JSON as text in places, nulls where another dataset has a column, and the reference's own
bookkeeping: all that is undone here, and the environments' importers do the rest. Agents get the tools that the
handler gives its agent, under our names, as far as there are such.
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
"""The reference's own fields: no part of a task."""

CODE_HINT = "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
"""What Eurus and DeepCoder put behind each problem; the environment says itself where the code is wanted."""

SEARCH = "search"
"""An MCP server of this name in the setting `mcp_servers` is what agents search with."""


@dataclass(frozen=True, slots=True)
class InstanceHandler:
    """An environment, how an instance becomes a row for its importer, and the agent's tools (None: its own)."""

    environment: str
    row: Callable[[Row], Row]
    tools: tuple[str, ...] | None = None
    searches: bool = False


@dataclass(frozen=True, slots=True)
class Choices:
    """What the operator decides for these tasks."""

    images: str = ""  # the importer's option of `swe`
    mcp_servers: tuple[str, ...] = ()


def task_body(instance: Row, environments: Environments, choices: Choices) -> dict[str, Json]:
    """The body of a task. TaskInvalid says what is wrong with the instance; UnknownEnvironment, with its handler."""
    name = str(instance.get("data_source") or DEFAULT)
    handler = handler_of(name)
    environment = environments.get(handler.environment)
    row = {key: value for key, value in instance.items() if value is not None and key not in BOOKKEEPING}
    try:
        found = environment.from_row(handler.row(row), _options(handler, choices))
    except TaskInvalid:
        if handler.row is not _as_it_is:
            raise
        data = {key: value for key, value in row.items() if key != "instance_id"}
        found = {"environment": handler.environment, "data": data}  # no importer, or none for this: a task's own data
        environment.check(Task(handler.environment, data))
    body = dict(found)
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
    """Inputs and outputs as APPS has them, or a list of tests as LiveCodeBench has them."""
    if row.get("reward_model") is None:
        return row  # a row of a dataset that the environment knows
    tests, question = _truth(row), _question(row).replace(CODE_HINT, "").strip()
    tests = _json(tests) if isinstance(tests, str) else tests
    if isinstance(tests, Mapping):
        return {"question": question, "input_output": tests}
    if not isinstance(tests, Sequence) or isinstance(tests, str):
        raise TaskInvalid("deepcoder: reward_model.ground_truth: tests were expected, as JSON or not")
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
    found = dict(row)
    if found.get("question") is None and found.get("prompt") is not None:
        found["question"] = _question(row)
    if found.get("answer") is None and found.get("reward_model") is not None:
        found["answer"] = _truth(row)
    return found


def _function(test: Json) -> str | None:
    """The function that a test calls; None: it is of a program."""
    if not isinstance(test, Mapping):
        return None
    metadata = test.get("metadata")
    name = test.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return name if isinstance(name, str) else None


def _question(row: Row) -> str:
    """What the user says in the prompt: a text, messages, or those as JSON."""
    prompt = _read(row, "prompt").get("prompt")
    if isinstance(prompt, str):
        return prompt
    said = [it for it in prompt if isinstance(it, Mapping)] if isinstance(prompt, Sequence) else []
    texts = [it.get("content") for it in said if it.get("role") == "user"]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise TaskInvalid("prompt: one user message with a text was expected", field="prompt")
    return texts[0]


def _truth(row: Row) -> Json:
    model = _read(row, "reward_model").get("reward_model")
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise TaskInvalid("reward_model: an object with ground_truth was expected", field="reward_model")
    return model["ground_truth"]


def _read(row: Row, *names: str) -> dict[str, Json]:
    """These fields, of those that are there; a list or an object as JSON is read."""
    found: dict[str, Json] = {}
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            value = _json(value)
        if value is not None:
            found[name] = value
    return found


def _json(text: str) -> Json:
    """What the JSON says; the text itself if it is none: a problem may begin with a bracket."""
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
