"""Reads real files of every supported format, and reports what is wrong with broken ones."""

import gzip
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.envs.rows import BATCH_ROWS, RowsUnreadable, is_dataset, plain, read_rows

ROWS = [{"question": "2+2?", "answer": 4}, {"question": "Größe?", "answer": 2**70}]


def read(path: Path, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """The rows, with places relative to the test's folder."""
    return [(place.rpartition("/")[2], row) for place, row in read_rows(path, **options)]


def lines(path: Path, *rows: object) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def parquet(path: Path, columns: Mapping[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path)
    return path


def saved(folder: Path, *shards: Mapping[str, object], split: str | None = None, **state: object) -> Path:
    """Writes a folder like `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, columns in zip(names, shards, strict=True):
        table = pa.table(dict(columns))
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": split, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_json_lines_have_their_line_numbers(tmp_path: Path):
    path = lines(tmp_path / "rows.jsonl", ROWS[0], "", ROWS[1])
    assert read(path) == [("rows.jsonl:1", ROWS[0]), ("rows.jsonl:3", ROWS[1])]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark, which some editors write
    assert [row for _, row in read(path)] == ROWS


def test_compressed_lines_are_decompressed(tmp_path: Path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(lines(tmp_path / "x.jsonl", *ROWS).read_bytes()))
    assert read(path) == [("rows.jsonl.gz:1", ROWS[0]), ("rows.jsonl.gz:2", ROWS[1])]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RowsUnreadable, match=r"rows\.jsonl\.gz cannot be read: Compressed file ended"):
        read(path)
    path.write_bytes(gzip.compress(b"{}")[:10] + b"\x07" * 20)
    with pytest.raises(RowsUnreadable, match=r"rows\.jsonl\.gz cannot be read: .*invalid block type"):
        read(path)


def test_a_json_file_is_a_list_or_json_lines(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2))
    assert read(path) == [("rows.json:1", ROWS[0]), ("rows.json:2", ROWS[1])]
    assert read(lines(path, *ROWS)) == [("rows.json:1", ROWS[0]), ("rows.json:2", ROWS[1])]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [row for _, row in read(path)] == ROWS


def test_parquet_is_read_batch_by_batch(tmp_path: Path):
    count = BATCH_ROWS + 3
    path = parquet(tmp_path / "t.parquet", {"n": list(range(count)), "tests": [[{"in": "1"}, {"in": None}]] * count})
    rows = read(path)
    assert rows[0] == ("t.parquet:1", {"n": 0, "tests": [{"in": "1"}, {"in": None}]})
    assert rows[-1][0] == f"t.parquet:{count}" and [row["n"] for _, row in rows] == list(range(count))


def test_a_saved_dataset_is_read_shard_by_shard(tmp_path: Path):
    folder = saved(tmp_path / "d", {"q": ["a", "b"]}, {"q": ["c"]}, split="train")
    names = ["data-00000-of-00002.arrow:1", "data-00000-of-00002.arrow:2", "data-00001-of-00002.arrow:1"]
    assert read(folder) == [(name, {"q": text}) for name, text in zip(names, "abc", strict=True)]
    assert read(folder, split="train") == read(folder) and is_dataset(folder)
    with pytest.raises(RowsUnreadable, match=r"is one split \(train\), not test"):
        read(folder, split="test")
    with pytest.raises(RowsUnreadable, match="save it again"):
        read(saved(tmp_path / "old", {"q": ["a"]}, _indices_data_files=[{"filename": "i.arrow"}]))
    for files in ([{}], ["a.arrow"]):
        with pytest.raises(RowsUnreadable, match=r"state\.json is not what `datasets` writes"):
            read(saved(tmp_path / f"odd{len(files[0])}", {"q": ["a"]}, _data_files=files))
    (folder / "data-00001-of-00002.arrow").write_bytes(b"nothing")
    with pytest.raises(RowsUnreadable, match=r"data-00001-of-00002\.arrow cannot be read"):
        read(folder)


def test_a_saved_dict_of_splits_needs_the_choice_of_one(tmp_path: Path):
    for name in ("train", "test"):
        saved(tmp_path / name, {"q": [name]}, split=name)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert is_dataset(tmp_path) and [row for _, row in read(tmp_path, split="test")] == [{"q": "test"}]
    with pytest.raises(RowsUnreadable, match="has the splits train, test: choose one with --split"):
        read(tmp_path)
    with pytest.raises(RowsUnreadable, match="has no split 'dev'; there are: train, test"):
        read(tmp_path, split="dev")
    (tmp_path / "dataset_dict.json").write_text('{"splits": []}')
    with pytest.raises(RowsUnreadable, match="has no splits"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "split"),
    [
        (("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"), None),
        (("train-00000-of-00002-0a1b2c3d.parquet", "train-00001-of-00002-4e5f.parquet", "test.parquet"), "train"),
        (("train/0000.parquet", "train/0001.parquet", "test/0000.parquet"), "train"),
        (("main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"), None),
    ],
)
def test_shards_in_the_layout_of_the_hub_are_read(tmp_path: Path, files: tuple[str, ...], split: str | None):
    for number, name in enumerate(files):
        parquet(tmp_path / name, {"n": [number]})
    (tmp_path / "README.md").write_text("# A dataset")
    assert is_dataset(tmp_path)
    assert [row for _, row in read(tmp_path, split=split)] == [{"n": 0}, {"n": 1}]


def test_shards_may_be_json_lines_and_parquet_is_preferred(tmp_path: Path):
    lines(tmp_path / "data/train.jsonl", *ROWS)
    lines(tmp_path / "data/test.jsonl", ROWS[1])
    assert [row for _, row in read(tmp_path, split="test")] == [ROWS[1]]
    parquet(tmp_path / "data/dev.parquet", {"n": [1]})
    assert [row for _, row in read(tmp_path)] == [{"n": 1}]


def test_a_folder_with_several_datasets_is_refused(tmp_path: Path):
    for name in ("main", "socratic"):
        parquet(tmp_path / name / "train-00000-of-00001.parquet", {"name": [name]})
    with pytest.raises(RowsUnreadable, match=r"several datasets \(main, socratic\): name the folder of one"):
        read(tmp_path)
    assert [row for _, row in read(tmp_path / "main")] == [{"name": "main"}]


def test_another_folder_is_not_a_dataset(tmp_path: Path):
    lines(tmp_path / "environment/input.jsonl", ROWS[0])
    parquet(tmp_path / "environment/input.parquet", {"n": [1]})
    assert not is_dataset(tmp_path) and not is_dataset(tmp_path / "nowhere")
    with pytest.raises(RowsUnreadable, match="is not a dataset"):
        read(tmp_path)


def test_values_become_json(tmp_path: Path):
    moment = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    columns = {
        "text": pa.array(["x"]),
        "big": pa.array([2**63 - 1], pa.int64()),
        "exact": pa.array([Decimal(10) ** 30], pa.decimal128(38, 0)),
        "bytes": pa.array([b"text"], pa.binary()),
        "image": pa.array([b"\xff\xd8"], pa.binary()),
        "when": pa.array([moment], pa.timestamp("us", "UTC")),
        "finer": pa.array([1_700_000_000_000_000_123], pa.timestamp("ns")),
        "took": pa.array([timedelta(seconds=1.5)]),
        "nothing": pa.array([float("nan")]),
        "much": pa.array([float("inf")]),
        "pair": pa.array([{"a": [b"b", None]}]),
    }
    ((_, row),) = read(parquet(tmp_path / "v.parquet", columns))
    assert json.loads(json.dumps(row, allow_nan=False)) == {
        "text": "x",
        "big": 2**63 - 1,
        "exact": 10**30,
        "bytes": "text",
        "image": "/9g=",
        "when": "2024-05-06T07:08:09.123456+00:00",
        "finer": "2023-11-14T22:13:20",
        "took": 1.5,
        "nothing": None,
        "much": "inf",
        "pair": {"a": ["b", None]},
    }


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", None], dtype=object), ["a", None]),
        (Decimal("0.1"), 0.1),
        (Decimal("0.1000000000000000000000000001"), "0.1000000000000000000000000001"),
        (Decimal("NaN"), None),
        ((1, {2: {3}}), [1, {"2": [3]}]),
    ],
)
def test_values_of_python_and_numpy_become_json(value: object, json_value: object):
    converted = plain(value)
    assert converted == json_value and type(converted) is type(json_value)


def test_text_in_a_table_that_is_not_utf_8_is_reported(tmp_path: Path):
    path = parquet(tmp_path / "t.parquet", {"q": pa.array([b"\xff"], pa.binary()).view(pa.string())})
    with pytest.raises(RowsUnreadable, match=r"t\.parquet cannot be read after row 0: 'utf-8' codec"):
        read(path)


def test_a_value_without_a_json_form_is_an_error():
    with pytest.raises(TypeError, match="object has no JSON form"):
        plain(object())


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"x": 1}\n{"x": \n', "a.jsonl:2: this is not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: a row is an object, not a list"),
        ("a.jsonl", '{"x": ' * 800 + "1" + "}" * 800, "a.jsonl:1: its values are nested too deeply"),
        ("a.json", '[{"x": 1}, 3]', "a.json:2: a row is an object, not a number"),
        ("a.json", '{"x": 1}', "a.json contains an object, not a list of rows"),
        ("a.json", '[{"x": 1}', "a.json is not JSON"),
        ("a.parquet", "PAR1", "a.parquet cannot be read"),
        ("a.csv", "x\n1\n", "a.csv is not a file of rows"),
    ],
)
def test_an_unreadable_row_is_reported_with_its_place(tmp_path: Path, name: str, text: str, says: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(RowsUnreadable, match=says.replace("[", r"\[")):
        read(tmp_path / name)


def test_a_missing_file_and_a_split_of_a_file_are_refused(tmp_path: Path):
    with pytest.raises(RowsUnreadable, match=r"none\.jsonl cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(RowsUnreadable, match="is a file: only folders have splits"):
        read(lines(tmp_path / "a.jsonl", ROWS[0]), split="train")


def test_bad_rows_can_be_reported_and_skipped(tmp_path: Path):
    bad: list[tuple[str, str]] = []
    path = lines(tmp_path / "a.jsonl", ROWS[0], "{", "7", ROWS[1])
    rows = read(path, on_bad=lambda place, what: bad.append((place, what)))
    assert [row for _, row in rows] == ROWS
    assert [(place.rpartition(":")[2], what[:16]) for place, what in bad] == [
        ("2", "this is not JSON"),
        ("3", "a row is an obje"),
    ]
