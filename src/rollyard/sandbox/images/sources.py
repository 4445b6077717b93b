"""Unpacks a source into a root folder: layers of a registry or an archive, a SIF file, or a folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rollyard.core.exception_groups import first_error
from rollyard.sandbox.images.archives import Archive, Layout
from rollyard.sandbox.images.errors import HostileImage, ImageError
from rollyard.sandbox.images.oci import Blob, BlobSource, FoundImage
from rollyard.sandbox.images.programs import open_sif
from rollyard.sandbox.images.reference import Origin
from rollyard.sandbox.images.registry import Registry, RetrySettings
from rollyard.sandbox.images.unpack import Unpacker

DOWNLOADS = 3  # layers at once


@dataclass(frozen=True, slots=True)
class PullStep:
    """Progress to show to the operator. `item` is a layer or a file; `total_bytes` is None if it is unknown."""

    phase: Literal["waiting", "download", "unpack", "sif", "note"]
    item: str = ""
    done_bytes: int = 0
    total_bytes: int | None = None


OnProgress = Callable[[PullStep], None]


@dataclass(frozen=True, slots=True)
class BuildSite:
    """The working folder of a build. The descriptors in `keeping` hold its lock; programs inherit them."""

    work: Path
    keeping: Sequence[int]
    report: OnProgress


class Source(Protocol):
    async def resolve(self) -> FoundImage: ...

    async def unpack(self, resolved: FoundImage, unpacker: Unpacker, site: BuildSite) -> None: ...


@asynccontextmanager
async def open_source(
    origin: Origin, *, is_insecure: bool, patience: RetrySettings | None = None
) -> AsyncGenerator[Source, None]:
    if origin.reference is not None:
        async with Registry(origin.reference, is_insecure=is_insecure, patience=patience) as registry:
            yield LayeredImage(registry)
    elif origin.kind == "oci":
        yield LayeredImage(Layout(origin.path, origin.tag))
    elif origin.kind in ("oci-archive", "docker-archive"):
        yield LayeredImage(Archive(origin.path, origin.tag))
    elif origin.kind == "sif":
        yield SifFile(origin.path)
    else:
        yield Folder(origin.path)


class LayeredImage:
    """An image of layers: all are fetched, a few at once, then applied in order and deleted."""

    def __init__(self, blobs: BlobSource) -> None:
        self._blobs = blobs

    async def resolve(self) -> FoundImage:
        return await self._blobs.resolve()

    async def unpack(self, resolved: FoundImage, unpacker: Unpacker, site: BuildSite) -> None:
        total = sum(blob.size for blob in resolved.layers)
        if total > unpacker.bounds.total_bytes:
            raise HostileImage(f"its layers have {total:,} bytes")
        folder = site.work / "blobs"
        folder.mkdir(exist_ok=True)
        gate = asyncio.Semaphore(DOWNLOADS)
        by_digest = {blob.digest: blob for blob in resolved.layers}

        async def fetch(blob: Blob) -> Path:
            async with gate:
                return await self._blobs.fetch(
                    blob,
                    folder,
                    lambda fetched_bytes: site.report(PullStep("download", blob.digest, fetched_bytes, blob.size)),
                )

        try:
            async with asyncio.TaskGroup() as group:
                # By digest: an image may have one layer twice.
                fetching = {digest: group.create_task(fetch(blob)) for digest, blob in by_digest.items()}
        except ExceptionGroup as errors:
            raise first_error(errors) from None
        for place, blob in enumerate(resolved.layers):
            path = fetching[blob.digest].result()
            site.report(PullStep("unpack", blob.digest, 0, blob.size))
            await in_thread(unpacker, unpacker.layer, path)
            site.report(PullStep("unpack", blob.digest, blob.size, blob.size))
            is_needed_again = blob.digest in {later.digest for later in resolved.layers[place + 1 :]}
            if path.is_relative_to(folder) and not is_needed_again:
                path.unlink()


class Folder:
    """A root folder by path. It is copied as one layer, so its files get the same owner and checks as any other's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def resolve(self) -> FoundImage:
        return FoundImage(await asyncio.to_thread(tree_digest, self._path))

    async def unpack(self, resolved: FoundImage, unpacker: Unpacker, site: BuildSite) -> None:
        site.report(PullStep("unpack", str(self._path)))
        await in_thread(unpacker, copy_tree, unpacker, self._path)


class SifFile:
    """A SIF file by path. Its environment stays in the file: Apptainer sets it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def resolve(self) -> FoundImage:
        try:
            with open(self.path, "rb") as file:  # noqa: ASYNC230
                if b"SIF_MAGIC" not in file.read(64):
                    raise ImageError(f"{self.path} is not a SIF file")
                file.seek(0)
                digest = (await asyncio.to_thread(hashlib.file_digest, file, "sha256")).hexdigest()
        except OSError as error:
            raise ImageError(f"{self.path} cannot be read: {error.strerror}") from error
        return FoundImage(f"sha256:{digest}")

    async def unpack(self, resolved: FoundImage, unpacker: Unpacker, site: BuildSite) -> None:
        opened = site.work / "opened"
        site.report(PullStep("unpack", self.path.name))
        await open_sif(
            self.path,
            opened,
            work=site.work,
            keeping=site.keeping,
            on_line=lambda line: site.report(PullStep("note", line)),
        )
        await in_thread(unpacker, copy_tree, unpacker, opened)


async def in_thread(unpacker: Unpacker, work: Callable[..., None], *args: object) -> None:
    """Runs it in a thread. On cancellation, stops the thread and waits for it, so that nothing is written later."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        unpacker.stop.set()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieve the error that the stop caused
        raise


def copy_tree(unpacker: Unpacker, source: Path) -> None:
    """Copies a folder by piping tar into the unpacker. Other file systems mounted in it are left out."""
    argv = ["tar", "--create", "--format=pax", "--one-file-system", "--file=-", f"--directory={source}", "."]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        assert tar.stdout is not None and tar.stderr is not None
        try:
            unpacker.stream(tar.stdout, str(source))
            while tar.stdout.read(1 << 16):
                pass
        except BaseException:
            tar.kill()
            raise
        stderr = tar.stderr.read(4096).decode(errors="replace").strip()
    if tar.returncode:
        raise ImageError(f"{source} cannot be read completely: {stderr}", "this user must be able to read all of it")


def tree_digest(folder: Path) -> str:
    """Returns a digest of a folder's paths, modes, links and contents. Blocking."""
    whole = hashlib.sha256()
    try:
        for place, folders, files in os.walk(folder, onerror=_raise):
            folders.sort()
            for name in sorted([*files, *folders]):
                path = Path(place, name)
                file_stat = path.lstat()
                whole.update(f"{path.relative_to(folder)}\0{file_stat.st_mode:o}\0".encode(errors="surrogateescape"))
                if stat.S_ISLNK(file_stat.st_mode):
                    whole.update(os.fsencode(path.readlink()))
                elif stat.S_ISREG(file_stat.st_mode):
                    with open(path, "rb") as file:
                        whole.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ImageError(f"{error.filename} cannot be read: {error.strerror}") from error
    return f"sha256:{whole.hexdigest()}"


def _raise(error: OSError) -> None:
    raise error
