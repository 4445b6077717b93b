"""One member of a layer: what of its name, mode and header is believed."""

from __future__ import annotations

import os
import tarfile

from rollyard.sandbox.images.errors import HostileImage

MOST_DEPTH = 256  # folders; shutil.rmtree and find walk that without trouble
MOST_HEADER_BYTES = 1 << 20
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class LayerMember(tarfile.TarInfo):
    """`tarfile` reads long names and extended headers whole, into memory, whatever size they claim."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > MOST_HEADER_BYTES:
            raise HostileImage(f"a header of {self.size:,} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]


def parts_of(name: str) -> list[str]:
    """A member's name below the root. An absolute one is, as everywhere, the image's own; `..` is refused."""
    parts = [part for part in text_of(name).split("/") if part not in ("", ".")]
    if ".." in parts:
        raise HostileImage(f"{name!r} leads out of the image")
    if len(parts) > MOST_DEPTH:
        raise HostileImage(f"folders more than {MOST_DEPTH} deep")
    return parts


def text_of(name: str) -> str:
    if "\0" in name or not name:
        raise HostileImage(f"{name!r} cannot be a name")
    return name


def mode_of(member: tarfile.TarInfo, least: int) -> int:
    return (member.mode & 0o1777) | least


def lstat(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
