"""Reads a task's data field by field. The error for a wrong field names the field and what was expected.

fields = Fields(task)
question = fields.text("question")
fields.done()                        # refuses fields that were not read
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollyard.core import Json, Task
from rollyard.core.failure import TaskInvalid


class Fields:
    """Typed access to a task's data. `where` is the path, in error messages, of an object inside the data."""

    def __init__(self, task: Task, data: Mapping[str, Json] | None = None, where: str = "data") -> None:
        self._task = task
        self._data = task.data if data is None else data
        self._where = where
        self._asked: set[str] = set()

    def wrong(self, name: str, expected: str) -> TaskInvalid:
        field = f"{self._where}.{name}" if name else self._where
        return TaskInvalid(f"{self._task.environment}: {field}: {expected} was expected", field=field)

    def get(self, name: str) -> Json:
        self._asked.add(name)
        return self._data.get(name)

    def text(self, name: str) -> str:
        """A string that is not blank."""
        value = self.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(name, "a string")
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; a missing field is an empty list."""
        texts = self.items(name)
        if not all(isinstance(text, str) for text in texts):
            raise self.wrong(name, "a list of strings")
        return tuple(str(text) for text in texts)

    def items(self, name: str) -> Sequence[Json]:
        value = self.get(name)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(name, "a list")
        return value

    def text_map(self, name: str) -> dict[str, str]:
        """An object whose values are strings."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object of strings")
        for key, text in value.items():
            if not isinstance(text, str):
                raise self.wrong(f"{name}[{key!r}]", "a string")
        return {key: str(text) for key, text in value.items()}

    def positive(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a number above 0")
        return float(value)

    def done(self) -> None:
        """Raises TaskInvalid if a field was not read."""
        unknown = sorted(set(self._data) - self._asked)
        if unknown:
            known = ", ".join(sorted(self._asked))
            raise TaskInvalid(
                f"{self._task.environment}: {self._where}.{unknown[0]}: unknown field; there are {known}",
                field=f"{self._where}.{unknown[0]}",
            )
