"""Reads the parameters that all three dialects have in some form; `gateway/parameters.py` grants them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rollyard.core import Json
from rollyard.gateway.base import Problem, RequestParameter

MOST_STOPS, MOST_STOP_CHARS = 16, 256
"""Each is searched for in the whole reply; OpenAI's API accepts 4."""
MOST_TOP_LOGPROBS = 20
"""OpenAI's bound, and vLLM's default."""
SAME = ("temperature", "top_p", "top_k")


def same(body: Mapping[str, Json]) -> list[RequestParameter]:
    """Reads the parameters that a client may set only to the task's value."""
    return [RequestParameter("same", name, body[name]) for name in SAME if body.get(name) is not None]


def stop(value: Json, name: str) -> list[RequestParameter]:
    if value in (None, "", []):
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Problem("invalid", f"Invalid type for '{name}': expected a string or an array of strings.", param=name)
    stops = [text for text in texts if text]
    if len(stops) > MOST_STOPS or any(len(text) > MOST_STOP_CHARS for text in stops if isinstance(text, str)):
        message = f"Invalid '{name}': at most {MOST_STOPS} texts of {MOST_STOP_CHARS} characters are accepted."
        raise Problem("invalid", message, code="array_above_max_length", param=name)
    return [RequestParameter("stop", name, stops)] if stops else []


def seed(value: Json, name: str = "seed") -> list[RequestParameter]:
    if value is None:
        return []
    if not isinstance(value, int) or isinstance(value, bool):
        raise Problem("invalid", f"Invalid type for '{name}': expected an integer.", param=name)
    return [RequestParameter("seed", name, value)]


def top_logprobs(value: Json, name: str = "top_logprobs") -> list[RequestParameter]:
    if value in (None, 0):
        return []
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST_TOP_LOGPROBS:
        message = f"Invalid '{name}': expected an integer from 0 to {MOST_TOP_LOGPROBS}."
        raise Problem("invalid", message, code="integer_out_of_range", param=name)
    return [RequestParameter("top_logprobs", name, value)]


def calls(choice: Json, name: Json) -> list[RequestParameter] | None:
    """Reads a `tool_choice` that requires a call of any tool, or of a named one. Returns None for any other choice."""
    if choice in ("required", "any"):
        return [RequestParameter("calls", "tool_choice", "")]
    if choice in ("function", "tool") and isinstance(name, str) and name:
        return [RequestParameter("calls", "tool_choice", name)]
    return None


def json_format(value: Json, name: str, schema: Json) -> list[RequestParameter]:
    """Reads a `format` object of any dialect; `schema` is the schema from wherever the dialect has it."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "text"):
        return []
    if kind == "json_object":
        return [RequestParameter("format", name, {"type": kind})]
    if kind == "json_schema" and isinstance(schema, dict):
        return [RequestParameter("format", name, {"type": kind, "schema": schema})]
    return [RequestParameter("same", name, value)]  # not supported: never equal to the task's sampling


def unknown(body: Mapping[str, Json], known: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the fields that are set and not known."""
    return tuple(name for name, value in body.items() if name not in known and value is not None)
