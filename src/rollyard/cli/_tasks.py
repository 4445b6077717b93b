"""Reads tasks from JSON lines, and reports every error by file and line before anything is sent.

A line is one task as the service accepts it ({"environment": …, "data": …, …}); empty lines and lines that begin with
`//` are skipped. Checks that need the service (is that environment installed?) are left to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rollyard.cli._console import CommandError, note
from rollyard.core import Json, Task

MOST_MISTAKES = 20  # are listed; the others are counted

FIELDS = "`rollyard tasks fields` lists the fields of a task (docs/reference/task.md)."
NOTHING = "nothing was submitted. "


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task, and its place in a file."""

    task: Mapping[str, Json]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def read_tasks(files: Iterable[str], limit: int | None = None) -> list[TaskLine]:
    """Returns the tasks of the files in order ("-" is stdin), at most `limit`. Lists all errors and raises."""
    scanned = list(islice(scan_tasks(files), limit))
    mistakes = [item for item in scanned if isinstance(item, CommandError)]
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise listed([mistake.what for mistake in mistakes], len(mistakes), len(scanned), remedy=FIELDS)
    return [item for item in scanned if isinstance(item, TaskLine)]


def listed(mistakes: Sequence[str], bad: int, total: int, *, remedy: str, unlisted: int = 0) -> CommandError:
    """Prints mistakes, one line each, and returns the error that ends the command; a single mistake is that error.
    `bad` of `total` tasks have mistakes, `unlisted` of them not among these."""
    if bad == len(mistakes) == 1:
        return CommandError(mistakes[0], NOTHING + remedy)
    for mistake in mistakes[:MOST_MISTAKES]:
        note(mistake)
    if (more := len(mistakes[MOST_MISTAKES:]) + unlisted) > 0:
        note(f"… and {more} more")
    return CommandError(f"{bad} of {total} tasks cannot be used", NOTHING + remedy)


def scan_tasks(files: Iterable[str]) -> Iterator[TaskLine | CommandError]:
    """Yields the tasks of the files, with each error in its place among them."""
    for file in files:
        yield from _scan_file(file)


def read_task(place: str) -> TaskLine:
    """Reads one task from `FILE`, which must hold no other, or from `FILE:LINE`."""
    file, colon, line = place.rpartition(":")
    if colon and line.isdigit() and not Path(place).exists():
        for task_line in map(_good, _scan_file(file)):
            if task_line.line == int(line):
                return task_line
        raise CommandError(f"{place}: there is no task on that line")
    tasks = read_tasks([place], limit=2)
    if not tasks:
        raise CommandError(f"{place}: there is no task in it")
    if len(tasks) > 1:
        raise CommandError(f"{place} holds more than one task", f"give its line, e.g. {place}:{tasks[1].line}")
    return tasks[0]


def _good(scanned: TaskLine | CommandError) -> TaskLine:
    if isinstance(scanned, CommandError):
        raise scanned
    return scanned


def _scan_file(file: str) -> Iterator[TaskLine | CommandError]:
    name = "stdin" if file == "-" else file
    try:
        text = (
            sys.stdin.read() if file == "-" else Path(file).read_text("utf-8-sig")
        )  # some editors write a byte order mark
    except OSError as error:
        yield CommandError(f"{file} cannot be read: {error.strerror}", "give a file of JSON lines, or - for stdin")
        return
    except UnicodeDecodeError:
        yield CommandError(f"{name} is not UTF-8 text")
        return
    try:
        whole = _whole(text)
    except json.JSONDecodeError as error:
        yield CommandError(f"{name}:{error.lineno}: this is not JSON ({_reason(error)})", "write one task per line")
        return
    if isinstance(whole, list):
        yield CommandError(f"{name}:1: this is a list", f"write one task per line: jq -c '.[]' {name} > tasks.jsonl")
        return
    if whole is not None:
        yield _checked(whole, name, 1)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("//"):
            continue
        try:
            task = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            yield CommandError(f"{name}:{number}: this is not JSON ({_reason(error)})", "write one task per line")
            continue
        yield _checked(task, name, number)


def _reason(error: ValueError | RecursionError) -> str:
    """Returns what is wrong with a line, and where."""
    return f"{error.msg}, at character {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _whole(text: str) -> object:
    """Parses a file with one JSON value over several lines, or a list in one line; None if each line is a value. Raises
    JSONDecodeError if its first line can only be the beginning of such a value."""
    if not text.lstrip().startswith(("{", "[")) or ("\n" not in text.strip() and text.lstrip()[0] == "{"):
        return None
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError:
        if text.split(maxsplit=1)[0] in ("{", "[") and text.lstrip()[1:].lstrip(" \t\r").startswith("\n"):
            raise
        return None
    except (ValueError, RecursionError):
        return None


def read_defaults(text: str | None) -> dict[str, Json] | None:
    """Parses `--defaults`: a partial task as JSON."""
    if text is None:
        return None
    try:
        defaults = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--defaults is not JSON ({error})", "give a JSON object in quotes", 2) from error
    if not isinstance(defaults, dict):
        raise CommandError("--defaults: expected a JSON object", "give a JSON object in quotes", 2)
    return defaults


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _checked(task: object, file: str, line: int) -> TaskLine | CommandError:
    problems = _problems(task)
    if problems:
        return CommandError(f"{file}:{line}: {'; '.join(problems)}", NOTHING + FIELDS)
    assert isinstance(task, dict)
    return TaskLine(task, file, line)


def _problems(task: object) -> list[str]:
    """Returns what is wrong with a task, as far as can be checked without the service."""
    if not isinstance(task, dict):
        return [f"a task is a JSON object, not {type(task).__name__}"]
    if problems := list(_wrong_fields(task, Task, "")):
        return problems
    import msgspec

    try:  # a run's defaults may give the environment: only given fields are checked
        msgspec.convert({"environment": "", **task}, Task, strict=True)
    except msgspec.ValidationError as error:
        return [_plain(error)]
    return []


def _wrong_fields(value: Mapping[str, Any], kind: type, path: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    for key, inner in value.items():
        if key not in names:
            near = get_close_matches(key, names, 1)
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            yield f"there is no field {path}{key} in a task{hint}"
            continue
        below = next((part for part in (hints[key], *get_args(hints[key])) if is_dataclass(part)), None)
        if isinstance(below, type) and isinstance(inner, dict):
            yield from _wrong_fields(inner, below, f"{path}{key}.")
        elif problem := _wrong_type(inner, hints[key]):
            yield f"{path}{key}{problem}"


def _wrong_type(value: object, hint: Any) -> str:
    """Returns ": expected int, got str" for a value of another type, after the place in it that is wrong."""
    import msgspec

    try:
        msgspec.convert(value, hint, strict=True)
    except msgspec.ValidationError as error:
        problem, _, place = _plain(error).partition(" - at $")
        return f"{place}: {problem[:1].lower()}{problem[1:]}"
    return ""


def _plain(error: Exception) -> str:
    return str(error).replace("`", "")
