"""Packs and unpacks a task's files as one archive, and compares RUN's files with the expected ones.

RUN's files are only read from an archive: nothing is executed, and no link is followed.
"""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from rollyard.envs.yardwork.puzzle import File, Tree, whole

MTIME_S = 1_700_000_000
"""The modification time of all files, so that a listing is the same in every rollout."""

MAX_ENTRIES = 1000
"""Every task has less than a tenth of it."""

STRANGE = File("", -1)
"""Stands for a link or a binary file, which never equals an expected file."""


def pack(tree: Tree, target: Path) -> None:
    """Writes all files of a task to an archive for `Sandbox.unpack`."""
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in whole(tree).items():
            info = tarfile.TarInfo(path)
            info.mtime = MTIME_S
            if file is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(info)
            else:
                data = file.text.encode()
                info.size, info.mode = len(data), file.mode
                archive.addfile(info, BytesIO(data))


def unpacked(archive: Path) -> dict[str, File | None] | None:
    """Reads an archive that `Sandbox.download` wrote. None if it has more than `MAX_ENTRIES`."""
    files: dict[str, File | None] = {}
    with tarfile.open(archive, "r:") as members:
        for info in members:
            if len(files) >= MAX_ENTRIES:
                return None
            files[info.name] = None if info.isdir() else _file(members, info)
    return files


def _file(members: tarfile.TarFile, info: tarfile.TarInfo) -> File:
    content = members.extractfile(info) if info.isreg() else None
    if content is None:
        return STRANGE
    try:
        return File(content.read().decode(), info.mode)
    except UnicodeDecodeError:
        return STRANGE


def share_right(expected: Tree, actual: Mapping[str, File | None], *, checks_modes: bool) -> float:
    """The share of all paths, expected or found, that are right. It is 1.0 if the files are exactly as expected.

    Newlines at the end of a file are ignored. Permissions are compared only if the task is about them."""
    expected_files = whole(expected)
    paths = expected_files.keys() | actual.keys()
    right = sum(
        path in expected_files and path in actual and _is_same(expected_files[path], actual[path], checks_modes)
        for path in paths
    )
    return right / len(paths)


def _is_same(expected: File | None, actual: File | None, checks_modes: bool) -> bool:
    if expected is None or actual is None:
        return expected is actual
    if actual is STRANGE or expected.text.rstrip("\n") != actual.text.rstrip("\n"):
        return False
    return not checks_modes or (expected.mode & 0o100) == (actual.mode & 0o100)


def is_answer(expected: str, answer: str) -> bool:
    """Whether both are the same, except for white space and a leading `./`."""
    return " ".join(answer.split()).removeprefix("./") == expected
