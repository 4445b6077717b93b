"""What all request bodies are made of: their base, the types of their fields, and errors that name a field's path.

Nothing here or in `task.py` imports the HTTP server: `rollyard tasks validate` needs only these two modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rollyard.core import Json
from rollyard.core.failure import InvalidRequest
from rollyard.core.score import MOST, MOST_REWARD

M = TypeVar("M", bound=BaseModel)

INT64 = 2**63 - 1
_DAY_S = 86_400.0

MOST_KEYS = 200
"""Of a body, and of an object of numbers in it. Each unknown field is an error of its own, which takes 5 µs."""

MOST_FIELDS = 20  # only the first invalid fields of a body are reported

MOST_DEPTH = 250
"""Deeper values could exceed the interpreter's recursion limit when they are encoded."""

_CONTAINERS = frozenset({dict, list, tuple})

Seconds = Annotated[float, Field(gt=0, le=30 * _DAY_S, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=INT64)]
Whole = Annotated[int, Field(ge=-INT64, le=INT64)]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]


def is_too_deep(value: object) -> bool:
    """Whether a JSON value is nested more than `MOST_DEPTH` deep. Level by level: 40 ns per value."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    for _ in range(MOST_DEPTH + 1):
        level = [
            item for one in level for item in (one.values() if type(one) is dict else one) if type(item) in _CONTAINERS
        ]
        if not level:
            return False
    return True


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise ValueError("this is nested too deeply")
    return value


# Values of a body are JSON already: pydantic's JsonValue would check and copy each of them, at 2 µs.
Object = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
RawTask = dict[str, Any]
"""A task before it is merged over its run's defaults: `to_task` checks it."""


def few_fields(value: object) -> object:
    if isinstance(value, dict) and len(value) > MOST_KEYS:  # type: ignore[arg-type]
        raise ValueError(f"an object of at most {MOST_KEYS} fields was expected")
    return value  # type: ignore[return-value]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: object) -> object:
        return few_fields(value)


Number = Annotated[float, Field(allow_inf_nan=False, ge=-MOST, le=MOST)]
Numbers = Annotated[dict[str, Number], BeforeValidator(few_fields)]
Reward = Annotated[float, Field(allow_inf_nan=False, ge=-MOST_REWARD, le=MOST_REWARD)]


def check_body(raw: object, model: type[M]) -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False)) from error


def invalid(errors: Iterable[Mapping[str, Any]], prefix: Sequence[str | int] = ()) -> InvalidRequest:
    """Converts pydantic's errors to `InvalidRequest`. `prefix`: the path of the validated value in the body."""
    fields: list[dict[str, Json]] = [
        {"path": field_path((*prefix, *item["loc"])), "problem": _sentence(item)} for item in errors
    ]
    first = fields[0] if fields else {"path": "", "problem": "not valid"}
    more = f" (and {len(fields) - 1} more)" if len(fields) > 1 else ""
    where = f"{first['path']}: " if first["path"] else ""
    return InvalidRequest(f"{where}{first['problem']}{more}", fields=fields[:MOST_FIELDS])


def field_path(parts: Iterable[str | int]) -> str:
    """("rollouts", 3, "task") → rollouts[3].task"""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _sentence(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case "extra_forbidden":
            return "unknown field"
        case "missing":
            return "this field is required"
        case "recursion_loop" | "recursion_depth_exceeded":
            return "this is nested too deeply"
        case _:
            message = str(item["msg"]).removeprefix("Value error, ")
            return message[:1].lower() + message[1:]
