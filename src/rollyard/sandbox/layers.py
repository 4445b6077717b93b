"""Prepare once, fork n: stores the files that a set-up wrote under a key, as a layer below all sandboxes that need it.

A layer is `root/KEY/`: the files (as `Sandbox.freeze` left them) and `layer.json`, which describes it. The folder is
renamed to that name when it is complete. The mtime of `layer.json` is the time of the last use. The key covers
everything that the files depend on, so a layer is never changed, only made or deleted, and outlives its group and its
service.

Invariants.
- A key is made by one caller at a time, while the others wait. If that caller is cancelled or fails with blame infra,
  the next waiting caller makes it; so each caller makes it at most once.
- A set-up that fails with blame task is cached for a while: n rollouts of it fail after one try.
- A leased layer is not deleted. Others are, least recently used first, while the total is above `max_bytes` or
  `max_files`: empty files take no bytes, and the inodes of a file system are limited.
- Nothing is fsynced: a layer from before the machine's last boot is not trusted, and is deleted.

The pipeline defines what a set-up is and what its key must cover.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import re
import subprocess
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rollyard.core import Blame, RollyardError, new_id
from rollyard.core.failure import SandboxStartFailed

log = logging.getLogger("rollyard.sandbox")

FILES = "files"
LABEL = "layer.json"

FAILED_S = 120.0
"""How long a failed set-up is cached: longer than a group needs to fail, shorter than it takes to fix a task."""

MOST_FAILED = 1024

BYTES_OF_FILE = 16 << 10
"""`max_bytes` divided by this is the limit of files: ext4's default ratio of bytes to inodes."""

REMOVE_S = 600.0
"""Time limit of one deletion. Files left then are deleted at the next start of the service."""

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Make = Callable[[Path], Awaitable[None]]
Remove = Callable[[Sequence[Path]], Awaitable[bool]]


@dataclass(slots=True)
class _CachedLayer:
    size_bytes: int
    files: int
    used_at: float
    leases: int = 0


class LayerLease:
    """Protects a layer from deletion until `release`; `path` goes into `SandboxSpec.layers`."""

    def __init__(self, key: str, path: Path, entry: _CachedLayer, *, made_s: float | None) -> None:
        self.key, self.path = key, path
        self.made_s = made_s  # the time it took to make; None: it was found
        self._entry: _CachedLayer | None = entry
        entry.leases += 1

    @property
    def is_found(self) -> bool:
        return self.made_s is None

    def release(self) -> None:
        """Allows the layer to be pruned. Idempotent."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.leases -= 1


class ScratchLayer:
    """A layer of one rollout only: `path` is for `freeze`; `discard` deletes it. After a crash, opening the cache
    deletes it."""

    def __init__(self, layers: LayerCache, folder: Path) -> None:
        self._layers, self._folder = layers, folder
        self.path = folder / FILES

    def discard(self) -> None:
        """Deletes it in the background; `LayerCache.close` waits for that. Idempotent."""
        self._layers.drop(self._folder)


class LayerCache:
    """The layers of one runtime, below its `layer_root`. `async with` reads existing layers, and at the end waits for
    deletions."""

    def __init__(self, root: Path, max_bytes: int, *, remove: Remove | None = None) -> None:
        """`remove` deletes folders even if other users own files in them or permissions forbid it, and returns whether
        it succeeded."""
        self.root, self.max_bytes = root, max_bytes
        self.max_files = max(1000, max_bytes // BYTES_OF_FILE)
        self.found = self.made = self.failed = self.pruned = 0  # since the opening
        self._remove = remove or remove_folders
        self._entries: dict[str, _CachedLayer] = {}
        self._making: dict[str, asyncio.Future[None]] = {}
        self._failures: OrderedDict[tuple[str, str], tuple[float, RollyardError]] = OrderedDict()
        self._removals: set[asyncio.Task[None]] = set()
        self._boot_id = ""
        self._is_open = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._entries.values())

    async def __aenter__(self) -> Self:
        self._boot_id = _boot_id()
        self._entries, strays = await asyncio.to_thread(self._read)
        self._is_open = True
        for stray in strays:
            self.drop(stray)
        self._prune()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_open = False
        while self._removals:
            await asyncio.wait(self._removals)

    # --- use ---

    async def get(self, key: str, make: Make, *, terms: str = "") -> LayerLease:
        """Returns a lease of this key's layer, made by `make(path)` if there is none. The caller must release it.

        `terms` covers what decides whether `make` fails but not what it writes (its deadline): a cached failure
        applies only to callers with the same terms.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a layer key")
        while True:
            if not self._is_open:
                raise SandboxStartFailed("the layer cache is closed")
            path = self.root / key / FILES
            entry = self._entries.get(key)
            if entry is not None and path.is_dir():
                self.found += 1
                self._use(key, entry)
                return LayerLease(key, path, entry, made_s=None)
            error = self._remembered(key, terms)
            if error is not None:
                raise copy.copy(error)  # one for each caller: an exception keeps the traceback of its raise
            making = self._making.get(key)
            if making is None:
                return await self._make(key, make, terms)
            await asyncio.wait([making])

    async def _make(self, key: str, make: Make, terms: str) -> LayerLease:
        finished = self._making[key] = asyncio.get_running_loop().create_future()
        folder = self.root / f".making-{key}-{new_id('l')}"
        made_at, started_at = time.time(), time.monotonic()
        try:
            folder.mkdir(parents=True)
            await make(folder / FILES)
            size_bytes, files = await asyncio.to_thread(_size_of, folder)
            label = {
                "key": key,
                "size_bytes": size_bytes,
                "files": files,
                "made_at": made_at,
                "boot_id": self._boot_id,
            }
            (folder / LABEL).write_text(json.dumps(label))
            if (self.root / key).exists():  # incomplete: it was dropped, or its label was never written
                self.drop(self.root / key)
            folder.rename(self.root / key)
            entry = self._entries[key] = _CachedLayer(size_bytes, files, time.time())
        except BaseException as error:
            if isinstance(error, RollyardError) and error.blame is Blame.TASK:
                self._remember(key, terms, error)
            self.failed += not isinstance(error, asyncio.CancelledError)
            self.drop(folder)
            raise
        finally:
            del self._making[key]
            finished.set_result(None)
        self.made += 1
        lease = LayerLease(key, self.root / key / FILES, entry, made_s=time.monotonic() - started_at)
        log.info("layer made", extra={"key": key, "size_bytes": size_bytes, "made_s": round(lease.made_s or 0.0, 3)})
        self._prune()
        return lease

    def _use(self, key: str, entry: _CachedLayer) -> None:
        entry.used_at = time.time()
        try:
            os.utime(self.root / key / LABEL)
        except OSError as error:  # it only affects the order of pruning after a restart
            log.warning("a layer's label cannot be touched", extra={"key": key, "error": str(error)})

    def scratch(self) -> ScratchLayer:
        """Creates a layer for the files that one rollout left."""
        if not self._is_open:
            raise SandboxStartFailed("the layer cache is closed")
        folder = self.root / f".run-{new_id('l')}"
        folder.mkdir(parents=True)
        return ScratchLayer(self, folder)

    # --- set-ups that failed ---

    def _remember(self, key: str, terms: str, error: RollyardError) -> None:
        # A copy has no traceback and no cause, whose frames would keep the dead sandbox and its objects in memory.
        self._failures[key, terms] = (time.monotonic() + FAILED_S, copy.copy(error))
        while len(self._failures) > MOST_FAILED:
            self._failures.popitem(last=False)

    def _remembered(self, key: str, terms: str) -> RollyardError | None:
        until, error = self._failures.get((key, terms), (0.0, None))
        if error is not None and until <= time.monotonic():
            del self._failures[key, terms]
            return None
        return error

    # --- deleting ---

    def _prune(self) -> None:
        excess = self.size_bytes - self.max_bytes
        excess_files = sum(entry.files for entry in self._entries.values()) - self.max_files
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].used_at):
            if excess <= 0 and excess_files <= 0:
                return
            if entry.leases == 0:
                excess -= entry.size_bytes
                excess_files -= entry.files
                del self._entries[key]
                self.pruned += 1
                log.info("layer pruned", extra={"key": key, "size_bytes": entry.size_bytes})
                self.drop(self.root / key)

    def drop(self, folder: Path) -> None:
        """Renames the folder at once and deletes it in the background."""
        trash = folder.with_name(f".gone-{new_id('l')}")
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        task = asyncio.get_running_loop().create_task(self._delete(trash))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _delete(self, folder: Path) -> None:
        is_deleted = False
        try:
            async with asyncio.timeout(REMOVE_S):
                is_deleted = await self._remove([folder])
        except (TimeoutError, OSError) as error:
            log.warning("deleting a layer failed", extra={"folder": folder.name, "error": str(error)})
        if not is_deleted:
            log.warning("files of a layer could not be deleted", extra={"folder": folder.name})

    # --- opening ---

    def _read(self) -> tuple[dict[str, _CachedLayer], list[Path]]:
        """Returns the layers that can be trusted, and all other entries of the root."""
        self.root.mkdir(parents=True, exist_ok=True)
        layers: dict[str, _CachedLayer] = {}
        strays: list[Path] = []
        for folder in self.root.iterdir():
            try:
                if not folder.is_dir() or folder.is_symlink() or not _KEY.fullmatch(folder.name):
                    raise ValueError("not a layer")
                label = json.loads((folder / LABEL).read_bytes())
                if label["key"] != folder.name or label["boot_id"] != self._boot_id or not (folder / FILES).is_dir():
                    raise ValueError("of another boot, or incomplete")
                files = int(label.get("files", 0))  # 0: made by an older version
                layers[folder.name] = _CachedLayer(int(label["size_bytes"]), files, (folder / LABEL).stat().st_mtime)
            except (OSError, ValueError, KeyError, TypeError):
                strays.append(folder)
        return layers, strays


async def remove_folders(folders: Sequence[Path]) -> bool:
    """Runs `rm -rf` as a process, since it handles deep trees; if permissions forbid it, runs `chmod` and retries."""
    return await asyncio.to_thread(_rm, [str(folder) for folder in folders])


def _rm(paths: list[str]) -> bool:
    for command in (("rm", "-rf"), ("chmod", "-R", "u+rwX"), ("rm", "-rf")):
        paths = [path for path in paths if os.path.lexists(path)]
        # chmod follows a link that is its argument.
        own = [path for path in paths if command[0] != "chmod" or not Path(path).is_symlink()]
        if own:
            # Without preexec_fn and cwd, subprocess uses vfork, which does not copy the service's page tables.
            subprocess.run([*command, "--", *own], capture_output=True, check=False)
    return not any(os.path.lexists(path) for path in paths)


def _size_of(folder: Path) -> tuple[int, int]:
    """Returns the bytes and files that it takes on disk. Of a sparse file, only allocated blocks count; the contents
    of an unreadable folder do not count."""
    size_bytes = count = 0
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                size_bytes += Path(base, name).lstat().st_blocks * 512
            except OSError:
                continue
            count += 1
    return size_bytes, count


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # then only layers made by this process are trusted
        return new_id("boot")
