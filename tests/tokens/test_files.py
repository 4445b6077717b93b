"""Tokenizer files that come from elsewhere: only those of a tokenizer, with their digests, complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens.files import (
    MAX_FILE_BYTES,
    InvalidFiles,
    TokenizerFile,
    TokenizerList,
    delete_drafts,
    list_files,
    receive,
)


async def read(file: TokenizerFile) -> bytes:
    return (tokenizer_dir() / file.name).read_bytes()


async def test_files_are_received_once(tmp_path: Path):
    reads = list[str]()

    async def counted(file: TokenizerFile) -> bytes:
        reads.append(file.name)
        return await read(file)

    listed = list_files(tokenizer_dir())
    folder = await receive(listed, counted, tmp_path)
    assert folder == await receive(listed, counted, tmp_path) and len(reads) == len(listed.files)
    assert list_files(folder).files == listed.files
    (folder / "tokenizer.json").write_text("{}")
    await receive(listed, counted, tmp_path)
    assert len(reads) == 2 * len(listed.files), "a damaged folder is received again"
    assert list_files(folder).files == listed.files


FIRST = list_files(tokenizer_dir()).files[0]


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([TokenizerFile("../../etc/passwd", FIRST.sha256, 1)], "is not part of a tokenizer"),
        ([TokenizerFile("model.safetensors", FIRST.sha256, 1)], "is not part of a tokenizer"),
        ([TokenizerFile(FIRST.name, FIRST.sha256, MAX_FILE_BYTES + 1)], "is not part of a tokenizer"),
        ([TokenizerFile(FIRST.name, FIRST.sha256, -1)], "is not part of a tokenizer"),
        ([FIRST, TokenizerFile(FIRST.name, "other", 1)], "a file is listed twice"),
        ([TokenizerFile(FIRST.name, "0" * 64, FIRST.size_bytes)], "another digest than the listed one"),
    ],
)
async def test_anything_else_is_refused_and_leaves_nothing(tmp_path: Path, files: list[TokenizerFile], error: str):
    with pytest.raises(InvalidFiles, match=error):
        await receive(TokenizerList("x", files), read, tmp_path / "cache")
    assert not [*(tmp_path / "cache").glob("*")]


def test_drafts_of_a_killed_process_are_deleted(tmp_path: Path):
    (tmp_path / ".part-1").mkdir()
    (tmp_path / "complete").mkdir()
    delete_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["complete"]
