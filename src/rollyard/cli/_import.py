"""From the data that people have to a file of tasks: what `rollyard tasks import` does.

Invariants: what is written would be taken by a service that has the environment (schema, and its `check`); a file
appears whole or not at all; without `skip_bad`, one bad row means that nothing is written.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rollyard.cli._console import CommandError, note
from rollyard.core import Json

if TYPE_CHECKING:
    from rollyard.envs.base import Environment

TOLD = 20  # bad rows that are told one by one, and notes
TOLD_ALIKE = 3  # of those with one mistake, or one text

Place = str
Body = Mapping[str, Json]


@dataclass(slots=True)
class ImportResult:
    """How it went."""

    tasks: int = 0
    bad: int = 0
    notes: int = 0
    told: Counter[str] = field(default_factory=Counter[str])
    noted: Counter[str] = field(default_factory=Counter[str])

    def tell_bad(self, place: str, what: str) -> None:
        self.bad += 1
        if self.told[what] < TOLD_ALIKE and self.told.total() < TOLD:
            self.told[what] += 1
            note(f"{place}: {what}")

    def tell_notes(self, place: str, body: Body) -> None:
        """What a person should know of a task that can be imported: its `data.notes`."""
        data = body.get("data")
        notes = data.get("notes") if isinstance(data, Mapping) else None
        for text in map(str, notes if isinstance(notes, Sequence) and not isinstance(notes, str) else ()):
            self.notes += 1
            if self.noted[text] < TOLD_ALIKE and self.noted.total() < TOLD:
                self.noted[text] += 1
                note(f"{place}: {text}")

    def tell_rest(self) -> None:
        """That there are more notes than were told."""
        if rest := self.notes - self.noted.total():
            note(f"… and {rest} more notes, which are in data.notes of the tasks")


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the command line says. `skip_bad` and `limit` are of tasks, not of files."""

    environment: Environment
    paths: Sequence[Path]
    options: Mapping[str, str]
    split: str | None = None
    limit: int | None = None
    skip_bad: bool = False


def read_options(given: Iterable[str]) -> dict[str, str]:
    """`NAME=VALUE` each."""
    options: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise CommandError(f"--set {word}: NAME=VALUE was expected", status=2)
        if name in options:
            raise CommandError(f"--set {name} was given twice", status=2)
        options[name] = value
    return options


def import_tasks(wanted: ImportOptions, out: Path | None) -> ImportResult:
    """Writes the tasks to `out`, else to stdout."""
    done = ImportResult()
    if out is None or out.is_symlink() or (out.exists() and not out.is_file()):
        # Another file must not take the place of a pipe, a device (/dev/stdout) or a link: they are written into.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as draft:
            _write(wanted, draft, done)
            draft.seek(0)
            if out is None:
                shutil.copyfileobj(draft, sys.stdout)
                return done
            with _writing(out), out.open("w", encoding="utf-8") as there:
                shutil.copyfileobj(draft, there)
        return done
    partial = out.with_name(f".{out.name}.part")
    try:
        with _writing(out), partial.open("w", encoding="utf-8") as draft:
            _write(wanted, draft, done)
        with _writing(out):
            partial.replace(out)
    finally:
        with suppress(OSError):
            partial.unlink()
    return done


@contextmanager
def _writing(out: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error


def _write(wanted: ImportOptions, draft: IO[str], done: ImportResult) -> None:
    with closing(_tasks(wanted, done)) as found:
        for line in found:
            draft.write(line + "\n")
            done.tasks += 1
            if done.tasks == wanted.limit:
                break
    done.tell_rest()
    if done.bad and not wanted.skip_bad:
        count = f"{done.bad} of {done.bad + done.tasks} rows"
        raise CommandError(f"{count} cannot be imported", "nothing was written; --skip-bad leaves them out")
    if not done.tasks:
        raise CommandError("there is no task to import", "nothing was written")


def _tasks(wanted: ImportOptions, done: ImportResult) -> Generator[str, None, None]:
    if not wanted.paths:
        if wanted.split is not None:
            raise CommandError(
                f"--split is of a dataset, and {wanted.environment.name} has none here", "name its folder", 2
            )
        yield from _checked(wanted, done, _generated(wanted))
    for path in wanted.paths:
        if not path.exists():
            raise CommandError(f"{path} is not there")
        is_folder = path.is_dir() and _is_for_from_folder(wanted.environment, path)
        yield from _checked(wanted, done, _from_folder(wanted, path) if is_folder else _from_rows(wanted, path, done))


def _is_for_from_folder(environment: Environment, path: Path) -> bool:
    """A folder of rows is for `from_row`, unless the environment only knows folders."""
    from rollyard.envs.rows import is_dataset

    return not is_dataset(path) or (_knows(environment, "from_folder") and not _knows(environment, "from_row"))


def _knows(environment: Environment, importer: str) -> bool:
    from rollyard.envs.base import Environment

    return getattr(type(environment), importer) is not getattr(Environment, importer)


Made = Generator[tuple[Place, Callable[[], Body]], None, None]
"""Where each comes from, and what makes it: a mistake there is of that one only."""


def _from_rows(wanted: ImportOptions, path: Path, done: ImportResult) -> Made:
    from functools import partial

    from rollyard.envs.rows import RowsUnreadable, read_rows

    environment = wanted.environment
    if not _knows(environment, "from_row"):
        remedy = "name a folder" if _knows(environment, "from_folder") else "write its tasks yourself"
        raise CommandError(f"{environment.name}: there is no importer for rows", remedy)
    try:
        for place, row in read_rows(path, split=wanted.split, on_bad=done.tell_bad):
            yield place, partial(environment.from_row, row, wanted.options)
    except RowsUnreadable as error:
        raise CommandError(str(error)) from error


def _from_folder(wanted: ImportOptions, path: Path) -> Made:
    if wanted.split is not None:
        raise CommandError(f"{path} is no dataset of rows", "leave --split away", 2)
    try:
        for body in wanted.environment.from_folder(path, wanted.options):
            yield _place(path, body), lambda body=body: body
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _place(folder: Path, body: Body) -> Place:
    """A folder may hold many tasks: with the task's own name, if its data has one."""
    data = body.get("data")
    name = data.get("name") if isinstance(data, Mapping) else None
    return f"{folder}: {name}" if isinstance(name, str) and name != folder.name else str(folder)


def _generated(wanted: ImportOptions) -> Made:
    for number, body in enumerate(wanted.environment.generate(wanted.options), 1):
        yield f"{wanted.environment.name}:{number}", lambda body=body: body


def _checked(wanted: ImportOptions, done: ImportResult, made: Made) -> Generator[str, None, None]:
    """Those that a service would take, as JSON; the others are told."""
    from rollyard.core import RollyardError
    from rollyard.service.models import to_task

    with closing(made):
        for place, make in made:
            try:
                body = {"environment": wanted.environment.name, **make()}
                wanted.environment.check(to_task(body, {}, ()))
                line = json.dumps(body, ensure_ascii=False, allow_nan=False)
                line.encode()  # half a surrogate pair, which JSON can escape, is no text
            except RollyardError as error:
                done.tell_bad(place, error.detail)
            except Exception as error:  # an importer's own slip, say None.strip(), is of its row, too
                done.tell_bad(place, f"{type(error).__name__}: {error}")
            else:
                done.tell_notes(place, body)
                yield line
