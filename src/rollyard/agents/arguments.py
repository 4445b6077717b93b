"""Checks a tool call's arguments against the tool's JSON schema, and describes errors for the model.

Supports the parts of JSON schema that tools use: type, required, properties, additionalProperties, enum, items.
A tool checks anything else itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.core import Json

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (Mapping,),
    "array": (list, tuple),
    "null": (type(None),),
}


def wrong_arguments(schema: Mapping[str, Json], arguments: Mapping[str, Json]) -> str:
    """Returns the error, or an empty string."""
    return _wrong(schema, arguments, "")


def _wrong(schema: Json, value: Json, path: str) -> str:
    if not isinstance(schema, Mapping):
        return ""
    where = f'argument "{path}"' if path else "the arguments"
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, Sequence) else []
    if names and not any(_is_a(value, name) for name in names):
        return f"{where} must be of type {' or '.join(map(str, names))}, not {_name_of(value)}"
    choices = schema.get("enum")
    if isinstance(choices, Sequence) and not any(value == choice for choice in choices):
        return f"{where} must be one of {', '.join(map(repr, choices))}"
    if isinstance(value, Mapping):
        return _wrong_object(schema, value, path)
    items = schema.get("items")
    if isinstance(value, (list, tuple)) and isinstance(items, Mapping):
        for index, item in enumerate(value):
            if wrong := _wrong(items, item, f"{path}[{index}]"):
                return wrong
    return ""


def _wrong_object(schema: Mapping[str, Json], value: Mapping[str, Json], path: str) -> str:
    prefix = f"{path}." if path else ""
    required = schema.get("required")
    for name in required if isinstance(required, Sequence) else ():
        if name not in value:
            return f'the required argument "{prefix}{name}" is missing'
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    for name, item in value.items():
        if name in known:
            if wrong := _wrong(known[name], item, f"{prefix}{name}"):
                return wrong
        elif schema.get("additionalProperties") is False:
            names = ", ".join(known) or "none"
            return f'there is no argument "{prefix}{name}"; there are: {names}'
    return ""


def _is_a(value: Json, name: Json) -> bool:
    kinds = _TYPES.get(str(name))
    if kinds is None:
        return True
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, kinds) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _name_of(value: Json) -> str:
    if isinstance(value, bool):
        return "boolean"
    for name, kinds in _TYPES.items():
        if isinstance(value, kinds):
            return name
    return type(value).__name__
