"""`alone.py` stops what it started, and reports what cannot start in one sentence."""

from __future__ import annotations

import ast
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.cli.test_demo_model import marked
from tests.embedded.environment import environ
from tests.trainers.environment import ROOT, trainer_python

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(200)]


def command(model: Path, folder: Path) -> list[str]:
    places = ["--model", str(model), "--data", str(folder / "data"), "--service-python", sys.executable]
    trained = ["--out", str(folder / "out"), "--demonstrations", "4", "--test-tasks", "2", "--levels", "1"]
    program = str(ROOT / "examples" / "yardwork" / "alone.py")
    return [str(trainer_python("local")), program, *places, "--device", "cpu", "--", *trained]


def test_an_engine_whose_port_is_taken_is_reported_without_a_traceback(tiny_model: Path, tmp_path: Path):
    (tmp_path / "data").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "data" / "engine-port").write_text(str(taken.getsockname()[1]))
        completed = subprocess.run(
            command(tiny_model, tmp_path),
            env=environ(tmp_path) | {"PYTHONPROFILEIMPORTTIME": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert completed.returncode == 1
    assert "cannot be listened on: Address already in use" in completed.stderr
    assert "rollyard engine ended with 1" in completed.stderr and "Traceback" not in completed.stderr
    assert not re.search(r"\| +torch$", completed.stderr, re.MULTILINE), "it takes seconds to import, and is not needed"


def inside(folder: Path, script: str, program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that imports `alone`, with a script instead of `train.py`. There is no MPS."""
    (folder / "train.py").write_text(script)
    environment = {**environ(folder), "CUDA_MPS_PIPE_DIRECTORY": str(folder / "none")}
    environment["PYTHONPATH"] += f":{ROOT / 'examples' / 'yardwork'}"
    place = f"import alone, pathlib; alone.TRAIN = pathlib.Path({str(folder / 'train.py')!r})\n"
    command = [str(trainer_python("local")), "-c", place + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_only_the_trainer_gets_a_share_of_the_gpu(tmp_path: Path):
    script = "import os; print({n: v for n, v in os.environ.items() if 'CUDA_MPS' in n})"
    completed = inside(tmp_path, script, "alone.train([], 30); alone.train([])")
    first, second = map(ast.literal_eval, completed.stdout.splitlines())
    assert first.items() - second.items() == {
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30"),
        ("CUDA_MPS_CLIENT_PRIORITY", "1"),
    }
    assert "--trainer-share has no effect" in completed.stderr


def test_one_process_runs_several_trainings_and_always_ends(tmp_path: Path):
    script = """
import os, sys, time
for line in sys.stdin:
    if "bad" in line:
        sys.exit(3)
    print("got", sys.argv[1:], line.strip(), os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    print("this training is over", flush=True)
    if "endless" in line:
        time.sleep(3600)
"""
    program = """
with alone.trainer(["--fixed"], 30) as run:
    print(run(["--out", "a b"]), run(["good"]), run(["bad"]))
try:
    with alone.trainer([], 30) as run:
        run(["endless"])
        raise KeyError
except KeyError:
    print("gone")
"""
    completed = inside(tmp_path, script, program)
    assert completed.stdout.splitlines() == ["True True False", "gone"], completed.stderr
    assert (
        "got ['--fixed', '-'] --out 'a b' 30\n" in completed.stderr
        and "got ['--fixed', '-'] good 30\n" in completed.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_it_ends_the_processes_that_it_started(tiny_model: Path, tmp_path: Path, number: signal.Signals):
    mark = uuid4().hex
    environment = {**environ(tmp_path), "ALONE_MARK": mark}
    with (
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(command(tiny_model, tmp_path), env=environment, stdout=errors, stderr=errors) as process,
    ):
        try:
            while not {"alone.py", "engine", "serve", "train.py"} <= (running := words(mark)):
                assert process.poll() is None, (tmp_path / "errors").read_text()
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL), running
            give_up = time.monotonic() + 60
            while (remaining := marked(mark)) and time.monotonic() < give_up:  # they get a signal and end by themselves
                time.sleep(0.1)
            assert remaining == []
        finally:
            process.kill()


def words(mark: str) -> set[str]:
    """The words of the command lines of the started processes, without folders."""
    return {Path(word).name for line in marked(mark) for word in line.split()}
