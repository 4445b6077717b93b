"""Sends tokenizer files from the head to nodes that lack them.

The head lists an engine's files with their digests (`TokenizerServer`); a node (`TokenizerFetcher`) compares them with
its own at the same path, and downloads what differs into its own folder.

Invariant. A node loads only files with the head's digests, so every node produces the same tokens. If the head has no
files, or is too old to list them, a node uses its own.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from rollyard.core.failure import NotFound, RollyardError
from rollyard.engines.base import Engine
from rollyard.fleet.head_connection import HeadConnection, HeadUnreachable, NodeRefused
from rollyard.pipeline.tokenizer_search import TokenizerFiles
from rollyard.tokens.files import (
    InvalidFiles,
    TokenizerFile,
    TokenizerList,
    describe,
    has_files,
    paths_in,
    receive,
)
from rollyard.tokens.tokenizer import find_folder

log = logging.getLogger("rollyard.fleet")


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
        return TokenizerList(source, [self._file(path) for path in paths_in(_folder(source))])

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
            entry = self._cache[path] = (mark, describe(path))
        return entry[1]


class TokenizerFetcher:
    """The node's side: finds an engine's tokenizer, or downloads it from the head into `folder`."""

    def __init__(self, link: HeadConnection, folder: Path) -> None:
        self._link = link
        self._folder = folder

    async def __call__(self, engine: Engine) -> TokenizerFiles | None:
        engine_id = engine.spec.id
        try:
            listed = await self._link.get(f"tokenizers/{engine_id}", TokenizerList)
        except (HeadUnreachable, NodeRefused, RollyardError) as error:
            log.info("the head offers no tokenizer", extra={"engine": engine_id, "why": str(error)})
            return None
        own = engine.spec.tokenizer or engine.info.tokenizer
        if own and await asyncio.to_thread(has_files, own, listed):
            return TokenizerFiles(own, own)

        async def read(file: TokenizerFile) -> bytes:
            return await self._link.get_bytes(f"tokenizers/{engine_id}/{file.sha256}", file.size_bytes)

        try:
            folder = await receive(listed, read, self._folder)
        except InvalidFiles as error:
            raise HeadUnreachable(f"the head's tokenizer is refused: {error}") from error
        log.info("tokenizer received from the head", extra={"engine": engine_id, "digest": listed.digest})
        return TokenizerFiles(listed.name, str(folder))


def _folder(source: str) -> Path:
    try:
        return find_folder(source)
    except RollyardError as error:
        raise NotFound(f"the head has no tokenizer {source!r}: {error.detail}") from error
