"""Where the trainers' own virtual environments are (scripts/trainer-env), and how a script of ours is run in one."""

import os
import signal
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 240.0


def trainer_python(name: str) -> Path:
    """Its interpreter; skips where it was not installed, or not with the pins of this checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("ROLLYARD_TRAINERS") or cache / "rollyard" / "trainers")
    files = [ROOT / "scripts" / "trainers" / f"{name}{ending}.txt" for ending in ("", "-nodeps")]
    pins = b"".join(file.read_bytes() for file in files if file.exists())
    if not (root / name / f".done-{sha256(pins).hexdigest()[:16]}").exists():
        pytest.skip(f"{name} is not here as pinned: scripts/trainer-env {name} installs it")
    return root / name / "bin" / "python"


def run_script(python: Path, *arguments: str | Path, environ: Mapping[str, str], log: Path, expected: int = 0) -> str:
    """What it printed; its exit status must be the expected one. Its process and what that started are gone
    afterwards."""
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(log.parent / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    quiet["OMP_NUM_THREADS"] = "1"  # beside the service, more of them only wait for each other
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(python), *map(str, arguments)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **quiet, **paths, **environ},
        )
        try:
            status = process.wait(LIMIT_S)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    printed = log.read_text(errors="replace")
    assert status == expected, printed[-6000:]
    return printed
