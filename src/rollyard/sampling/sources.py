"""The sources of a draw's tasks, and their copy in the store.

A list, a file or the tasks that an environment generates are read once, when the draw is created, task by task, and
copied: so a restart, or a file that changes, cannot change the tasks of a draw. A file must be below the folders that
the operator allows. The environment's `from_row` converts rows of a dataset to tasks.

Errors are reported with their place (`FILE:LINE`) before anything is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rollyard.core import Json, RollyardError
from rollyard.core.draw import SourceKind, SourceSpec
from rollyard.core.failure import Forbidden, InvalidRequest
from rollyard.core.loop_yield import LoopYield
from rollyard.envs.base import Environment
from rollyard.envs.registry import Environments
from rollyard.envs.rows import RowsUnreadable, is_dataset, read_rows
from rollyard.store.base import Store

CHUNK = 500
"""Tasks that are read in one step of a thread, and stored in one write."""

MOST_TASKS = 2_000_000
"""Limit on the tasks of one source: an environment may generate without end."""

RawTask = Mapping[str, Json]


@asynccontextmanager
async def creating(store: Store, draw_id: str) -> AsyncGenerator[None, None]:
    """Deletes the tasks of a draw again if it cannot be created. If the service ends meanwhile, its next start does."""
    try:
        yield
    except Exception:
        await store.put_items(draw_id, 0, [])
        raise


async def copy_source(
    spec: SourceSpec,
    tasks: Sequence[RawTask],
    *,
    draw_id: str,
    store: Store,
    environments: Environments,
    folders: Sequence[Path],
    check: Callable[[RawTask], object],
) -> SourceSpec:
    """Stores every task and returns the spec with its size. `check` raises for a task that can never run here."""
    if spec.kind is SourceKind.PUSH:
        return spec
    raw_tasks = _places(spec, tasks, environments, folders)
    size, loop_yield = 0, LoopYield()
    while chunk := await asyncio.to_thread(_chunk, raw_tasks):
        for place, task in chunk:
            try:
                check(task)
            except RollyardError as error:
                error.detail = f"source, {place}: {error.detail}"
                raise
            await loop_yield.step()
        await store.put_items(draw_id, size, [task for _, task in chunk])
        size += len(chunk)
        if size > MOST_TASKS:
            raise InvalidRequest(f"source: it has more than {MOST_TASKS:,} tasks, which is the limit")
    if not size:
        raise InvalidRequest("source: it has no tasks")
    return replace(spec, size=size)


def _chunk(raw_tasks: Iterator[tuple[str, RawTask]]) -> list[tuple[str, RawTask]]:
    try:
        return list(islice(raw_tasks, CHUNK))
    except RowsUnreadable as error:
        raise InvalidRequest(f"source: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"source: {error.strerror or error}") from error


def _places(
    spec: SourceSpec, tasks: Sequence[RawTask], environments: Environments, folders: Sequence[Path]
) -> Iterator[tuple[str, RawTask]]:
    if spec.kind is SourceKind.TASKS:
        return iter([(f"task {number}", task) for number, task in enumerate(tasks)])
    environment = environments.get(spec.environment) if spec.environment else None
    if spec.kind is SourceKind.ENVIRONMENT:
        assert environment is not None
        return _generated(environment, spec.options)
    path = allowed(Path(spec.file), folders)
    if environment is not None and path.is_dir() and not is_dataset(path):
        return ((f"{path.name}/{n}", _task(environment, body)) for n, body in _folder(environment, path, spec.options))
    return _rows(path, spec, environment)


def allowed(path: Path, folders: Sequence[Path]) -> Path:
    """Returns the resolved path if it is below one of the folders."""
    real = path.resolve()
    if not any(real.is_relative_to(folder.resolve()) for folder in folders):
        names = ", ".join(map(str, folders)) or "none: the operator sets them with task_folders"
        raise Forbidden(f"source.file: {path} is not below an allowed folder ({names})")
    if not real.exists():
        raise InvalidRequest(f"source.file: there is no {path}")
    return real


def _rows(path: Path, spec: SourceSpec, environment: Environment | None) -> Iterator[tuple[str, RawTask]]:
    for place, row in read_rows(path, split=spec.split):
        if environment is None:
            yield place, row
            continue
        try:
            body = environment.from_row(row, spec.options)
        except RollyardError as error:
            error.detail = f"source, {place}: {error.detail}"
            raise
        yield place, _task(environment, body)


def _folder(
    environment: Environment, path: Path, options: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Json]]]:
    return enumerate(environment.from_folder(path, options))


def _task(environment: Environment, body: Mapping[str, Json]) -> RawTask:
    return {"environment": environment.name, **body}


def _generated(environment: Environment, options: Mapping[str, str]) -> Iterator[tuple[str, RawTask]]:
    for number, body in enumerate(environment.generate(options)):
        yield f"{environment.name} {number}", _task(environment, body)
