"""Validates the name, mode and header of a layer's members."""

from __future__ import annotations

import os
import tarfile

from rollyard.sandbox.images.errors import HostileImage

MOST_DEPTH = 256  # folders; shutil.rmtree and find can handle that
MOST_HEADER_BYTES = 1 << 20
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class LayerMember(tarfile.TarInfo):
    """Limits long names and extended headers, which `tarfile` reads into memory whatever size they declare."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > MOST_HEADER_BYTES:
            raise HostileImage(f"a header has {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def parts_of(name: str) -> list[str]:
    """Returns the components of a member's name. An absolute name is relative to the image's root; `..` is refused."""
    parts = [part for part in text_of(name).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise HostileImage(f"{name!r} leads out of the image")
    if len(parts) > MOST_DEPTH:
        raise HostileImage(f"it has folders nested more than {MOST_DEPTH} deep")
    return parts


def text_of(name: str) -> str:
    if "\0" in name or not name:
        raise HostileImage(f"{name!r} is not a valid name")
    return name


def mode_of(member: tarfile.TarInfo, least: int) -> int:
    return (member.mode & 0o1777) | least


def lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
