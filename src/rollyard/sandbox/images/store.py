"""`ImageStore`: the images of this machine, by digest, in the forms that runtimes read. The package's docstring lists
the invariants.

`find`, `path`, `list` and `hold` are quick and need no network; `pull` is for the operator's commands.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollyard.core.failure import ImageMissing
from rollyard.core.locks import is_abandoned
from rollyard.sandbox.base import ImageKind
from rollyard.sandbox.images.errors import ImageError, ImageInUse
from rollyard.sandbox.images.image import Image, Pruned
from rollyard.sandbox.images.index import BUILDING, ImageIndex, sync
from rollyard.sandbox.images.oci import FoundImage
from rollyard.sandbox.images.programs import apptainer, build_sif, remove_tree
from rollyard.sandbox.images.reference import DIGEST, Origin, own_name, parse_origin, spellings
from rollyard.sandbox.images.registry import RetrySettings
from rollyard.sandbox.images.sources import BuildSite, OnProgress, PullStep, SifFile, Source, open_source
from rollyard.sandbox.images.unpack import UnpackBounds, Unpacker

log = logging.getLogger("rollyard.sandbox")

ABANDONED_S = 60.0  # the age from which a building folder without a lock is a leftover

_FILES: dict[str, str] = {"folder": "folder", "sif": "image.sif"}


class ImageStore:
    """The images below `root`. Creating it opens and writes nothing."""

    def __init__(
        self, root: Path, *, bounds: UnpackBounds | None = None, patience: RetrySettings | None = None
    ) -> None:
        self.root = root
        self._index = ImageIndex(root)
        self._bounds, self._patience = bounds, patience

    # --- reading ---

    def find(self, name: str) -> Image | None:
        """Returns the image with that name or digest, or None. Uses no network; three `stat`s once it is cached."""
        names = self._index.names()
        digest = next((names[text] for text in spellings(name) if text in names), None)
        if digest is None and DIGEST.fullmatch(name):
            digest = name
        return self._image(digest, name, names) if digest else None

    def list(self) -> list[Image]:
        """Returns all images, sorted by name."""
        names = self._index.names()
        images = [self._image(digest, "", names) for digest in self._index.digests()]
        return sorted((image for image in images if image), key=lambda image: (image.reference, image.digest))

    def path(self, image: Image, kind: ImageKind) -> Path:
        """Returns its path in that form."""
        if kind not in image.kinds:
            raise ImageMissing(f"image {image.reference!r} is stored as {' and '.join(image.kinds)}, not as {kind}")
        return self._index.folder(image.digest).absolute() / _FILES[kind]

    @contextmanager
    def hold(self, image: Image) -> Generator[None, None, None]:
        """Protects it from removal by any process while held. Raises `ImageMissing` if it has been removed."""
        lock = self._index.share(image.digest)
        if lock is None:
            raise ImageMissing(f"image {image.reference!r} was removed")
        with lock:
            yield

    def _image(self, digest: str, asked: str, names: Mapping[str, str]) -> Image | None:
        record = self._index.record(digest)
        if record is None:
            return None
        tagged = tuple(sorted(name for name, named in names.items() if named == digest and "@" not in name))
        kinds: Mapping[ImageKind, int] = record["kinds"]
        created_at = float(record["created_at"])
        return Image(
            reference=asked or (tagged[0] if tagged else digest),
            digest=digest,
            size_bytes=sum(kinds.values()),
            kinds=tuple(sorted(kinds)),
            env=record["env"],
            workdir=record["workdir"],
            user=record["user"],
            created_at=created_at,
            used_at=self._index.used_at(digest) or created_at,
            references=tagged,
            skipped=int(record.get("skipped", 0)),
        )

    # --- pulling ---

    async def pull(
        self,
        source: str,
        kinds: Sequence[ImageKind] = ("folder",),
        *,
        name: str | None = None,
        is_insecure: bool = False,
        on_progress: OnProgress = lambda _: None,
    ) -> Image:
        """Stores an image in those forms under its name, unless it is stored already.

        If two processes pull one image, one works and the other waits and reports that. Raises `ImageError`.
        """
        origin = parse_origin(source)
        image_name = own_name(name) if name else origin.name
        if not image_name:
            raise ImageError(f"{source} does not give the image a name", "give it one: --name NAME")
        if "sif" in kinds and origin.kind != "sif":
            apptainer()  # fail before anything is downloaded
        try:
            async with open_source(origin, is_insecure=is_insecure, patience=self._patience) as opened:
                await self._pull(origin, image_name, opened, kinds, on_progress)
        except OSError as error:
            remedy = "make room: rollyard images prune" if error.errno == errno.ENOSPC else ""
            raise ImageError(f"{source} cannot be stored in {self.root}: {error.strerror or error}", remedy) from error
        image = self.find(image_name)
        if image is None:
            raise ImageError(f"{image_name} was removed while it was pulled", "pull it again")
        return image

    async def _pull(
        self, origin: Origin, image_name: str, source: Source, kinds: Sequence[ImageKind], report: OnProgress
    ) -> None:
        resolved = await source.resolve()
        names = {image_name}
        if origin.reference is not None:
            names |= {str(replace(origin.reference, digest=digest)) for digest in (resolved.digest, *resolved.also)}
        waiting = lambda who: report(PullStep("waiting", f"{who} is making this image; waiting for it"))  # noqa: E731
        async with self._index.building(resolved.digest, waiting) as lock:
            await self._make(resolved, source, kinds, lock, report)
            self._index.change_names(lambda table: {**table, **dict.fromkeys(names, resolved.digest)})

    async def _make(
        self, resolved: FoundImage, source: Source, kinds: Sequence[ImageKind], lock: int, report: OnProgress
    ) -> None:
        """Makes the forms that are missing. The caller holds the lock."""
        place = self._index.folder(resolved.digest)
        work = place / ".partial"
        record = dict(self._index.record(resolved.digest) or _record(resolved))
        missing_kinds = [kind for kind in dict.fromkeys(kinds) if kind not in record["kinds"]]
        self._index.mark_used(resolved.digest)
        if not missing_kinds:
            await asyncio.to_thread(remove_tree, work)
            return
        await asyncio.to_thread(_clean, work)
        site = BuildSite(work, (lock,), report)
        built: dict[str, tuple[Path, int]] = {}
        needs_root = "sif" in missing_kinds and not isinstance(source, SifFile) and "folder" not in record["kinds"]
        if "folder" in missing_kinds or needs_root:
            built["folder"] = await self._unpack(resolved, source, site, record)
        if "sif" in missing_kinds:
            root = built["folder"][0] if "folder" in built else place / _FILES["folder"]
            built["sif"] = await _make_sif(source, root, site)
        await asyncio.to_thread(sync, work)
        for kind in missing_kinds:
            target = place / _FILES[kind]
            await asyncio.to_thread(remove_tree, target)  # left by a crash between rename and record
            built[kind][0].rename(target)
            record["kinds"] = {**record["kinds"], kind: built[kind][1]}
        self._index.put_record(resolved.digest, record)
        await asyncio.to_thread(remove_tree, work)
        log.info("image made", extra={"digest": resolved.digest, "kinds": missing_kinds, "skipped": record["skipped"]})

    async def _unpack(
        self, resolved: FoundImage, source: Source, site: BuildSite, record: dict[str, Any]
    ) -> tuple[Path, int]:
        folder = site.work / "folder"
        folder.mkdir(mode=0o755)
        with Unpacker(folder, self._bounds) as unpacker:
            await source.unpack(resolved, unpacker, site)
            record["skipped"] = unpacker.skipped
            return folder, unpacker.written_bytes

    # --- removing ---

    def remove(self, name: str) -> Image:
        """Removes a name; with the last name, or given a digest, the image itself. Raises `ImageInUse`,
        `ImageMissing`."""
        image = self.find(name)
        if image is None:
            raise ImageMissing(f"there is no image {name!r} here")
        names = self._index.names()
        mine = next((text for text in spellings(name) if text in names and "@" not in text), "")
        if mine and len(image.references) > 1:
            self._index.change_names(lambda table: {name: to for name, to in table.items() if name != mine})
        elif not self._remove(image):
            raise ImageInUse(f"image {name!r} is in use", "stop the sandboxes that use it, or the service")
        return image

    def prune(
        self, *, older_than_s: float | None = None, max_bytes: int | None = None, is_dry_run: bool = False
    ) -> Pruned:
        """Removes images unused for `older_than_s`, then the longest unused until the rest fits into `max_bytes`.

        Images in use are kept. Remains of crashed pulls are always removed.
        """
        images = sorted(self.list(), key=lambda image: image.used_at)
        total = sum(image.size_bytes for image in images)
        removed: list[Image] = []
        in_use: list[Image] = []
        now = time.time()
        for image in images:
            is_old = older_than_s is not None and now - image.used_at > older_than_s
            is_too_much = max_bytes is not None and total > max_bytes
            if not is_old and not is_too_much:
                continue
            if self._remove(image, is_dry_run=is_dry_run):
                removed.append(image)
                total -= image.size_bytes
            else:
                in_use.append(image)
        return Pruned(tuple(removed), tuple(in_use), self._sweep(is_dry_run=is_dry_run))

    def _remove(self, image: Image, *, is_dry_run: bool = False) -> bool:
        """Returns False if the image is in use."""
        with self._index.claimed(image.digest) as is_claimed:
            if not is_claimed or is_dry_run:
                return is_claimed
            place = self._index.folder(image.digest)
            (place / "image.json").unlink(missing_ok=True)  # removes the image; the rest counts as remains of a crash
            self._index.change_names(
                lambda table: {name: digest for name, digest in table.items() if digest != image.digest}
            )
            remove_tree(place)
        log.info("image removed", extra={"digest": image.digest, "bytes": image.size_bytes})
        return True

    def _sweep(self, *, is_dry_run: bool) -> int:
        """Removes and counts the remains of crashes: unlocked `.partial` folders and images without a record."""
        count = 0
        for place in sorted(self.root.glob("sha256-*")):
            digest = place.name.replace("-", ":", 1)
            is_whole = (place / "image.json").exists()
            remains = place / ".partial" if is_whole else place
            if not remains.exists():
                continue
            with self._index.claimed(digest, may_be_used=True) as is_claimed:
                if is_claimed and (is_whole or not (place / "image.json").exists()):
                    count += 1
                    if not is_dry_run:
                        remove_tree(remains)
        for place in self.root.glob(f"{BUILDING}*"):
            if is_abandoned(place, older_than_s=ABANDONED_S):
                count += 1
                if not is_dry_run:
                    remove_tree(place)
        return count


def _record(resolved: FoundImage) -> dict[str, Any]:
    config = resolved.config
    return {
        "digest": resolved.digest,
        "kinds": {},
        "env": dict(config.env),
        "workdir": config.workdir,
        "user": config.user,
        "created_at": time.time(),
        "skipped": 0,
    }


def _clean(work: Path) -> None:
    """Empties the working folder, except for downloaded blobs, which are verified before use."""
    blobs = work / "blobs"
    for path in work.iterdir() if work.is_dir() else ():
        if path != blobs:
            remove_tree(path)
    work.mkdir(parents=True, exist_ok=True)


async def _make_sif(source: Source, root: Path, site: BuildSite) -> tuple[Path, int]:
    target = site.work / "image.sif"
    site.report(PullStep("sif", target.name))
    if isinstance(source, SifFile):
        await asyncio.to_thread(shutil.copyfile, source.path, target)
    else:
        report_line = lambda line: site.report(PullStep("note", line))  # noqa: E731
        await build_sif(root, target, work=site.work, keeping=site.keeping, on_line=report_line)
    target.chmod(0o644)
    return target, target.stat().st_size
