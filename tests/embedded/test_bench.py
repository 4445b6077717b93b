"""`rollyard bench engine` as a person types it, with a tiny model: what is measured, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.embedded.environment import environ, make_tiny_model
from tests.trainers.environment import trainer_python

pytestmark = pytest.mark.slow

SPEEDS = {"tokens_per_s_1", "tokens_per_s_8", "tokens_per_s_32"}
ALL = SPEEDS | {"prefill_tokens_per_s", "turns_per_s"}


def test_without_the_extra_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # `make demo` may have installed it
    assert main(["bench", "engine", "--json"]) == 1
    said = capsys.readouterr()
    assert "torch" in said.err and "pip install 'rollyard[local]'" in said.err and said.out == ""


def test_an_option_of_another_bench_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "arrow", "--dtype", "float32"]) == 2
    assert "--dtype" in capsys.readouterr().err


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(trainer_python("local")), "-m", "rollyard", "bench", "engine", "--quick", "--json", *options],
        env=environ(folder),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.local
@pytest.mark.timeout(500)
def test_both_are_measured_under_the_same_names(tmp_path: Path):
    model = str(make_tiny_model(tmp_path / "tiny", tokenizer_dir()))
    done = bench(tmp_path, "--model", model, "--device", "cpu", "--tokens", "3", "--prompt", "6")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    ours, versus = found["metrics"], found["versus"]
    assert versus.keys() == {"generate", "generate_no_logprobs"}
    assert versus["generate"].keys() == ALL and versus["generate_no_logprobs"].keys() == SPEEDS
    assert all(figures[name] > 0 for figures in (ours, *versus.values()) for name in figures.keys() & ALL)
    assert ours.keys() >= ALL and (ours["tokens"], ours["prompt_tokens"]) == (3, 6)
    assert (ours["device"], ours["dtype"], ours["threads"]) == ("cpu", "float32", 1), "as the environment says"

    done = bench(tmp_path, "--model", model, "--device", "cpu", "--prompt", "4000")
    assert done.returncode == 2 and "do not fit into the model's 8192" in done.stderr and done.stdout == ""

    done = bench(tmp_path, "--model", str(tmp_path / "nothing"), "--device", "cpu")
    assert done.returncode == 1 and "cannot be loaded" in done.stderr.splitlines()[-1] and done.stdout == ""
