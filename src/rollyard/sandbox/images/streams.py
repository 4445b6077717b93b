"""Opens a layer's file as a tar stream, with any supported compression."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rollyard.sandbox.images.errors import ImageError

CHUNK = 1 << 20


@contextmanager
def open_layer(path: Path) -> Generator[IO[bytes], None, None]:
    """Yields a layer's tar stream. Its first bytes determine the compression, since media types are not reliable."""
    with open(path, "rb", buffering=0) as raw:  # unbuffered: zstd gets the descriptor
        magic = raw.read(4)
        raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]
        elif magic == b"\x28\xb5\x2f\xfd":
            with _zstd(raw, path) as stream:
                yield stream
        else:
            yield raw


@contextmanager
def _zstd(raw: IO[bytes], path: Path) -> Generator[IO[bytes], None, None]:
    program = shutil.which("zstd")
    if program is None:
        raise ImageError(f"layer {path.name} is compressed by zstd, which was not found", "apt-get install zstd")
    with subprocess.Popen([program, "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
            while process.stdout.read(CHUNK):  # padding after the archive
                pass
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ImageError(f"layer {path.name} is incomplete: zstd ended with {process.returncode}")
