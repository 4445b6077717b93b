"""Reads files of trajectories for `rollyard view`: our records, ATIF, Inspect's samples, and plain conversations.

The format is found from the content of each document, so that a file may mix them. Files are not trusted: they are
bounded in size and number, and everything that does not have the expected shape is refused with its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollyard.exports.atif_reading import from_atif, is_atif
from rollyard.exports.html import CLOSING, GENERATOR, OPENING
from rollyard.exports.inspect_reading import from_chat, from_inspect, is_inspect_log
from rollyard.exports.records import complete
from rollyard.exports.replies import Recorded, Reply, absent, address, from_record, part_paths, recorded

MAX_BYTES = 256 << 20
MAX_LINE_BYTES = 64 << 20
MAX_ROLLOUTS = 10_000


class UnreadableFile(ValueError):
    """A file that cannot be shown: `what` is wrong, and a `remedy`, if there is one."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy


def read_rollouts(path: Path) -> Iterator[Recorded]:
    """Yields the rollouts of a file. Raises `UnreadableFile`, also after some of them."""
    try:
        if path.is_dir():
            raise UnreadableFile(f"{path} is a folder", "give one file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UnreadableFile(
                f"{path} has {size >> 20} MiB; the most is {MAX_BYTES >> 20} MiB", "split it: split -l 1000 FILE"
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # also for what has no size, such as a pipe
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UnreadableFile(f"{path} has more than {MAX_BYTES >> 20} MiB")
    if data.startswith(b"PK\x03\x04"):
        raise UnreadableFile(f"{path} is an archive", "Inspect's .eval: inspect log dump FILE > log.json")
    text = data.decode("utf-8-sig", "replace")
    del data
    is_page = text.lstrip()[:9].lower() == "<!doctype"
    count = 0
    seen: set[tuple[str, str]] = set()
    for one in _from_page(path, text) if is_page else _from_documents(path, text):
        count += 1
        if count > MAX_ROLLOUTS:
            raise UnreadableFile(f"{path} has more than {MAX_ROLLOUTS:,} rollouts", "split it: split -l 1000 FILE")
        yield _renamed(one, seen)
    if not count:
        raise UnreadableFile(f"{path} has no rollouts")


def _renamed(one: Recorded, seen: set[tuple[str, str]]) -> Recorded:
    """The rollout; under another id if an earlier one has the same."""
    run, id = one.record["run"], one.record["id"]
    number, name = 1, id
    while (run, name) in seen:
        number += 1
        name = f"{id}-{number}"
    seen.add((run, name))
    if name == id:
        return one
    parts = {part: one.replies.get(_key(path, run), absent(part)) for part, path in part_paths(one.record).items()}
    return recorded({**one.record, "id": name}, parts)


def _key(path: str, run: str) -> str:
    return address(f"/v1{path}", {"run": run})


def _from_documents(path: Path, text: str) -> Iterator[Recorded]:
    for where, value in _documents(path, text):
        try:
            for record in _records(value):
                yield from_record(complete(record))
        except RecursionError:
            raise UnreadableFile(f"{path}, {where}: too deeply nested") from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise UnreadableFile(f"{path}, {where}: {error}", "see what `rollyard view --help` lists") from error


def _documents(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON or JSON Lines file, and the line of each."""
    start = len(text) - len(text.lstrip())
    first, _, rest = text[start:].partition("\n")
    if not rest.strip() or not _is_json(first):
        yield "line 1", _parse(path, text, 1)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parse(path, line, number)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(path: Path, text: str, line: int) -> Any:
    if len(text) > MAX_LINE_BYTES and "\n" not in text.strip():
        raise UnreadableFile(f"{path}, line {line}: longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise UnreadableFile(f"{path}, line {at}, column {error.colno}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise UnreadableFile(f"{path}, line {line}: not JSON: {error}") from error
    except RecursionError:
        raise UnreadableFile(f"{path}, line {line}: too deeply nested") from None


def _records(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the records of a document."""
    if isinstance(value, list):
        if value and all(isinstance(item, dict) and "role" in item for item in value):
            yield from_chat({"messages": value})
            return
        for number, item in enumerate(value):
            try:
                yield from _records(item)
            except ValueError as error:
                raise ValueError(f"[{number}]: {error}") from error
        return
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    if is_atif(value):
        yield from from_atif(value)
    elif isinstance(value.get("rollouts"), list):
        yield from _records(value["rollouts"])
    elif is_inspect_log(value):
        yield from from_inspect(value)
    elif "trajectory" in value or ("id" in value and "state" in value and "task" in value):
        yield value
    elif isinstance(value.get("messages"), list):
        yield from_chat(value)
    else:
        fields = ", ".join(sorted(map(str, value))[:8]) or "no fields"
        raise ValueError(f"neither a rollout nor an ATIF trajectory nor a conversation (it has: {fields[:200]})")


def _from_page(path: Path, text: str) -> Iterator[Recorded]:
    """Yields the rollouts of a page that `rollyard.exports.html` wrote. Its script is not used."""
    found = re.search(rf'<meta name="generator" content="{GENERATOR} ', text[:10_000])
    start = text.find(OPENING)
    if found is None or start < 0:
        raise UnreadableFile(f"{path} is a web page that Rollyard did not write", "give a file written by --html")
    start += len(OPENING)
    replies = _parse(path, text[start : text.find(CLOSING, start)], text.count("\n", 0, start) + 1)
    known = dict(_pairs(path, replies))
    for key, reply in known.items():
        if "include=trajectory" not in key:
            continue
        try:
            record = complete(reply.body)
        except (ValueError, TypeError) as error:
            raise UnreadableFile(f"{path}, {key[:200]}: {error}") from error
        keys = {part: _key(its_path, record["run"]) for part, its_path in part_paths(record).items()}
        yield recorded(record, {part: known[its_key] for part, its_key in keys.items() if its_key in known})


def _pairs(path: Path, replies: Any) -> Iterator[tuple[str, Reply]]:
    if not isinstance(replies, dict):
        raise UnreadableFile(f"{path}: its data is not what Rollyard writes")
    for key, pair in replies.items():
        match pair:
            case [int(status), (dict() as body)]:
                yield key, Reply(status, body)
            case _:
                raise UnreadableFile(f"{path}, {key[:200]}: its data is not what Rollyard writes")
