"""Finds the root file system in a SIF file. Reads only as much of the format as mounting needs.

Layout (SIF 1.0, little endian): 32 bytes of launch script, magic, version, architecture, uuid, times; the count,
offset and length of descriptors. Each has the type, offset and size of its part; a partition's also its file system.
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
    """Returns the offset of its squashfs. Raises ValueError if it is not a SIF file, or its root not a plain
    squashfs."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if header[:4] == b"hsqs":
            return 0  # a bare squashfs
        if len(header) < _HEADER.size or header[32:42] != _MAGIC:
            raise ValueError("it is neither a folder nor a SIF file")
        *_, total, at, _, _, _ = _HEADER.unpack(header)
        if not 0 < total <= _MOST_DESCRIPTORS:
            raise ValueError(f"it declares {total} parts")
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
