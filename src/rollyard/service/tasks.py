"""Converts a client's task, merged over its run's defaults, and runs the checks that need no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollyard.core import Json, RollyardError, Run, Task
from rollyard.pipeline import StageResources
from rollyard.service.schemas.body import field_path
from rollyard.service.schemas.task import merge, to_task


def defaults_of(resources: StageResources, run: Run) -> Mapping[str, Json]:
    """The run's defaults, over those that the operator's ceilings require."""
    lowered = resources.ceilings.defaults
    return merge(lowered, run.defaults) if lowered else run.defaults


def checked_task(
    resources: StageResources, raw: Mapping[str, Json], run: Run, path: Sequence[str | int] = ("task",)
) -> Task:
    """The task. The error for a task that can never run here contains its path."""
    task = to_task(raw, defaults_of(resources, run), path)
    try:
        resources.check(task, run)
    except RollyardError as error:
        error.data["path"] = field_path(path)  # identifies the task among a thousand
        raise
    return task
