"""Parses tool calls that a model wrote. Parsing never raises: errors are returned to the model.

A lone surrogate, which JSON can encode and UTF-8 cannot, becomes U+FFFD, because calls are stored in records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

from rollyard.core import Json, Message
from rollyard.tokens.base import ToolCall

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_call(raw: str, call_id: str, *, is_closed: bool = True) -> ToolCall:
    """Parses `{"name": …, "arguments": {…}}`."""
    if not is_closed:
        return ToolCall(call_id, "", None, raw, "the tool call was not closed with </tool_call>")
    try:
        value = read_json(raw)
    except ValueError as error:
        return ToolCall(call_id, "", None, raw, f"the tool call is not valid JSON: {error}")
    if not isinstance(value, Mapping):
        return ToolCall(call_id, "", None, raw, 'the tool call must be a JSON object {"name": …, "arguments": {…}}')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall(call_id, "", None, raw, 'the tool call has no "name"')
    return read_arguments(name, value.get("arguments"), raw, call_id)


def read_arguments(name: str, arguments: Json, raw: str, call_id: str) -> ToolCall:
    """Parses the arguments of a named call: an object, or its JSON text. Missing arguments are an empty object."""
    name = _SURROGATE.sub("�", name)
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return ToolCall(call_id, name, None, raw, f'"arguments" is not valid JSON: {error}')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(call_id, name, None, raw, '"arguments" must be a JSON object')
    try:
        return ToolCall(call_id, name, cast("Mapping[str, Json]", _storable(arguments)), raw)
    except RecursionError:
        return ToolCall(call_id, name, None, raw, '"arguments" is nested too deeply')


def named_arguments(call: Json) -> tuple[str, Json]:
    """The name and arguments of a call in a message, whether or not it is wrapped in "function"."""
    if isinstance(call, Mapping):
        function = call.get("function", call)
        if isinstance(function, Mapping):
            name = function.get("name")
            return name if isinstance(name, str) else "", function.get("arguments", {})
    return "", {}


def read_json(text: str) -> Json:
    """Parses strict JSON. Every error, including excessive nesting and oversized numbers, is a ValueError."""
    try:
        return cast("Json", json.loads(text, parse_constant=_no_constant, parse_float=_finite))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _storable(value: Json) -> Json:
    if isinstance(value, str):
        return _SURROGATE.sub("�", value)
    if isinstance(value, Mapping):
        return {_SURROGATE.sub("�", name): _storable(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_storable(item) for item in value]
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def assistant_message(content: str, reasoning: str, calls: Sequence[ToolCall]) -> Message:
    """The turn in the OpenAI format. A call that could not be parsed has its raw text as its arguments."""
    message: dict[str, Json] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.raw
                    if call.arguments is None
                    else json.dumps(call.arguments, ensure_ascii=False, separators=(", ", ": ")),
                },
            }
            for call in calls
        ]
    return message
