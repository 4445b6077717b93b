"""Runs tasks through the three stages in a real sandbox, without a service and without an engine."""

import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli._local_resources import local_resources
from rollyard.core import Task
from rollyard.pipeline import StageResources
from rollyard.pipeline.local_rollout import PlayResult, play
from rollyard.service.schemas.task import to_task

RUNTIMES = ("bubblewrap", "apptainer")
"""The runtimes in which every environment's oracle and no-op are tested."""

NEEDS = {"bubblewrap": "bwrap", "apptainer": "apptainer"}


@asynccontextmanager
async def open_resources(runtime: str) -> AsyncGenerator[StageResources, None]:
    if shutil.which(NEEDS[runtime]) is None:
        pytest.skip(f"no {NEEDS[runtime]} here: `make test` installs it when root")
    with tempfile.TemporaryDirectory() as folder:  # a shorter path than tmp_path: it may contain sockets
        async with local_resources(Path(folder), runtime) as resources:
            yield resources


def to_play(body: Mapping[str, Any], runtime: str) -> Task:
    """The task of a body in a file of tasks, for this runtime."""
    return to_task({**body, "sandbox": {**body.get("sandbox", {}), "runtime": runtime}}, {})


async def played(resources: StageResources, body: Mapping[str, Any], agent: str) -> PlayResult:
    return await play(resources, to_play(body, resources.default_runtime), agent=agent)


async def rewards(resources: StageResources, body: Mapping[str, Any]) -> tuple[float, float]:
    """The rewards of the oracle and of the no-op. Asserts that both have one."""
    scores: list[float] = []
    for agent in ("oracle", "noop"):
        result = await played(resources, body, agent)
        assert result.score is not None, result.failure
        scores.append(result.score.reward)
    return scores[0], scores[1]
