"""`rollyard demo` without a model: missing requirements are reported in one line; a script can replace the model."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollyard.cli import main
from rollyard.cli.demo.model import TRAINED, demo_tasks
from rollyard.embedded.weights import weights_digest
from rollyard.exports.reading import read_rollouts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
ANY_PYTHON = ("--engine-python", sys.executable)  # it is not checked for torch; no test here starts it


@pytest.mark.timeout(120)
def test_the_scripted_demo_names_the_scripted_engine_and_shows_each_turn_in_a_log():
    command = [sys.executable, "-m", "rollyard", "demo", "--scripted"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert completed.returncode == 0, completed.stderr
    assert "scripted engine" in completed.stdout
    log, _, results = completed.stdout.partition("Eight rollouts")
    assert log.index("Starting the engine") < log.index("turn 1: shell ls -R") < log.index(": completed, reward 1, ")
    assert log.count(": completed, reward ") == results.count("completed") == 7
    assert "turn_limit" in log and "turn_limit" in results
    assert "sampled in 3 calls" in completed.stdout
    rollouts = taken_page(completed.stdout)
    assert len(rollouts) == 8 and all(one["trajectory"]["messages"] for one in rollouts)


def taken_page(output: str) -> list[dict[str, Any]]:
    """The rollouts of the page that the last line of the demo links. The page, which the demo keeps, is deleted."""
    *_, last = output.splitlines()
    assert last.startswith("Look at these rollouts: file:///")
    page = Path(urlsplit(last.split()[-1]).path)
    try:
        return [one.record for one in read_rollouts(page)]
    finally:
        shutil.rmtree(page.parent)


def test_a_missing_extra_is_reported_with_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("torch", "transformers"):  # `make demo` may have installed them
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == 1
    stderr = capsys.readouterr().err
    assert "torch and transformers, which are not installed" in stderr and "pip install 'rollyard[local]'" in stderr
    assert "rollyard demo --scripted" in stderr and len(stderr.splitlines()) == 1


def test_missing_bubblewrap_is_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for options in ((), ("--scripted",)):
        assert main(["demo", *options]) == 1
        stderr = capsys.readouterr().err
        assert "bubblewrap" in stderr and "apt-get install bubblewrap" in stderr and len(stderr.splitlines()) == 1


def test_a_package_without_an_adapter_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("rollyard.embedded.shipped.shipped_adapter", lambda name: tmp_path)
    assert main(["demo", "--model", str(tmp_path), *ANY_PYTHON]) == 1
    stderr = capsys.readouterr().err
    assert "no trained adapter" in stderr and "--base" in stderr and len(stderr.splitlines()) == 1


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    adapter.mkdir()
    (model / "model.safetensors").write_bytes(b"some weights")
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter.json").write_text(json.dumps({"base_digest": "0" * 64}))
    assert main(["demo", "--model", str(model), "--adapter", str(adapter), *ANY_PYTHON]) == 1
    stderr = capsys.readouterr().err
    assert "belongs to other weights" in stderr and weights_digest(model) in stderr and len(stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--base", "--adapter", "somewhere"], "--base is the model without an adapter"),
        (["--scripted", "--base"], "--scripted has its own tasks and answers"),
        (["--scripted", "--tasks", "3"], "--scripted has its own tasks and answers"),
        (["--tasks", "0"], "--tasks"),
        (["--adapter", "/nowhere", "--model", "/", *ANY_PYTHON], "there is no adapter in /nowhere"),
    ],
)
def test_wrong_usage_is_one_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", *options]) == 2
    stderr = capsys.readouterr().err
    assert says in stderr and len(stderr.splitlines()) == 1


def test_the_tasks_are_held_out_and_spread_over_families_and_levels():
    data = [task["data"] for task in demo_tasks(12)]
    assert {one["split"] for one in data} == {"held_out"}
    assert {one["family"] for one in data[: len(TRAINED)]} == set(TRAINED)
    levels = [one["level"] for one in data]
    assert set(levels) == {1, 2} and min(levels.count(1), levels.count(2)) >= 4
    everything = [json.dumps(task) for task in demo_tasks(2 * len(TRAINED) + 5)]
    assert len(set(everything)) == len(everything)
    assert {task["data"]["family"] for task in demo_tasks(2 * len(TRAINED))} == set(TRAINED)
    assert demo_tasks(5) == demo_tasks(12)[:5]


def test_the_demo_installs_the_tested_versions_and_changes_no_locked_package():
    def pins(file: str) -> dict[str, str]:
        matches = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE)
        return {name.lower().replace("_", "-"): version for name, version in matches}

    local = pins("requirements-local.txt")
    assert {"torch", "transformers"} <= set(local)
    assert local.items() <= pins("scripts/trainers/local.txt").items()
    assert not set(local) & set(pins("requirements.lock"))
