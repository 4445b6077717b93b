"""Implements `rollyard tasks import`: converts existing data to a file of tasks.

Invariants: a service that has the environment accepts every written task (schema, and the environment's `check`); the
file is written atomically; without `skip_bad`, one bad row means that nothing is written.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rollyard.cli._console import CommandError, note
from rollyard.core import Json
from rollyard.core.files import replacing

if TYPE_CHECKING:
    from rollyard.envs.base import Environment

MAX_PRINTED = 20  # maximum of bad rows, and of notes, that are printed
MAX_PRINTED_ALIKE = 3  # maximum with the same error or text

Place = str
Body = Mapping[str, Json]


@dataclass(slots=True)
class ImportResult:
    """Counts of imported tasks, bad rows and notes; prints the latter two."""

    tasks: int = 0
    bad: int = 0
    notes: int = 0
    printed_errors: Counter[str] = field(default_factory=Counter[str])
    printed_notes: Counter[str] = field(default_factory=Counter[str])

    def report_bad(self, place: str, what: str) -> None:
        self.bad += 1
        if self.printed_errors[what] < MAX_PRINTED_ALIKE and self.printed_errors.total() < MAX_PRINTED:
            self.printed_errors[what] += 1
            note(f"{place}: {what}")

    def report_notes(self, place: str, body: Body) -> None:
        """Prints the `data.notes` of an imported task."""
        data = body.get("data")
        notes = data.get("notes") if isinstance(data, Mapping) else None
        for text in map(str, notes if isinstance(notes, Sequence) and not isinstance(notes, str) else ()):
            self.notes += 1
            if self.printed_notes[text] < MAX_PRINTED_ALIKE and self.printed_notes.total() < MAX_PRINTED:
                self.printed_notes[text] += 1
                note(f"{place}: {text}")

    def report_omitted(self) -> None:
        """Prints how many notes were not printed."""
        if omitted := self.notes - self.printed_notes.total():
            note(f"… and {omitted} more notes, which are in data.notes of the tasks")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of the command line. `skip_bad` and `limit` apply to tasks, not to files."""

    environment: Environment
    paths: Sequence[Path]
    options: Mapping[str, str]
    split: str | None = None
    limit: int | None = None
    skip_bad: bool = False


def read_options(words: Iterable[str]) -> dict[str, str]:
    """Parses options of the form `NAME=VALUE`."""
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise CommandError(f"--set {word}: expected NAME=VALUE", status=2)
        if name in options:
            raise CommandError(f"--set {name} was given twice", status=2)
        options[name] = value
    return options


def import_tasks(request: ImportOptions, out: Path | None) -> ImportResult:
    """Writes the tasks to `out`, or to stdout if it is None."""
    result = ImportResult()
    if out is None or out.is_symlink() or (out.exists() and not out.is_file()):
        # A pipe, a device (/dev/stdout) or a link must not be replaced by another file, so it is written directly.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as draft:
            _write(request, draft, result)
            draft.seek(0)
            if out is None:
                shutil.copyfileobj(draft, sys.stdout)
                return result
            with _writing(out), out.open("w", encoding="utf-8") as there:
                shutil.copyfileobj(draft, there)
        return result
    with _writing(out), replacing(out) as file, TextIOWrapper(file, encoding="utf-8") as draft:
        _write(request, draft, result)
    return result


@contextmanager
def _writing(out: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error


def _write(request: ImportOptions, draft: IO[str], result: ImportResult) -> None:
    with closing(_tasks(request, result)) as lines:
        for line in lines:
            draft.write(line + "\n")
            result.tasks += 1
            if result.tasks == request.limit:
                break
    result.report_omitted()
    if result.bad and not request.skip_bad:
        count = f"{result.bad} of {result.bad + result.tasks} rows"
        raise CommandError(f"{count} cannot be imported", "nothing was written; --skip-bad skips them")
    if not result.tasks:
        raise CommandError("there is no task to import", "nothing was written")


def _tasks(request: ImportOptions, result: ImportResult) -> Generator[str, None, None]:
    if not request.paths:
        if request.split is not None:
            raise CommandError(
                f"--split needs a dataset, and none was given for {request.environment.name}", "give its folder", 2
            )
        yield from _checked(request, result, _generated(request))
    for path in request.paths:
        if not path.exists():
            raise CommandError(f"{path} does not exist")
        is_folder = path.is_dir() and _is_for_from_folder(request.environment, path)
        yield from _checked(
            request, result, _from_folder(request, path) if is_folder else _from_rows(request, path, result)
        )


def _is_for_from_folder(environment: Environment, path: Path) -> bool:
    """A folder of rows goes to `from_row`, unless the environment only imports folders."""
    from rollyard.envs.rows import is_dataset

    return not is_dataset(path) or (
        _has_importer(environment, "from_folder") and not _has_importer(environment, "from_row")
    )


def _has_importer(environment: Environment, importer: str) -> bool:
    from rollyard.envs.base import Environment

    return getattr(type(environment), importer) is not getattr(Environment, importer)


TaskFactories = Generator[tuple[Place, Callable[[], Body]], None, None]
"""The place of each task and a function that creates it. An error in the function affects that task only."""


def _from_rows(request: ImportOptions, path: Path, result: ImportResult) -> TaskFactories:
    from functools import partial

    from rollyard.envs.rows import RowsUnreadable, read_rows

    environment = request.environment
    if not _has_importer(environment, "from_row"):
        remedy = "give a folder" if _has_importer(environment, "from_folder") else "write its tasks yourself"
        raise CommandError(f"{environment.name} has no importer for rows", remedy)
    try:
        for place, row in read_rows(path, split=request.split, on_bad=result.report_bad):
            yield place, partial(environment.from_row, row, request.options)
    except RowsUnreadable as error:
        raise CommandError(str(error)) from error


def _from_folder(request: ImportOptions, path: Path) -> TaskFactories:
    if request.split is not None:
        raise CommandError(f"{path} is not a dataset of rows", "omit --split", 2)
    try:
        for body in request.environment.from_folder(path, request.options):
            yield _place(path, body), lambda body=body: body
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _place(folder: Path, body: Body) -> Place:
    """The folder, with the task's name if its data has one: a folder may hold many tasks."""
    data = body.get("data")
    name = data.get("name") if isinstance(data, Mapping) else None
    return f"{folder}: {name}" if isinstance(name, str) and name != folder.name else str(folder)


def _generated(request: ImportOptions) -> TaskFactories:
    for number, body in enumerate(request.environment.generate(request.options), 1):
        yield f"{request.environment.name}:{number}", lambda body=body: body


def _guarded(environment: Environment, factories: TaskFactories) -> TaskFactories:
    """Yields the same. An exception of another package's importer ends the command, with its line."""
    from rollyard.core import RollyardError
    from rollyard.plugins import OWN, package_of, raised

    package = package_of(environment)
    try:
        yield from factories
    except (CommandError, RollyardError):
        raise
    except Exception as error:
        if package == OWN:
            raise
        raise CommandError(
            f"the importer of {environment.name} raised {raised(error, package)}", "fix it; nothing was written"
        ) from error


def _checked(request: ImportOptions, result: ImportResult, factories: TaskFactories) -> Generator[str, None, None]:
    """Yields the tasks that a service would accept, as JSON; reports the others."""
    from rollyard.core import RollyardError
    from rollyard.plugins import package_of, raised
    from rollyard.service.schemas.task import to_task

    package = package_of(request.environment)
    with closing(factories):
        for place, make in _guarded(request.environment, factories):
            try:
                body = {"environment": request.environment.name, **make()}
                request.environment.check(to_task(body, {}, ()))
                line = json.dumps(body, ensure_ascii=False, allow_nan=False)
                line.encode()  # fails on half a surrogate pair, which JSON can escape
            except RollyardError as error:
                result.report_bad(place, error.detail)
            except Exception as error:  # an importer's bug, such as None.strip(), affects its row only
                result.report_bad(place, raised(error, package))
            else:
                result.report_notes(place, body)
                yield line
