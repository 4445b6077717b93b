"""Finds the trainers' virtual environments (scripts/trainer-env), and runs scripts in them."""

import os
import signal
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 240.0


def trainer_python(name: str) -> Path:
    """Returns its interpreter; skips the test if it is not installed with the pins of this checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("ROLLYARD_TRAINERS") or cache / "rollyard" / "trainers")
    files = [ROOT / "scripts" / "trainers" / f"{name}{ending}.txt" for ending in ("", "-nodeps")]
    pins = b"".join(file.read_bytes() for file in files if file.exists())
    if not (root / name / f".done-{sha256(pins).hexdigest()[:16]}").exists():
        pytest.skip(f"{name} is not installed as pinned: run scripts/trainer-env {name}")
    return root / name / "bin" / "python"


def run_script(python: Path, *arguments: str | Path, environ: Mapping[str, str], log: Path) -> str:
    """Runs a script and returns its output. Ends its process group afterwards."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(python), *map(str, arguments)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**_environ(log), **environ},
        )
        try:
            status = process.wait(LIMIT_S)
        finally:
            _end_group(process)
    printed = log.read_text(errors="replace")
    assert status == 0, printed[-6000:]
    return printed


class Script:
    """A script in its own process. It executes each line of its stdin, and prints `ended with` and the exit status."""

    def __init__(self, python: Path, file: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=_environ(log),
            )

    def execute(self, line: str, expected: int = 0) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        status = next((output.split()[-1] for output in self._process.stdout if "ended with" in output), "nothing")
        assert status == str(expected), f"{status}: {self._log.read_text(errors='replace')[-6000:]}"

    def end(self) -> None:
        """Ends the process group."""
        _end_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _environ(log: Path) -> dict[str, str]:
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(log.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    quiet["OMP_NUM_THREADS"] = "1"  # with a service on the machine, more threads only wait for each other
    return {**os.environ, **quiet, **paths}


def _end_group(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
