"""Files that are replaced atomically: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, is_durable: bool = False) -> Generator[BinaryIO, None, None]:
    """Yields a draft beside `path`, which replaces it at the end. If the block raises, the draft is deleted and `path`
    is unchanged. `is_durable`: the new content survives a power failure from then on."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(path.parent)


def sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
