"""Helpers for the bodies and paths of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from rollyard.core import Json, Task, check_id

TaskLike = Task | Mapping[str, Json]


def without_none(**values: object) -> dict[str, object]:
    """The values that are not None; the service has defaults for the others."""
    return {key: value for key, value in values.items() if value is not None}


def part(id: str) -> str:
    """An id, quoted as a segment of a path."""
    return quote(check_id(id), safe=":")


def task_body(task: TaskLike) -> Mapping[str, object]:
    return dataclasses.asdict(task) if isinstance(task, Task) else task


def source_body(tasks: Sequence[TaskLike] | None, source: Mapping[str, Json] | None) -> Mapping[str, object]:
    """The source of tasks: the tasks themselves, or a source that the service reads."""
    if (tasks is None) == (source is None):
        raise ValueError("give either tasks or a source")
    return source if tasks is None else {"tasks": [task_body(task) for task in tasks]}  # type: ignore[return-value]
