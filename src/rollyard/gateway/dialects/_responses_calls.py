"""Converts tools and calls of the Responses API to chat format and back.

A renderer supports one kind of tool, the function. So the other kinds of this dialect are offered to the model as
functions, and their calls are returned to the client in their own form:

- `function`: unchanged.
- `custom` (free text, often with a grammar): a function with one string argument `input`, whose description contains
  the grammar.
- `local_shell`: a function with the fields of its action.
- `namespace` (a named group of those): each under `NAMESPACE__NAME`; the group's description is added to its first
  tool.

Tools that the vendor's servers run (web search, file search, code interpreter…) are not offered: the gateway cannot run
them. Their names are added to `ChatRequest.overruled`.

Invariant: `read_call(tell_call(call))` is what the model wrote. A call that does not match the form of its tool
(arguments other than `input` for a custom one) is still returned as a call of that kind, with its arguments as the
input, and its `call_id` ends in `RAW`. Clients treat a call of the wrong kind as a server error and stop, whereas they
report wrong input to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollyard.core import Json
from rollyard.gateway.base import Problem, shown
from rollyard.tokens.base import ToolCall, ToolSchema

RAW = "_raw"

_SHELL_TYPES: Mapping[str, Json] = {
    "command": {"type": "array", "items": {"type": "string"}},
    "working_directory": {"type": "string"},
    "timeout_ms": {"type": "integer"},
    "env": {"type": "object", "additionalProperties": {"type": "string"}},
    "user": {"type": "string"},
}
_SHELL: Json = {"type": "object", "properties": _SHELL_TYPES, "required": ["command"]}
_SHELL_ABOUT = "Runs a command and returns its output. The command is a list of arguments, not a line of shell."


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the client defined it."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class Toolbox:
    """The tools of one request: the schemas that the model is offered, and the client's tool for each."""

    schemas: list[ToolSchema] = field(default_factory=list[ToolSchema])
    offered: dict[str, OfferedTool] = field(default_factory=dict[str, OfferedTool])
    overruled: list[str] = field(default_factory=list[str])
    _by_name: dict[str, ToolSchema] = field(default_factory=dict[str, ToolSchema])

    def read(self, tools: Json, at: str, namespace: str | None = None, about: str = "") -> None:
        """Adds a list of tools as the client sent it. `at` is its position, for error messages."""
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise Problem("invalid", f"{at} must be a list of tools", param=at)
        for index, tool in enumerate(tools):
            where = f"{at}[{index}]"
            if not isinstance(tool, Mapping):
                raise Problem("invalid", f"{where} must be an object", param=where)
            kind = tool.get("type")
            if kind == "namespace" and namespace is None:
                description = tool.get("description")
                name = _name(tool, where)
                self.read(
                    tool.get("tools"), f"{where}.tools", name, description if isinstance(description, str) else ""
                )
            elif kind == "function":
                self._function(tool, where, namespace, about if index == 0 else "")
            elif kind == "custom":
                self._custom(tool, where, namespace, about if index == 0 else "")
            elif kind == "local_shell":
                self._add(OfferedTool("local_shell", "local_shell"), _SHELL_ABOUT, _SHELL, where)
            elif isinstance(kind, str) and kind:
                self.overruled.append(f"tools.{kind[:64]}")
            else:
                raise Problem("invalid", f"{where}.type is missing", param=f"{where}.type")

    def _function(self, tool: Mapping[str, Json], where: str, namespace: str | None, about: str) -> None:
        parameters = tool.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        elif not isinstance(parameters, Mapping):
            raise Problem("invalid", f"{where}.parameters must be a JSON schema", param=f"{where}.parameters")
        if tool.get("strict"):
            self.overruled.append("tools.strict")
        self._add(OfferedTool("function", _name(tool, where), namespace), _about(tool, about), parameters, where)

    def _custom(self, tool: Mapping[str, Json], where: str, namespace: str | None, about: str) -> None:
        description = "The whole input of this tool, as plain text."
        format_ = tool.get("format")
        if isinstance(format_, Mapping) and format_.get("type") == "grammar":
            self.overruled.append("tools.format")  # shown to the model, not enforced
            description += f" It must follow this {format_.get('syntax')} grammar:\n{format_.get('definition')}"
        parameters: Json = {
            "type": "object",
            "properties": {"input": {"type": "string", "description": description}},
            "required": ["input"],
        }
        self._add(OfferedTool("custom", _name(tool, where), namespace), _about(tool, about), parameters, where)

    def _add(self, offered: OfferedTool, about: str, parameters: Json, where: str) -> None:
        name = joined(offered.namespace, offered.name)
        function: dict[str, Json] = {
            "name": name,
            **({"description": about} if about else {}),
            "parameters": parameters,
        }
        schema: ToolSchema = {"type": "function", "function": function}
        if name not in self.offered:
            self.offered[name] = offered
            self._by_name[name] = schema
            self.schemas.append(schema)
        elif schema != self._by_name[name]:  # an identical duplicate is accepted
            raise Problem("invalid", f"{where}: another tool is already named {shown(name)}", param=where)


def joined(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _name(tool: Mapping[str, Json], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise Problem("invalid", f"{where}.name is missing", param=f"{where}.name")
    return name


def _about(tool: Mapping[str, Json], lead: str) -> str:
    about = tool.get("description")
    return "\n\n".join(part for part in (lead, about) if isinstance(part, str) and part)


# --- calls to the client ---


def call_item(call: ToolCall, offered: Mapping[str, OfferedTool], item_id: str) -> dict[str, Any]:
    """Returns the output item of a call, without its status."""
    tool = offered.get(call.name) or OfferedTool("function", call.name)
    arguments = call.arguments
    if tool.kind == "local_shell" and arguments is not None:
        action: dict[str, Any] = {"type": "exec", "env": {}, **arguments}
        if _is_shell(arguments) and _shell_arguments(action) == arguments:
            return {"id": f"lsh_{item_id}", "type": "local_shell_call", "call_id": call.id, "action": action}
    text = call.raw if arguments is None else json.dumps(arguments, ensure_ascii=False)
    item: dict[str, Any] = {"name": tool.name}
    if tool.namespace:
        item["namespace"] = tool.namespace
    if tool.kind != "custom":
        return {"id": f"fc_{item_id}", "type": "function_call", "call_id": call.id, **item, "arguments": text}
    call_id = call.id
    if arguments is not None and len(arguments) == 1 and isinstance(arguments.get("input"), str):
        text = arguments["input"]
    else:
        call_id += RAW
    return {"id": f"ctc_{item_id}", "type": "custom_tool_call", "call_id": call_id, **item, "input": text}


def _is_shell(arguments: Mapping[str, Json]) -> bool:
    command, env = arguments.get("command"), arguments.get("env", {})
    return (
        isinstance(command, Sequence)
        and not isinstance(command, str)
        and all(isinstance(word, str) for word in command)
        and isinstance(env, Mapping)
        and all(isinstance(value, str) for value in env.values())
        and all(isinstance(arguments.get(name, ""), str) for name in ("working_directory", "user"))
        and _is_count(arguments.get("timeout_ms", 0))
        and arguments.keys() <= _SHELL_TYPES.keys()
    )


def _is_count(value: Json) -> bool:
    """Whether it is an integer that JSON libraries can write and clients can read; a model may write one of any
    length."""
    return isinstance(value, int) and abs(value) < 2**53


# --- calls from the client ---


def read_call(item: Mapping[str, Json], where: str) -> dict[str, Json]:
    """Returns a call in chat format. It keeps the client's id, which the tool's output will refer to."""
    call_id = _text(item, "call_id", where)
    if item.get("type") == "local_shell_call":
        action = item.get("action")
        if not isinstance(action, Mapping):
            raise Problem("invalid", f"{where}.action is missing", param=f"{where}.action")
        return _call(call_id, "local_shell", json.dumps(_shell_arguments(action), ensure_ascii=False))
    namespace = item.get("namespace")
    name = joined(namespace if isinstance(namespace, str) else None, _text(item, "name", where))
    if item.get("type") == "function_call":
        return _call(call_id, name, _text(item, "arguments", where))
    text = _text(item, "input", where)
    return _call(call_id, name, text if call_id.endswith(RAW) else json.dumps({"input": text}, ensure_ascii=False))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Json]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _shell_arguments(action: Mapping[str, Json]) -> dict[str, Json]:
    """Returns an action's fields that are set: clients fill the others with null and {}."""
    return {name: action[name] for name in _SHELL_TYPES if action.get(name) not in (None, {})}


def _text(item: Mapping[str, Json], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise Problem("invalid", f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
