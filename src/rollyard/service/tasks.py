"""A task as a client says it, over its run's defaults, checked as far as that needs no work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.core import Json, RollyardError, Run, Task
from rollyard.pipeline import StageResources
from rollyard.service.models import to_task
from rollyard.service.problems import field_path


def checked_task(
    resources: StageResources, raw: Mapping[str, Json], run: Run, path: Sequence[str | int] = ("task",)
) -> Task:
    """The error of one that can never run here carries its path."""
    task = to_task(raw, run.defaults, path)
    try:
        resources.check(task, run)
    except RollyardError as error:
        error.data["path"] = field_path(path)  # of a thousand tasks, which one
        raise
    return task
