"""`rollyard demo` with a model: real processes, sandboxes and tokens. The model is tiny;
tests/embedded/test_real_model.py uses the real one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cli.test_demo import taken_page
from tests.embedded.environment import environ
from tests.trainers.environment import trainer_python

LIMIT_S = 200.0

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(300)]


def demo(*options: str) -> list[str]:
    return [sys.executable, "-m", "rollyard", "demo", "--engine-python", str(trainer_python("local")), *options]


def played(home: Path, *options: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    environment = {**environ(home), "COLUMNS": "160"}
    return subprocess.run(demo(*options), env=environment, capture_output=True, text=True, timeout=limit_s)


@pytest.fixture(scope="module")
def base(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of the demo for the model without an adapter."""
    completed = played(tmp_path_factory.mktemp("base"), "--base", "--model", str(tiny_model), "--tasks", "1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (rollout,) = taken_page(completed.stdout)
    assert rollout["id"] == "demo-1"
    return completed.stdout


def test_the_demo_shows_rewards_and_one_trajectory_with_its_logprobs(base: str):
    output = base
    assert "tiny, untrained, sampled greedily, on 1 held-out task of yardwork" in output
    assert "1 of 1 " in output  # a line for each rollout when it ends
    assert re.search(r"[01] of 1 solved \(\d+%\): \d+ turns?, \d+ tokens sampled in .* tokens/s", output)
    assert "One trajectory: " in output and " user │ " in output and "turn 1 tokens" in output
    tokens = output.partition("turn 1 tokens")[2].partition("Next steps:")[0]
    assert len(re.findall(r"\S\(-?\d+\.\d\d\)", tokens)) >= 5  # each sampled token, with its logprob
    for command in ("rollyard serve --engine URL", "rollyard eval", "make train-demo"):
        assert command in output.partition("Next steps:")[2]


def test_an_adapter_changes_the_samples_on_the_same_tasks(
    base: str, tiny_model: Path, tiny_adapter: Path, tmp_path: Path
):
    options = ("--adapter", str(tiny_adapter), "--model", str(tiny_model), "--tasks", "1", "--temperature", "0")
    completed = played(tmp_path, *options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    taken_page(completed.stdout)
    assert "sampled greedily" in completed.stdout and "tiny with the adapter adapter" in completed.stdout
    plain, trained = (
        output.partition("One trajectory")[2].partition("Next steps:")[0].partition("turn 1 tokens")
        for output in (base, completed.stdout)
    )
    assert re.findall(r"user │ .*", plain[0]) == re.findall(r"user │ .*", trained[0]) != []
    assert plain[2] and trained[2] and plain[2] != trained[2], "the adapter was not used"


def test_an_engine_that_cannot_start_is_reported_in_one_line(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    completed = played(tmp_path, "--base", "--model", str(tmp_path / "empty"), "--tasks", "2")
    assert (
        completed.returncode == 1 and "cannot be loaded" in completed.stderr and len(completed.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize(("number", "is_rolling"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_leaves_no_process(tiny_model: Path, tmp_path: Path, number: signal.Signals, *, is_rolling: bool):
    """The signal is sent while the engine and the service start, or during the rollouts."""
    mark = uuid4().hex
    environment = {**environ(tmp_path), "DEMO_MARK": mark, "PYTHONUNBUFFERED": "1"}
    command = demo("--base", "--model", str(tiny_model), "--tasks", "200")
    with (
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            awaited = "1 of 200 " if is_rolling else "Starting the engine"
            assert any(awaited in line for line in process.stdout), (tmp_path / "errors").read_text()
            while len(marked(mark)) < 3:  # itself, its engine, its service
                assert process.poll() is None, (tmp_path / "errors").read_text()
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert marked(mark) == []
    assert "Traceback" not in (tmp_path / "errors").read_text()


def marked(mark: str) -> list[str]:
    """Returns the processes that descend from the test's own."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return commands
