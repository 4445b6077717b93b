"""Runs `report.py` from the command line: the report of two runs, and the error for a path that is not a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.trainers.environment import ROOT


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = ROOT / "examples" / "yardwork" / "report.py"
    return subprocess.run(
        [sys.executable, str(program), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def step(number: int, rewards: tuple[int, int], groups: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    """`rewards`: rollouts and passed rollouts. `groups`: all groups, those with rewards all 0, those with all 1."""
    figures = {"judged": groups[0], "all_zero": groups[1], "all_one": groups[2], "rollouts": rewards[0]}
    figures |= {"rewards": rewards[0], "reward_sum": rewards[1], "tokens_sampled": 100, "tokens_delivered": 25}
    base = {"phase": "rl", "step": number, "staleness": 0.5, "step_s": 4.0, "wait_s": 2.0, "learn_s": 1.5}
    return {
        **base,
        "push_s": 0.25,
        "figures": figures,
        "stages_s": {"init_s": 0.1, "run_s": 2.0, "eval_s": 0.05},
        "by_lag": {"0": {"tokens": 10, "mean": 0.001, "p99": 0.01, "max": 1.0}},
        **more,
    }


def test_the_report_has_tables_of_two_runs(tmp_path: Path):
    tested = {"phase": "test", "step": 0, "pass_at_1": 0.25, "low": 0.2, "high": 0.3}
    families = {name: {"pass_at": {"1": {"mean": mean}}} for name, mean in (("total", 0.25), ("chain", 0.75))}
    one = [
        {"phase": "warm", "step": 1, "pass_at_1": 0.1},
        {"phase": "warm", "step": 2, "pass_at_1": 0.2},
        {**tested, "what": "warm"},
        step(1, (10, 2), (4, 1, 1)),
        step(2, (30, 18), (6, 0, 3), pass_at_1=0.4, score_s=1.0),
        step(3, (10, 9), (2, 0, 2)),
        {**tested, "what": "rl", "pass_at_1": 0.5, "low": 0.45, "high": 0.55, "result": {"by": families}},
        {"phase": "more_warm", "step": 1, "pass_at_1": 0.21},
        {"phase": "more_warm", "step": 2, "pass_at_1": 0.3},
        {**tested, "what": "more-warm-best"},
    ]
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in one))
    (tmp_path / "seed-1.jsonl").write_text(json.dumps({**tested, "what": "warm", "phase": "test_greedy"}) + "\n")
    completed = report(tmp_path / "seed-0", tmp_path / "seed-1.jsonl", "--every", 2)
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert lines[2] == "|  | seed-0 | seed-1 |"
    assert "| warm start | 0.250 (0.200 to 0.300) |  |" in lines
    assert "| warm start, greedily |  | 0.250 (0.200 to 0.300) |" in lines
    assert "| after RL | 0.500 (0.450 to 0.550) |  |" in lines
    assert "| further warm start, at its best | 0.250 (0.200 to 0.300) |  |" in lines
    at = lines.index("|  | chain | total |")
    assert lines[at + 2 : at + 4] == ["| seed-0, after RL | 0.75 | 0.25 |", ""]
    assert "Warm start, epoch by epoch: 0.10, 0.20." in lines
    assert "Further warm start, after 1, 2, 4… epochs: 0.21, 0.30." in lines
    assert "| 1 to 2 | 0.50 | 0.50 | 0.50 | 0.75 | 0.400 |" in lines
    assert "| 3 to 3 | 0.90 | 0.00 | 0.50 | 0.75 |  |" in lines
    assert "| 4.00 s | 2.00 s | 1.50 s | 0.25 s | 0.33 s | 0.10 s | 2.00 s | 0.05 s | 4.2 |" in lines
    assert "| 0 | 30 | 0.0010 | 0.010 |" in lines


def test_a_path_that_is_not_a_run_is_refused(tmp_path: Path):
    (tmp_path / "half.jsonl").write_text('{"phase": ')
    for path in (tmp_path, tmp_path / "half.jsonl", tmp_path / "nowhere"):
        completed = report(path)
        assert completed.returncode == 1 and completed.stderr.startswith(f"{path} is not a run: "), completed.stderr
