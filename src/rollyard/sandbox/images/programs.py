"""Runs the external programs that make images: Apptainer and container engines.

Invariants. Each runs in its own process group, without stdin; cancelling ends the whole group. It inherits the
descriptors in `keeping`, so the lock on its output is held until the program has ended, even if this process ends
first.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollyard.sandbox.images.errors import ImageError

APPTAINER = ("apptainer", "singularity")
TAIL_LINES = 12
INSTALL = "install Apptainer (apptainer.org/docs), or keep the image as a folder: --as folder"


class ProgramFailed(ImageError):
    """A program ended with a nonzero status; `tail` is the end of its output."""

    def __init__(self, argv: Sequence[str], status: int, tail: str, remedy: str = "") -> None:
        super().__init__(f"`{' '.join(argv[:2])}` ended with {status}: {tail.strip() or 'no output'}", remedy)
        self.status = status
        self.tail = tail


def apptainer() -> str:
    for name in APPTAINER:
        if path := shutil.which(name):
            return path
    raise ImageError("neither apptainer nor singularity was found", INSTALL)


async def run_program(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    keeping: Sequence[int] = (),
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda _: None,
) -> str:
    """Runs a program to its end and returns the last lines of its output. Raises `ProgramFailed` unless its status is
    0."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(env or {})},
        pass_fds=tuple(keeping),
        start_new_session=True,
        cwd=cwd,
    )
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        while data := await process.stdout.read(1 << 16):
            for line in data.decode(errors="replace").splitlines():
                if line.strip():
                    tail.append(line.strip()[:500])
                    on_line(tail[-1])
        status = await process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    text = "\n".join(tail)
    if status:
        raise ProgramFailed(argv, status, text)
    return text


async def build_sif(source: Path, target: Path, *, work: Path, keeping: Sequence[int], on_line: Callable[[str], None]):
    """Makes a SIF file from a root folder. `work` is for Apptainer's temporary files."""
    await _build(["--force", str(target), str(source)], work, keeping, on_line)


async def open_sif(source: Path, target: Path, *, work: Path, keeping: Sequence[int], on_line: Callable[[str], None]):
    """Makes a root folder from a SIF file: by unsquashfs if available (it needs no container), else by Apptainer."""
    unsquashfs = shutil.which("unsquashfs")
    if unsquashfs is not None:
        with suppress(ProgramFailed):
            listed = await run_program([apptainer(), "sif", "list", str(source)], keeping=keeping)
            if match := re.search(r"\|\s*(\d+)-\d+\s*\|FS \(Squashfs/\*System", listed):
                words = ["-no-progress", "-no-xattrs", "-offset", match[1], "-dest", str(target), str(source)]
                await run_program([unsquashfs, *words], keeping=keeping, on_line=on_line)
                return
        remove_tree(target)
    await _build(["--force", "--sandbox", str(target), str(source)], work, keeping, on_line)


async def _build(words: list[str], work: Path, keeping: Sequence[int], on_line: Callable[[str], None]) -> None:
    program = apptainer()
    places = {f"{name}_{use}": str(work) for name in ("APPTAINER", "SINGULARITY") for use in ("TMPDIR", "CACHEDIR")}
    await run_program([program, "build", *words], env=places, keeping=keeping, on_line=on_line)


def remove_tree(path: Path) -> None:
    """Removes a tree with any contents. Uses `rm`: an image may have folders without permissions, or very many files.
    Blocking."""
    if path.is_symlink() or not path.exists():
        path.unlink(missing_ok=True)
        return
    if os.geteuid() != 0:  # a program may have left folders that their owner cannot enter
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(path)], check=False, capture_output=True)
    completed = subprocess.run(["rm", "-rf", "--", str(path)], check=False, capture_output=True, text=True)
    if completed.returncode:
        raise ImageError(f"{path} cannot be removed: {completed.stderr.strip()[:300]}")
