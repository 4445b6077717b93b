"""The fields of a task, from the models that read them: for `rollyard tasks fields` and docs/reference/task.md.

The models of `service/schemas/task.py` describe a task; an environment describes its data (`data_fields`), and an
agent its options (`option_fields`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollyard.core import DataField
from rollyard.core.task import REQUIRED
from rollyard.service.schemas import task

LARGE = 2**53
"""A larger bound is only that of the storage, and is not shown."""

_KINDS = {"integer": "whole number", "number": "number", "string": "string", "boolean": "boolean", "object": "object"}

Schema = Mapping[str, Any]


def task_fields() -> dict[str, list[DataField]]:
    """Returns the fields by section: the task itself (""), `agent`, `sampling`, `limits`, `sandbox`, `sandbox.egress`.
    Names are paths from the task."""
    sections: dict[str, list[DataField]] = {}
    _collect(task.TaskBody, task.TaskBody.model_json_schema()["$defs"], "", sections)
    return sections


def _collect(model: type[BaseModel], models: Schema, section: str, sections: dict[str, list[DataField]]) -> None:
    rows = sections[section] = []
    schema = models.get(model.__name__) or model.model_json_schema()
    for name, field in schema["properties"].items():
        path = f"{section}.{name}" if section else name
        rows.append(DataField(path, _kind(field), field.get("description", ""), _default(model.model_fields[name])))
        for inner in _refs(field):
            _collect(getattr(task, inner), models, path, sections)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    default = field.get_default(call_default_factory=True)
    return "{}" if isinstance(default, BaseModel) else json.dumps(default)


def _refs(field: Schema) -> list[str]:
    return [option["$ref"].rpartition("/")[2] for option in (field, *field.get("anyOf", ())) if "$ref" in option]


def _kind(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in reversed(field["anyOf"]))
    if _refs(field):
        return "object"
    if field.get("type") == "null":
        return "null"
    if "enum" in field:
        return ", ".join(field["enum"])
    if field.get("type") == "array":
        most = f", at most {field['maxItems']}" if "maxItems" in field else ""
        items = field["items"]
        return ("list of strings" if "enum" not in items else f"list of {', '.join(items['enum'])}") + most
    return _KINDS[field["type"]] + _bounds(field)


def _bounds(field: Schema) -> str:
    low, above, high = (field.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    parts: list[str] = []
    if high is not None and high < LARGE:
        begin = f"{low:g} to" if low is not None else f"above {above:g}, at most"
        parts.append(f"{begin} {high:,.10g}")
    elif low is not None:
        parts.append(f"at least {low:g}")
    if "maxLength" in field:
        least = f"{field['minLength']} to " if field.get("minLength") else "at most "
        parts.append(f"{least}{field['maxLength']} characters")
    return "".join(f", {part}" for part in parts)
