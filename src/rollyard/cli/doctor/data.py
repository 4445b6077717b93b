"""Checks of `rollyard doctor` for data: its disk and file system, its size, and whether tokenizers load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli.doctor.check import DoctorCheck

if TYPE_CHECKING:
    from rollyard.service.settings import Settings

GIB = 1 << 30
FEW_FILES = 100_000
"""Inodes: a large repository with its environment needs as many."""

NO_UPPER = ("overlay", "fuse.fuse-overlayfs", "aufs", "ecryptfs", "vfat", "exfat")
"""File systems that cannot hold the upper folder of an overlay."""


def data_checks(settings: Settings) -> Iterable[DoctorCheck]:
    yield room(settings.data_dir)
    yield file_system(settings.data_dir, _mounts())
    yield _images(settings)
    yield _layers(settings)
    yield _tokenizers(settings)


def nearest(path: Path) -> Path:
    """Returns the folder itself, or its closest existing parent."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def room(data_dir: Path) -> DoctorCheck:
    place = nearest(data_dir)
    if not os.access(place, os.W_OK):
        return DoctorCheck("data_dir", "warn", f"{data_dir} cannot be written to", "set data_dir to a writable folder")
    usage = os.statvfs(place)
    free, files = usage.f_bavail * usage.f_frsize, usage.f_favail if usage.f_files else None
    detail = f"{data_dir}: {free / GIB:.1f} GiB free" + ("" if files is None else f", {files:,} inodes free")
    remedy = ""
    if free < 2 * GIB:
        remedy = "free some space, or set data_dir to a larger disk"
    elif files is not None and files < FEW_FILES:
        remedy = "delete small files, or set data_dir to a file system with more inodes (mkfs.ext4 -i 8192)"
    return DoctorCheck("data_dir", "warn" if remedy else "ok", detail, remedy)


def file_system(data_dir: Path, mountinfo: str) -> DoctorCheck:
    """Checks whether the file system supports SQLite and overlays."""
    from rollyard.store.sqlite.place import NETWORK, mount_of

    name = "file system"
    mount = mount_of(str(nearest(data_dir).resolve()), mountinfo)
    if mount is None:
        return DoctorCheck(name, "warn", "the file system of data_dir is not known", "mount /proc")
    location = f"{mount.kind} at {mount.point}"
    local = "set data_dir to a local disk (a node's own scratch): ROLLYARD_DATA_DIR=/scratch/rollyard"
    if mount.kind in NETWORK:
        return DoctorCheck(name, "warn", f"{location}: SQLite loses data there, and overlays do not work", local)
    if mount.kind in NO_UPPER:
        remedy = f"{local}; in Docker: a volume (--volume rollyard:{data_dir})"
        return DoctorCheck(name, "warn", f"{location}: overlays over images and layers do not work there", remedy)
    return DoctorCheck(name, "ok", location)


def _images(settings: Settings) -> DoctorCheck:
    from rollyard.sandbox.images import ImageStore
    from rollyard.service.machine import IMAGES

    try:
        images = ImageStore(settings.data_dir / IMAGES).list()
    except (OSError, ValueError) as error:
        return DoctorCheck("images", "warn", f"cannot be read: {error}", f"check {settings.data_dir / IMAGES}")
    size = sum(image.size_bytes for image in images)
    return DoctorCheck("images", "ok", f"{len(images)}, {size / GIB:.1f} GiB (rollyard images list)")


def _layers(settings: Settings) -> DoctorCheck:
    """Reads the sizes from the layers' labels, without walking their files."""
    count = size = 0
    for label in settings.data_dir.glob("sandboxes/*/layers/*/layer.json"):
        try:
            size += int(json.loads(label.read_bytes())["size_bytes"])
            count += 1
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return DoctorCheck(
        "layers", "ok", f"{count}, {size / GIB:.1f} GiB; up to {settings.layer_bytes / GIB:.0f} per runtime"
    )


def _tokenizers(settings: Settings) -> DoctorCheck:
    """Loads the tokenizers of the configured engines, and the built-in one to show that loading works."""
    from rollyard.testing.tokenizer_files import tokenizer_dir
    from rollyard.tokens import Tokenizers

    loaded = Tokenizers()
    named = [engine.tokenizer for engine in settings.engines if engine.tokenizer]
    for source in (str(tokenizer_dir()), *named):
        try:
            loaded.load(source)
        except Exception as error:  # broken files raise various errors
            detail = f"{source}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            return DoctorCheck(
                "tokenizers", "warn", detail, "give a folder with tokenizer.json (scripts/get-tokenizer)"
            )
    return DoctorCheck("tokenizers", "ok", f"loading works ({len(named)} of configured engines)")
