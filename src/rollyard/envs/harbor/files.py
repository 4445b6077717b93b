"""Converts a task's folders to JSON and back. A task contains its tests, so the service reads no path of a client.

    {"test.sh": "#!/bin/bash\\n…", "run": {"text": "…", "executable": true},
     "data.bin": {"base64": "…"}, "latest": {"link": "data.bin"}}

Invariant: writing a checked map to a folder of the host changes nothing outside that folder. Names are plain and
relative, and no entry is below a file or a link.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.envs.fields import Fields

MOST_BYTES = 8 << 20
"""The limit of all files of a task. They are stored with each rollout; larger files belong in the image."""

Files = Mapping[str, Json]


class Packer:
    """Reads the folders of one task, up to `MOST_BYTES` in all."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._remaining_bytes = MOST_BYTES

    def folder(self, folder: Path, below: str = "") -> dict[str, Json]:
        """All files in the folder, by relative path, prefixed with `below`."""
        files: dict[str, Json] = {}
        for above, names, here in os.walk(folder):
            names.sort()
            links = [name for name in names if (Path(above) / name).is_symlink()]
            for name in sorted([*here, *links]):
                path = Path(above) / name
                inside = f"{below}{path.relative_to(folder).as_posix()}"
                files[inside] = self.link(path, folder) if path.is_symlink() else self.file(path)
        return files

    def file(self, path: Path) -> Json:
        name = os.fsencode(path.name).decode("utf-8", "replace")
        if not path.is_file() or name != path.name:
            raise TaskInvalid(f"{self._place}: {name!r} is not a plain file with a UTF-8 name")
        self._remaining_bytes -= path.stat().st_size
        if self._remaining_bytes < 0:
            raise TaskInvalid(
                f"{self._place}: its files have more than {MOST_BYTES >> 20} MiB in all; a task contains its tests and"
                " its solution, so larger data belongs in the image"
            )
        content = path.read_bytes()
        is_executable = bool(path.stat().st_mode & 0o100)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            entry: dict[str, Json] = {"base64": base64.b64encode(content).decode()}
        else:
            if not is_executable:
                return text
            entry = {"text": text}
        return {**entry, "executable": True} if is_executable else entry

    def link(self, path: Path, root: Path) -> Json:
        target = os.readlink(path)  # noqa: PTH115
        whole = os.path.normpath(os.path.join(path.parent, target))  # noqa: PTH118
        if os.path.isabs(target) or not Path(whole).is_relative_to(root):  # noqa: PTH117
            raise TaskInvalid(f"{self._place}: the link {path.relative_to(root)} points outside its folder")
        return {"link": target}


def check_files(fields: Fields, name: str, files: Json) -> Files:
    """Returns the map. Raises TaskInvalid with the entry that is wrong."""
    if not isinstance(files, Mapping):
        raise fields.wrong(name, "an object of files")
    for path, entry in files.items():
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
            raise fields.wrong(f"{name}[{path!r}]", "a relative path without . and ..")
        if any(str(above) in files for above in PurePosixPath(path).parents):
            raise fields.wrong(f"{name}[{path!r}]", "a path that is not below another file")
        if _content(entry) is None and not _is_link(entry):
            raise fields.wrong(f"{name}[{path!r}]", "a string, or an object with text, base64 or link,")
    return files


def write_files(files: Files, target: Path, script: str = "") -> None:
    """Writes the files to the folder `target` of the host. `script` is made executable, as in Harbor."""
    target.chmod(0o755)
    for name, entry in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Mapping) and "link" in entry:
            path.symlink_to(str(entry["link"]))
            continue
        path.write_bytes(_content(entry) or b"")
        is_executable = name == script or (isinstance(entry, Mapping) and entry.get("executable") is True)
        path.chmod(0o755 if is_executable else 0o644)


def text_of(files: Files, name: str) -> str:
    """The text of a file; empty if there is no such file."""
    return (_content(files.get(name)) or b"").decode("utf-8", "replace")


def mentions(files: Files, word: str) -> bool:
    return any(word.encode() in (_content(entry) or b"") for entry in files.values())


def _is_link(entry: Json) -> bool:
    return isinstance(entry, Mapping) and set(entry) == {"link"} and isinstance(entry["link"], str)


def _content(entry: Json) -> bytes | None:
    if isinstance(entry, str):
        return entry.encode("utf-8", "surrogateescape")
    if not isinstance(entry, Mapping) or entry.get("executable", True) is not True:
        return None
    match {name: value for name, value in entry.items() if name != "executable"}:
        case {"text": str(text), **more} if not more:
            return text.encode("utf-8", "surrogateescape")
        case {"base64": str(text), **more} if not more:
            try:
                return base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                return None
    return None
