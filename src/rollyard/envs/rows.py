"""Reads rows of datasets: JSON lines, JSON lists, Parquet, and folders of Hugging Face datasets.

Each row has a place, `FILE:NUMBER` (the line of JSON lines, else the row, counted from 1), and contains plain JSON
values only: bytes become text if they are UTF-8, else base64; times are ISO 8601; NaN, which tables use for missing
values, is null; integers keep all their digits. Files are read piece by piece, never whole, except for JSON lists.

A folder is a dataset if `datasets` saved it (`save_to_disk`), or if it has the layout of the hub: shards of Parquet or
JSON lines, in the folder itself, in `data`, or in one folder per split. Any other folder is not a dataset.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from rollyard.core import Json

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

Row = dict[str, Json]
OnBad = Callable[[str, str], object]
"""Called with the place of an unreadable row and what is wrong with it; reading continues with the next row."""

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
LISTS = (".json", ".json.gz")
PARQUET = ".parquet"
KNOWN = f"{', '.join((*LINES, *LISTS, PARQUET))}, or a folder of a Hugging Face dataset"

BATCH_ROWS = 256
"""Parquet rows in memory at once: a row may contain a megabyte of tests."""

_SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-\d{5}(-[0-9a-f]+)?")


class RowsUnreadable(Exception):
    """The file is not a dataset, or is broken, or has several splits and the caller chose none."""


def is_dataset(path: Path) -> bool:
    """Whether `read_rows` can read the folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file() or bool(_shards(path))


def read_rows(path: Path, *, split: str | None = None, on_bad: OnBad | None = None) -> Iterator[tuple[str, Row]]:
    """All rows with their places, in order. Without `on_bad`, an unreadable row raises RowsUnreadable."""
    if not path.is_dir():
        if split is not None:
            raise RowsUnreadable(f"{path} is a file: only folders have splits")
        return _read_file(path, on_bad)
    if (path / "dataset_dict.json").is_file():
        names = _json_file(path / "dataset_dict.json").get("splits")
        splits = {str(name): path / str(name) for name in names} if isinstance(names, list) else {}
        return _read_saved(_chosen(path, splits, split))
    if (path / "state.json").is_file():
        own = _json_file(path / "state.json").get("_split")
        if split is not None and split != own:
            raise RowsUnreadable(f"{path} is one split ({own or 'without a name'}), not {split}")
        return _read_saved(path)
    shards = _shards(path)
    if not shards:
        raise RowsUnreadable(f"{path} is not a dataset: expected {KNOWN}")
    files = _chosen(path, shards, split)
    folders = sorted({str(file.parent.relative_to(path)) for file in files})
    if len(folders) > 1:
        raise RowsUnreadable(f"{path} contains several datasets ({', '.join(folders)}): name the folder of one")
    return _read_files(files, on_bad)


# --- files --------------------------------------------------------------------------------------------


def _read_files(files: Iterable[Path], on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    for file in files:
        yield from _read_file(file, on_bad)


def _read_file(path: Path, on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    name = path.name.lower()
    try:
        if name.endswith(PARQUET):
            yield from _read_parquet(path)
        elif name.endswith(LINES):
            with _opened(path) as file:
                yield from _read_lines(path, file, on_bad)
        elif name.endswith(LISTS):
            yield from _read_list(path, on_bad)
        else:
            raise RowsUnreadable(f"{path} is not a file of rows: expected {KNOWN}")
    except (OSError, EOFError, zlib.error) as error:  # gzip: EOFError for a truncated file, zlib.error for a bad one
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RowsUnreadable(f"{path} cannot be read: {why}") from error


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.name.lower().endswith(".gz") else path.open("rb")


def _read_lines(path: Path, lines: Iterable[bytes], on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield from _one(f"{path}:{number}", text, on_bad)


def _one(place: str, line: bytes, on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # half a UTF-8 character is also a ValueError
        _bad(place, f"this is not JSON ({error})", on_bad)
        return
    yield from _row(place, value, on_bad)


def _read_list(path: Path, on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    """A list, or JSON lines: some files named .json contain those."""
    with _opened(path) as file:
        text = file.read().removeprefix(b"\xef\xbb\xbf")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        first, _, rest = text.lstrip().partition(b"\n")
        if not (first.startswith(b"{") and first.rstrip().endswith(b"}") and rest.strip()):
            raise RowsUnreadable(f"{path} is not JSON ({error})") from error
        yield from _read_lines(path, text.splitlines(), on_bad)
        return
    if not isinstance(whole, list):
        raise RowsUnreadable(f"{path} contains {_kind(whole)}, not a list of rows")
    for number, value in enumerate(whole, 1):
        yield from _row(f"{path}:{number}", value, on_bad)


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _read_batches(path, file.iter_batches(batch_size=BATCH_ROWS))
    except pa.ArrowException as error:
        raise RowsUnreadable(f"{path} cannot be read: {error}") from error


# --- folders ------------------------------------------------------------------------------------------


def _read_saved(folder: Path) -> Iterator[tuple[str, Row]]:
    """Reads what `Dataset.save_to_disk` wrote: Arrow streams, listed in `state.json`."""
    import pyarrow as pa

    state = _json_file(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise RowsUnreadable(f"{folder} is a selection of rows, saved by an old `datasets`: save it again")
    listed = state.get("_data_files")
    for item in listed if isinstance(listed, list) else []:
        if not isinstance(item, dict) or "filename" not in item:
            raise RowsUnreadable(f"{folder / 'state.json'} is not what `datasets` writes")
        path = folder / str(item["filename"])
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                yield from _read_batches(path, stream)
        except (pa.ArrowException, OSError) as error:
            raise RowsUnreadable(f"{path} cannot be read: {error}") from error


def _shards(folder: Path) -> dict[str, list[Path]]:
    """The files of each split. Parquet is preferred to JSON lines: some repositories contain both.

    In subfolders only files count that have a shard's name (`train-00000-of-00002`, `0000`): a task's own folder may
    contain any file.
    """
    for endings in ((PARQUET,), LINES):
        files_by_split: dict[str, list[Path]] = {}
        for file in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            ending = next((it for it in endings if file.name.lower().endswith(it)), None)
            if ending is None or not file.is_file():
                continue
            stem = file.name[: -len(ending)]
            shard = _SHARD.fullmatch(stem)
            is_numbered = stem.isdigit() and file.parent != folder
            if shard is None and not is_numbered and file.parent not in (folder, folder / "data"):
                continue
            name = shard["split"] if shard else file.parent.name if is_numbered else stem
            files_by_split.setdefault(name, []).append(file)
        if files_by_split:
            return files_by_split
    return {}


def _chosen(folder: Path, splits: Mapping[str, T], split: str | None) -> T:
    names = ", ".join(splits)
    if not splits:
        raise RowsUnreadable(f"{folder} has no splits")
    if split is None:
        if len(splits) != 1:
            raise RowsUnreadable(f"{folder} has the splits {names}: choose one with --split")
        return next(iter(splits.values()))
    if split not in splits:
        raise RowsUnreadable(f"{folder} has no split {split!r}; there are: {names}")
    return splits[split]


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RowsUnreadable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RowsUnreadable(f"{path} is not what `datasets` writes")
    return content


# --- values -------------------------------------------------------------------------------------------


def _read_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in batches:
        try:
            rows = _without_nanoseconds(batch).to_pylist()
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a time that Python cannot represent
            raise RowsUnreadable(f"{path} cannot be read after row {number}: {error}") from error
        for row in rows:
            number += 1
            yield f"{path}:{number}", cast("Row", plain(row))


def _without_nanoseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Python's times have microseconds; pyarrow needs pandas for nanoseconds."""
    import pyarrow as pa

    fields = [
        field.with_type(pa.timestamp("us", field.type.tz))
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns"
        else field
        for field in batch.schema
    ]
    if fields == list(batch.schema):
        return batch
    columns = [column.cast(field.type, safe=False) for column, field in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _row(place: str, value: object, on_bad: OnBad | None) -> Iterator[tuple[str, Row]]:
    if not isinstance(value, dict):
        _bad(place, f"a row is an object, not {_kind(value)}", on_bad)
        return
    try:
        row = cast("Row", plain(value))
    except RecursionError:
        _bad(place, "its values are nested too deeply", on_bad)
        return
    yield place, row


def _bad(place: str, what: str, on_bad: OnBad | None) -> None:
    if on_bad is None:
        raise RowsUnreadable(f"{place}: {what}")
    on_bad(place, what)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def plain(value: object) -> Json:
    """A table's value as JSON. Raises TypeError for a value that has no JSON form."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else str(value) if math.isinf(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return _text(bytes(value))
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return _number(value)
    as_python = getattr(value, "tolist", None)  # numpy's arrays and numbers
    if as_python is not None:
        return plain(as_python())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _number(value: Decimal) -> Json:
    """Exact: a JSON number if one equals the value, else the digits as a string."""
    if not value.is_finite():
        return None if value.is_nan() else str(float(value))
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
