"""The files of a tokenizer, with their digests: listed on one machine and received on another.

Invariants. Received files are stored only if they have the listed digests. A folder of received files is named by the
digest of all of them, and is complete or absent.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from rollyard.core.failure import RollyardError
from rollyard.tokens.tokenizer import TOKENIZER_FILES, find_folder

MAX_FILE_BYTES = 256 << 20
"""Limit on one file. The largest tokenizer.json in use has about 35 MB."""

_PART = ".part-"


class TokenizerFile(msgspec.Struct, frozen=True):
    """One file of a tokenizer."""

    name: str
    sha256: str
    size_bytes: int


class TokenizerList(msgspec.Struct, frozen=True):
    """The files of a tokenizer."""

    name: str  # as the sender calls it: a folder or a hub name
    files: list[TokenizerFile]

    @property
    def digest(self) -> str:
        lines = sorted(f"{file.name} {file.sha256}" for file in self.files)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class InvalidFiles(Exception):
    """The sender offers something that is not a tokenizer, or sent other bytes than it listed."""


def describe(path: Path) -> TokenizerFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return TokenizerFile(path.name, digest, path.stat().st_size)


def paths_in(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder, which may contain others."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def list_files(folder: Path, name: str = "") -> TokenizerList:
    return TokenizerList(name or str(folder), [describe(path) for path in paths_in(folder)])


def has_files(source: str, listed: TokenizerList) -> bool:
    """Whether the folder or hub name has exactly these files on this machine."""
    try:
        paths = paths_in(find_folder(source))
        return {path.name for path in paths} == {file.name for file in listed.files} and all(
            describe(path) in listed.files for path in paths
        )
    except (RollyardError, OSError):
        return False


async def receive(listed: TokenizerList, read: Callable[[TokenizerFile], Awaitable[bytes]], cache: Path) -> Path:
    """Returns the folder below `cache` with these files; reads them first if it does not exist. Raises InvalidFiles."""
    folder = cache / listed.digest
    if await asyncio.to_thread(has_files, str(folder), listed):
        return folder
    _check(listed)
    draft = await asyncio.to_thread(_new_draft, cache)
    try:
        for file in listed.files:
            data = await read(file)
            await asyncio.to_thread(_store, draft, file, data)
        await asyncio.to_thread(_put_in_place, draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def delete_drafts(cache: Path) -> None:
    """Deletes what an earlier process had not received completely."""
    for draft in cache.glob(f"{_PART}*"):
        shutil.rmtree(draft, ignore_errors=True)


def _check(listed: TokenizerList) -> None:
    for file in listed.files:
        if file.name not in TOKENIZER_FILES or not 0 <= file.size_bytes <= MAX_FILE_BYTES:
            raise InvalidFiles(f"{file.name[:100]!r} of {file.size_bytes} bytes is not part of a tokenizer")
    if len({file.name for file in listed.files}) < len(listed.files):
        raise InvalidFiles("a file is listed twice")


def _store(folder: Path, file: TokenizerFile, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise InvalidFiles(f"{file.name} arrived with another digest than the listed one")
    (folder / file.name).write_bytes(data)


def _new_draft(cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=_PART, dir=cache))


def _put_in_place(draft: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
