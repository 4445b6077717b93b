"""A task's data, parsed: the row of a Gym dataset as messages and tools, and the steps of its oracle.

The model sees only `responses_create_params`. The row's other fields, including the expected answer, are sent only to
the resources server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.core import DataField, Json, Message, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.fields import Fields
from rollyard.gateway.base import Problem
from rollyard.gateway.dialects.responses import Responses
from rollyard.tools.base import ToolSpec

PARAMS = "responses_create_params"

_PATH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_SERVERS_OWN = frozenset({"seed_session", "verify", "aggregate_metrics", "mcp"})
"""Paths of the server's own. A model that could call them could score itself."""


FIELDS = (
    DataField("server", "string", "A resources server of the setting `gym_servers`."),
    DataField("row", "object", f"A row of a Gym dataset; the model sees only `{PARAMS}`."),
    DataField(
        "oracle", "list of objects", "Steps of the oracle: each has `tool` and `arguments`, or an `answer`.", "none"
    ),
)


@dataclass(frozen=True, slots=True)
class OracleCall:
    """A tool call of the oracle."""

    tool: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class GymData:
    server: str
    row: Mapping[str, Json]
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    steps: tuple[OracleCall, ...] | None = None  # None if there is no oracle
    answer: str | None = None

    @classmethod
    def read(cls, task: Task) -> GymData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        server, row, oracle = fields.text("server"), fields.get("row"), fields.get("oracle")
        if not isinstance(row, Mapping):
            raise fields.wrong("row", "a row of a Gym dataset, an object,")
        messages, tools = _params(fields, row)
        steps, answer = None, None
        if oracle is not None:
            steps, answer = _oracle(task, fields, {tool.name for tool in tools})
        fields.done()
        return cls(server, row, messages, tools, steps, answer)


def params_of(row: Mapping[str, Json]) -> Mapping[str, Json] | None:
    params = row.get(PARAMS)
    return params if isinstance(params, Mapping) else None


def _params(fields: Fields, row: Mapping[str, Json]) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    where, params = f"row.{PARAMS}", params_of(row)
    if params is None:
        raise fields.wrong(where, "an object with the input")
    try:
        ask = Responses().read(params)
    except Problem as problem:
        at = f"{where}.{problem.param}" if problem.param else where
        raise TaskInvalid(f"gym: data.{where}: {problem.message}", field=f"data.{at}") from None
    raw_tools = params.get("tools")
    for index, tool in enumerate(raw_tools if isinstance(raw_tools, list | tuple) else ()):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise fields.wrong(f"{where}.tools[{index}]", "a tool of type function")
    return ask.messages, tuple(_spec(fields, f"{where}.tools", schema) for schema in ask.tools)


def _spec(fields: Fields, where: str, schema: Mapping[str, Json]) -> ToolSpec:
    function = schema["function"]
    assert isinstance(function, Mapping)
    name, about, parameters = str(function["name"]), function.get("description", ""), function["parameters"]
    if not _PATH.fullmatch(name) or name in _SERVERS_OWN:
        raise fields.wrong(where, f"a name that is valid as a path and is not reserved by the server, not {name!r},")
    assert isinstance(parameters, Mapping)
    return ToolSpec(name, str(about), parameters)


def _oracle(task: Task, fields: Fields, tools: set[str]) -> tuple[tuple[OracleCall, ...], str | None]:
    """Steps `{"tool": …, "arguments": {…}}`; the last may be `{"answer": …}` instead."""
    items = fields.items("oracle")
    steps: list[OracleCall] = []
    for index, item in enumerate(items):
        where = f"oracle[{index}]"
        if not isinstance(item, Mapping):
            raise fields.wrong(where, "an object with a tool and its arguments, or with an answer,")
        own = Fields(task, item, f"data.{where}")
        if "answer" in item and index == len(items) - 1:
            answer = own.text("answer")
            own.done()
            return tuple(steps), answer
        name, arguments = own.text("tool"), own.get("arguments")
        if name not in tools:
            raise own.wrong("tool", "the name of one of the row's tools")
        if not isinstance(arguments, Mapping | None):
            raise own.wrong("arguments", "an object")
        own.done()
        steps.append(OracleCall(name, arguments or {}))
    return tuple(steps), None
