"""Where the root file system lies in a SIF file: enough of the format to mount it, and no more.

Layout (SIF 1.0, little endian): 32 bytes of launch script, magic, version, architecture, uuid, times; the count,
offset and length of descriptors; each says type, offset and size of its part, and a partition's its file system.
"""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION, _SQUASHFS, _PRIMARY = 0x4004, 1, 2
_MOST_DESCRIPTORS = 1024


def squashfs_offset(path: Path) -> int:
    """The byte at which its squashfs begins. ValueError: it is no SIF file, or its root is no plain squashfs."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if header[:4] == b"hsqs":
            return 0  # a bare squashfs
        if len(header) < _HEADER.size or header[32:42] != _MAGIC:
            raise ValueError("it is neither a folder nor a SIF file")
        *_, total, at, _, _, _ = _HEADER.unpack(header)
        if not 0 < total <= _MOST_DESCRIPTORS:
            raise ValueError(f"it says that it has {total} parts")
        file.seek(at)
        for _ in range(total):
            raw = file.read(_DESCRIPTOR.size)
            if len(raw) < _DESCRIPTOR.size:
                break
            kind, is_used, _, _, _, offset, *_, extra = _DESCRIPTOR.unpack(raw)
            if kind == _PARTITION and is_used:
                system, part = struct.unpack_from("<ii", extra)
                if part == _PRIMARY:
                    if system != _SQUASHFS:
                        raise ValueError("its root is not a squashfs (an encrypted or ext3 image?)")
                    return offset
    raise ValueError("it has no root file system")
