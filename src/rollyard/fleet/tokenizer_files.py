"""Sends tokenizer files from the head to nodes that lack them.

The head lists an engine's files with their digests (`TokenizerServer`); a node (`TokenizerFetcher`) compares them with
its own at the same path, and downloads what differs into its own folder, named by the digest of all of them.

Invariant. A node loads only files with the head's digests, so every node produces the same tokens. A folder appears in
a node's cache complete or not at all. If the head has no files, or is too old to list them, a node uses its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
from pathlib import Path

import msgspec

from rollyard.core.failure import NotFound, RollyardError
from rollyard.engines.base import Engine
from rollyard.fleet.head_connection import HeadConnection, HeadUnreachable, NodeRefused
from rollyard.pipeline.renderers import TokenizerFiles
from rollyard.tokens.tokenizer import TOKENIZER_FILES, find_folder

log = logging.getLogger("rollyard.fleet")

MOST_FILE_BYTES = 256 << 20
"""Limit on one file. The largest tokenizer.json in use has about 35 MB."""

_PART = ".part-"


class TokenizerFile(msgspec.Struct, frozen=True):
    name: str
    sha256: str
    size_bytes: int


class TokenizerList(msgspec.Struct, frozen=True):
    """The files of a tokenizer."""

    name: str  # as the head calls it: a folder or a hub name
    files: list[TokenizerFile]

    @property
    def digest(self) -> str:
        lines = sorted(f"{file.name} {file.sha256}" for file in self.files)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class TokenizerServer:
    """The head's side. Files are read again only when they have changed."""

    def __init__(self) -> None:
        self._cache: dict[Path, tuple[tuple[int, int], TokenizerFile]] = {}

    async def list(self, source: str) -> TokenizerList:
        """Returns the files of a tokenizer. Raises `NotFound` if they are not here."""
        return await asyncio.to_thread(self._list, source)

    async def read(self, source: str, sha256: str) -> bytes:
        """Returns one of those files, by its digest."""
        return await asyncio.to_thread(self._read, source, sha256)

    def _list(self, source: str) -> TokenizerList:
        folder = _folder(source)
        paths = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        return TokenizerList(source, [self._file(path) for path in paths])

    def _read(self, source: str, sha256: str) -> bytes:
        folder = _folder(source)
        for file in self._list(source).files:
            if file.sha256 == sha256:
                return (folder / file.name).read_bytes()
        raise NotFound(f"tokenizer {source!r} has no such file any more")

    def _file(self, path: Path) -> TokenizerFile:
        stat = path.stat()
        mark = (stat.st_mtime_ns, stat.st_size)
        entry = self._cache.get(path)
        if entry is None or entry[0] != mark:
            entry = self._cache[path] = (mark, _described(path))
        return entry[1]


class TokenizerFetcher:
    """The node's side: finds an engine's tokenizer, or downloads it from the head into `folder`."""

    def __init__(self, link: HeadConnection, folder: Path) -> None:
        self._link = link
        self._folder = folder

    async def __call__(self, engine: Engine) -> TokenizerFiles | None:
        try:
            listed = await self._link.get(f"tokenizers/{engine.spec.id}", TokenizerList)
        except (HeadUnreachable, NodeRefused, RollyardError) as error:
            log.info("the head offers no tokenizer", extra={"engine": engine.spec.id, "why": str(error)})
            return None
        own = engine.spec.tokenizer or engine.info.tokenizer
        if own and await asyncio.to_thread(_has, own, listed):
            return TokenizerFiles(own, own)
        folder = self._folder / listed.digest
        if not await asyncio.to_thread(_has, str(folder), listed):
            await self._fetch(engine.spec.id, listed, folder)
            log.info("tokenizer received from the head", extra={"engine": engine.spec.id, "digest": listed.digest})
        return TokenizerFiles(listed.name, str(folder))

    async def _fetch(self, engine_id: str, listed: TokenizerList, folder: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=_PART, dir=self._folder))
        try:
            for file in listed.files:
                if file.name not in TOKENIZER_FILES or file.size_bytes > MOST_FILE_BYTES:
                    raise HeadUnreachable(
                        f"the head offers {file.name!r} of {file.size_bytes} bytes as part of a tokenizer"
                    )
                data = await self._link.get_bytes(f"tokenizers/{engine_id}/{file.sha256}", file.size_bytes)
                if hashlib.sha256(data).hexdigest() != file.sha256:
                    raise HeadUnreachable(f"{file.name} arrived with another digest than the head's")
                await asyncio.to_thread((draft / file.name).write_bytes, data)
            await asyncio.to_thread(_put_in_place, draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def sweep(self) -> None:
        """Deletes what an earlier process had not received completely."""
        for draft in self._folder.glob(f"{_PART}*"):
            shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(draft: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def _folder(source: str) -> Path:
    try:
        return find_folder(source)
    except RollyardError as error:
        raise NotFound(f"the head has no tokenizer {source!r}: {error.detail}") from error


def _described(path: Path) -> TokenizerFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return TokenizerFile(path.name, digest, path.stat().st_size)


def _has(source: str, listed: TokenizerList) -> bool:
    """Whether exactly these files are present."""
    try:
        folder = find_folder(source)
        there = {name for name in TOKENIZER_FILES if (folder / name).is_file()}
        return there == {file.name for file in listed.files} and all(
            _described(folder / file.name) == file for file in listed.files
        )
    except (RollyardError, OSError):
        return False
