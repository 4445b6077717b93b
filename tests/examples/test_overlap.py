"""Runs `overlap.py` from the command line, with a tiny model: each variant, on one engine and one service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.embedded.environment import environ
from tests.trainers.environment import ROOT, trainer_python

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "examples" / "yardwork"


def test_each_variant_is_measured_on_one_service(tiny_model: Path, tiny_adapter: Path, tmp_path: Path):
    python, env, out = str(trainer_python("local")), environ(tmp_path), tmp_path / "out"
    command = [python, str(EXAMPLES / "overlap.py"), "--start", str(tiny_adapter), "--out", str(out), "--json"]
    command += ["--latency-s", "0.05", "--steps", "3", "--skip", "1", "--warm-up", "1"]
    services = ["--model", str(tiny_model), "--service-python", sys.executable, "--device", "cpu", "--run-slots", "4"]
    train = ["--want", "1", "--group-size", "2", "--rank", "4", "--levels", "1", "--families", "find_content"]
    train += ["--keep", "all", "--max-turns", "2", "--rounds", "1", "--minibatches", "1"]
    argv = [*command, "--", *services, "--cache-gib", "0.1", "--", *train]
    try:
        completed = subprocess.run(argv, env=env, capture_output=True, timeout=280)
    except subprocess.TimeoutExpired as late:
        logs = "".join(f"\n{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in out.rglob("*log*"))
        pytest.fail(f"it did not end: {(late.stderr or b'').decode()[-4000:]}{logs}")
    assert completed.returncode == 0, completed.stderr.decode()[-4000:]
    figures = json.loads(completed.stdout)
    assert json.loads((out / "overlap.json").read_text()) == figures
    ways = {name: figures[f"{name}_0.05"] for name in ("decoupled", "coupled", "coupled_oversampled")}
    for name, one in ways.items():
        assert one["tokens_per_s"] > 0 and one["step_s"] >= one["learn_s"] > 0
        assert one["gpu_busy_share"] is None and one["run_s"] > 0
        assert name != "coupled" or one["thrown_away_share"] == 0  # all groups are kept, and no surplus is started
        lines = [json.loads(line) for line in (out / f"{name}-0.05" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert (out / f"warm-up-{name}" / "metrics.jsonl").read_text().count("\n") == 1
        assert name == "decoupled" or {lag for line in lines for lag in line["by_lag"]} == {"0"}
        assert f"{name} at a tool latency of 0.05 s: {one['tokens_per_s']:.0f} tokens/s" in completed.stderr.decode()
    decoupled, *others = (one["tokens_per_s"] for one in ways.values())
    ratios = [figures["ratio_coupled_0.05"], figures["ratio_coupled_oversampled_0.05"]]
    assert ratios == pytest.approx([decoupled / other for other in others])
    for way in ("coupled", "coupled_oversampled"):
        low, high = figures[f"range_{way}_0.05"]
        assert low <= figures[f"ratio_{way}_0.05"] <= high


def test_an_existing_folder_is_refused_and_not_changed(tmp_path: Path):
    command = [str(trainer_python("local")), str(EXAMPLES / "overlap.py"), "--start", "x", "--out", str(tmp_path)]
    completed = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, timeout=60)
    assert completed.returncode == 1 and "already exists: choose another --out" in completed.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--steps", "2", "--skip", "2"), "--skip must be less than --steps"),
        (("--warm-up", "-1"), "--warm-up 0 or more"),
        (("--latency-s", "0.1", "1", "0.1"), "must not repeat a value"),
        (("--ways", "coupled", "coupled"), "must not repeat a value"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(tmp_path: Path, arguments: Sequence[str], says: str):
    out = tmp_path / "out"
    command = [
        str(trainer_python("local")),
        str(EXAMPLES / "overlap.py"),
        "--start",
        "x",
        "--out",
        str(out),
        *arguments,
    ]
    completed = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, timeout=60)
    assert completed.returncode == 2 and says in completed.stderr and not out.exists()
