"""Finds the tokenizer of an engine.

A tokenizer that is named with the engine is a folder, or a hub name: in the local hub cache, else downloaded. If none
is named, the following are tried in order, with what the engine reports about its model:

1. its folder, if it is readable on this machine
2. the local hub cache, if it reports a hub name (`vllm serve Qwen/Qwen3-8B` does)
3. a download from the hub
4. the files that the engine itself serves (the embedded and the scripted engine do)

Invariant. This only finds files: `Renderers.check` verifies them against the engine's own tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollyard.core.failure import EngineBroken, EngineFailure, RollyardError, TokenizerNotFound
from rollyard.engines.base import Engine
from rollyard.tokens.files import MAX_FILE_BYTES, InvalidFiles, TokenizerFile, TokenizerList, receive
from rollyard.tokens.hub import DownloadFailed, download_tokenizer
from rollyard.tokens.tokenizer import find_folder, hub_command, is_hub_name

log = logging.getLogger("rollyard.tokens")

RETRY_S = 60.0
"""A failed download is not repeated for so long: an engine without a tokenizer is probed every few seconds."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer's files: their name, and the folder that contains them."""

    name: str
    folder: str


@dataclass(slots=True)
class TokenizerSearch:
    """Finds tokenizers. Files that an engine serves are stored below `cache`; without it, they are not fetched."""

    cache: Path | None = None
    _failed: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])

    async def find(self, engine: Engine) -> TokenizerFiles:
        """Returns the files. Raises TokenizerNotFound, with everything that was tried, if there are none, and
        InvalidRequest if the named tokenizer is a folder that has none."""
        named, info = engine.spec.tokenizer, engine.info
        if info.tokenizer and not named:
            return TokenizerFiles(info.tokenizer, info.tokenizer)
        if named and await asyncio.to_thread(_is_folder, named):
            return TokenizerFiles(named, str(await asyncio.to_thread(find_folder, named)))
        reported = dict.fromkeys((named,) if named else (info.model_source, info.model))
        names = [name for name in reported if is_hub_name(name)]
        tried: list[str] = []
        if info.model_source and not named and info.model_source not in names:
            tried.append(f"the folder {info.model_source} (not readable on this machine)")
        for name in names:
            if (folder := await asyncio.to_thread(_cached_folder, name)) is not None:
                return TokenizerFiles(name, str(folder))
            tried.append(f"{name} in the local hub cache (not there)")
        for name in names:
            try:
                return TokenizerFiles(name, str(await self._download(name)))
            except DownloadFailed as error:
                tried.append(f"a download of {name} from the hub ({error})")
        if not named:
            try:
                if files := await self._of_engine(engine):
                    return files
                tried.append("the engine itself (it does not serve its tokenizer)")
            except (EngineFailure, InvalidFiles) as error:
                tried.append(f"the engine itself ({error})")
        raise TokenizerNotFound(_not_found(engine.spec.id, named or info.model_source or info.model, names, tried))

    async def _download(self, name: str) -> Path:
        failed_at, reason = self._failed.get(name, (0.0, ""))
        if reason and time.monotonic() - failed_at < RETRY_S:
            raise DownloadFailed(reason)
        started = time.monotonic()
        log.info("downloading a tokenizer from the hub", extra={"tokenizer": name})
        try:
            folder = await asyncio.to_thread(find_folder, str(await download_tokenizer(name)))
        except (DownloadFailed, RollyardError) as error:
            reason = error.detail if isinstance(error, RollyardError) else str(error)
            self._failed[name] = (time.monotonic(), reason)
            raise DownloadFailed(reason) from error
        seconds = round(time.monotonic() - started, 1)
        log.info("tokenizer downloaded", extra={"tokenizer": name, "revision": folder.name, "seconds": seconds})
        return folder

    async def _of_engine(self, engine: Engine) -> TokenizerFiles | None:
        raw = await engine.tokenizer_file() if self.cache is not None else None
        if raw is None or self.cache is None:
            return None
        try:
            listed = msgspec.json.decode(raw, type=TokenizerList)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidFiles(f"its list of files is invalid: {error}") from None

        async def read(file: TokenizerFile) -> bytes:
            data = await engine.tokenizer_file(file.name, min(file.size_bytes, MAX_FILE_BYTES))
            if data is None:
                raise EngineBroken(f"engine {engine.spec.id} lists {file.name} and does not serve it")
            return data

        folder = await receive(listed, read, self.cache)
        log.info("tokenizer received from the engine", extra={"engine": engine.spec.id, "digest": listed.digest})
        return TokenizerFiles(engine.info.model, str(folder))


def _is_folder(name: str) -> bool:
    """Whether a named tokenizer is meant as a folder, even one that does not exist."""
    return not is_hub_name(name) or Path(name).expanduser().is_dir()


def _cached_folder(name: str) -> Path | None:
    try:
        return find_folder(name)
    except RollyardError:
        return None


def _not_found(engine_id: str, source: str, names: list[str], tried: list[str]) -> str:
    download = f"on a machine with a network, run `{hub_command(names[0])}`; or " if names else ""
    return (
        f"the tokenizer of engine {engine_id} (model {source!r}) was not found. Tried: {'; '.join(tried)}. "
        f"To fix it, {download}name a folder that has tokenizer.json and tokenizer_config.json: --tokenizer PATH"
    )
