"""Bounds on a parsed body: the numbers of messages, parts and tools, and the contents of each.

Some parts of a body are serialized to JSON again, to be compared or rendered: tools, the arguments of calls, formats. A
JSON library does that in one call that holds the interpreter, about 0.7 µs for each value and 15 ns for each escaped
character. Such parts are called structured here and have bounds of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from rollyard.core import Json
from rollyard.gateway.base import Problem
from rollyard.gateway.body_size import has_more_values

MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 4096, 4096, 1024
"""OpenAI's API accepts 2,048 messages and 128 tools."""
MOST_MODEL_CHARS = 256
"""It is echoed in every event of a stream."""
MOST_STRUCTURED_VALUES, MOST_STRUCTURED_CHARS = 16_384, 384 << 10
"""For one tool, or one call's arguments. The bound on characters, as they are written in JSON, also applies to all
tools and other parameters together."""

_CONVERSATION = ("messages", "input")
_TEXTS = frozenset((*_CONVERSATION, "system", "instructions"))


def check_counts(body: Mapping[str, Json]) -> None:
    """Raises Problem, which names the field and the bound."""
    for name in _CONVERSATION:
        items = body.get(name)
        if isinstance(items, list):
            _check_length(name, len(items), MOST_MESSAGES)
            parts = sum(map(_parts, items))
            if parts > MOST_PARTS:
                message = f"Invalid '{name}': they have {parts} parts in all, and {MOST_PARTS} is the maximum."
                raise Problem("invalid", message, code="array_above_max_length", param=name)
            for item in items:
                for value in _structured(item):
                    check_structured(name, value)
    tools = body.get("tools")
    if isinstance(tools, list):
        _check_length("tools", len(tools), MOST_TOOLS)
        for tool in tools:
            check_structured("tools", tool)
    model = body.get("model")
    if isinstance(model, str) and len(model) > MOST_MODEL_CHARS:
        message = f"Invalid 'model': a name has at most {MOST_MODEL_CHARS} characters, this one {len(model)}."
        raise Problem("invalid", message, code="string_above_max_length", param="model")
    _check_parameters(body)


def _check_parameters(body: Mapping[str, Json]) -> None:
    """Checks all parameters other than the conversation together."""
    chars = 0
    for name, value in body.items():
        if name not in _TEXTS:
            chars += _written(name) + weigh(value, _written)[0]
            if chars > MOST_STRUCTURED_CHARS:
                raise _too_many_chars(name[:MOST_MODEL_CHARS])


def check_structured(name: str, value: Json) -> None:
    """Checks a value that is serialized to JSON again, or a string that is parsed as JSON. Raises Problem."""
    if isinstance(value, str):
        if len(value) > MOST_STRUCTURED_CHARS:
            raise _too_many_chars(name)
        if len(value) < MOST_STRUCTURED_VALUES:  # each value needs a comma or a bracket
            return
        has_too_many = has_more_values(value.encode("utf-8", "surrogatepass"), MOST_STRUCTURED_VALUES)
    else:
        chars, values = weigh(value, _written)
        if chars > MOST_STRUCTURED_CHARS:
            raise _too_many_chars(name)
        has_too_many = values > MOST_STRUCTURED_VALUES
    if has_too_many:
        message = f"Invalid '{name}': one of them has more than {MOST_STRUCTURED_VALUES} JSON values."
        raise Problem("invalid", message, code="too_many_values", param=name)


def weigh(value: Json, size: Callable[[str], int] = len) -> tuple[int, int]:
    """Returns the size of all strings in a value, including keys, and the number of its values. Without recursion: JSON
    may be nested deeply."""
    chars, values, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        values += 1
        if isinstance(item, str):
            chars += size(item)
        elif isinstance(item, dict):
            chars += sum(map(size, item))
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
    return chars, values


def _written(text: str) -> int:
    """Returns the length of a string as JSON: a line break takes two characters, a control character six."""
    return len(text) if text.isprintable() else len(json.dumps(text, ensure_ascii=False))


def _too_many_chars(name: str) -> Problem:
    message = (
        f"Invalid '{name}': string too long. All texts in one of them have at most {MOST_STRUCTURED_CHARS} characters."
    )
    return Problem("invalid", message, code="string_above_max_length", param=name)


def _check_length(name: str, length: int, most: int) -> None:
    if length > most:
        message = (
            f"Invalid '{name}': array too long. Expected an array with maximum length {most}, "
            f"but got an array with length {length} instead."
        )
        raise Problem("invalid", message, code="array_above_max_length", param=name)


def _parts(item: Json) -> int:
    """Counts the parts of one message: its content, calls and other lists, and the lists of content in them."""
    if not isinstance(item, dict):
        return 0
    count = 0
    for value in item.values():
        if isinstance(value, list):
            count += len(value)
            for part in value:
                inner = part.get("content") if isinstance(part, dict) else None
                count += len(inner) if isinstance(inner, list) else 0
    return count


def _structured(item: Json) -> Iterator[Json]:
    """Yields the arguments in one message: those of chat's `tool_calls`, Anthropic's `tool_use`, and the Responses
    API's calls."""
    if not isinstance(item, dict):
        return
    yield from (item[name] for name in ("arguments", "input", "action") if name in item)
    for value in item.values():
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict):
                function = part.get("function")
                yield part.get("input")
                yield function.get("arguments") if isinstance(function, dict) else function
