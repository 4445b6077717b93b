"""`overlap.py` as a person starts it, with a tiny model: both ways, on one engine and one service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.embedded.environment import environ, make_tiny_model
from tests.trainers.environment import ROOT, trainer_python

pytestmark = [pytest.mark.local, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "examples" / "yardwork"
MAKE_ADAPTER = """
import sys
from argparse import Namespace
from pathlib import Path
from learner import Learner
Learner(Namespace(model=sys.argv[1], rank=4, device="cpu", seed=1, bf16=False)).save_adapter(Path(sys.argv[2]))
"""


def test_both_ways_are_measured_on_one_service(tmp_path: Path):
    model, adapter, out = make_tiny_model(tmp_path / "tiny", tokenizer_dir()), tmp_path / "adapter", tmp_path / "out"
    python, env = str(trainer_python("local")), environ(tmp_path)
    made = [python, "-c", MAKE_ADAPTER, str(model), str(adapter)]
    subprocess.run(made, check=True, env=env, cwd=EXAMPLES, timeout=120)
    command = [python, str(EXAMPLES / "overlap.py"), "--start", str(adapter), "--out", str(out), "--json"]
    command += ["--latency-s", "0.05", "--steps", "3", "--skip", "1"]
    services = ["--model", str(model), "--service-python", sys.executable, "--device", "cpu", "--run-slots", "4"]
    train = ["--want", "1", "--group-size", "2", "--rank", "4", "--levels", "1", "--families", "find_content"]
    train += ["--keep", "all", "--max-turns", "2", "--rounds", "1", "--minibatches", "1"]
    done = subprocess.run(
        [*command, "--", *services, "--cache-gib", "0.1", "--", *train], env=env, capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found = json.loads(done.stdout)
    both = [found["decoupled_0.05"], found["coupled_0.05"]]
    for one in both:
        assert one["tokens_per_s"] > 0 and one["step_s"] >= one["learn_s"] > 0
        assert one["gpu_busy_share"] is None
    assert both[1]["staleness"] == 0
    assert found["ratio_0.05"] == pytest.approx(both[0]["tokens_per_s"] / both[1]["tokens_per_s"])
    for name in ("decoupled-0.05", "coupled-0.05"):
        lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path):
    command = [str(trainer_python("local")), str(EXAMPLES / "overlap.py"), "--start", "x", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environ(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "is there already: give another --out" in done.stderr
    assert not any(tmp_path.iterdir())
