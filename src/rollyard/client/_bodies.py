"""Helpers for the bodies and paths of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

import msgspec

from rollyard.core import Json, Task, check_id

TaskLike = Task | Mapping[str, Json]

MOST_ITEMS = 500
"""Rollouts or tasks of one call. With a run's largest defaults, the service takes no more."""

MOST_BYTES = 16 << 20
"""Of the items of one call; a larger item has a call of its own."""

MOST_MARKS = 500_000
"""Characters that separate or open JSON values. The service reads a million values in one call."""


def without_none(**values: object) -> dict[str, object]:
    """The values that are not None; the service has defaults for the others."""
    return {key: value for key, value in values.items() if value is not None}


def part(id: str) -> str:
    """An id, quoted as a segment of a path."""
    return quote(check_id(id), safe=":")


def encoded(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def in_calls(items: Sequence[msgspec.Raw]) -> Iterator[tuple[int, Sequence[msgspec.Raw]]]:
    """Splits items into calls that the service accepts: the number of the first item, and the items."""
    first, size, marks = 0, 0, 0
    for number, item in enumerate(items):
        data = bytes(item)
        item_marks = sum(map(data.count, (b",", b"[", b"{")))
        is_full = number - first == MOST_ITEMS or size + len(data) > MOST_BYTES or marks + item_marks > MOST_MARKS
        if number > first and is_full:
            yield first, items[first:number]
            first, size, marks = number, 0, 0
        size, marks = size + len(data), marks + item_marks
    if items:
        yield first, items[first:]


def task_body(task: TaskLike) -> Mapping[str, object]:
    return dataclasses.asdict(task) if isinstance(task, Task) else task


def source_body(tasks: Sequence[TaskLike] | None, source: Mapping[str, Json] | None) -> Mapping[str, object]:
    """The source of tasks: the tasks themselves, or a source that the service reads."""
    if (tasks is None) == (source is None):
        raise ValueError("give either tasks or a source")
    return source if tasks is None else {"tasks": [task_body(task) for task in tasks]}  # type: ignore[return-value]
