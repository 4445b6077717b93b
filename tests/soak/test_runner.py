"""Tests of `make soak` and `python -m tests.soak.broken`; the full-size scenarios are not run here."""

import subprocess
import sys
from pathlib import Path

import pytest

import rollyard
from tests.soak import __main__ as soak
from tests.soak.broken import DEFECTS
from tests.soak.scenarios import SCENARIOS, Figures, Scenario

PACKAGE = Path(rollyard.__file__).parent
ROOT = Path(__file__).parent.parent.parent


async def _fine(folder: Path) -> Figures:
    assert not list(folder.iterdir())
    return {"rollouts": 7}


async def _lossy(folder: Path) -> Figures:
    raise AssertionError("one rollout was lost\nand more about it")


def test_the_table_and_the_exit_status_report_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    fine, lossy = Scenario("fine", "all is well", _fine), Scenario("lossy", "loses one", _lossy)
    assert soak.run_all([fine], as_json=False) == 0
    assert "rollouts 7" in capsys.readouterr().out
    assert soak.run_all([lossy, fine], as_json=False) == 1
    captured = capsys.readouterr()
    assert "AssertionError: one rollout was lost" in captured.out and "rollouts 7" in captured.out
    assert "1 of 2: lossy (loses one)" in captured.err and "lossy: FAILED" in captured.err
    assert soak.run_all([lossy], as_json=True) == 1
    assert '"error": "AssertionError: one rollout was lost' in capsys.readouterr().out


def test_a_wrong_name_is_refused() -> None:
    argv = [sys.executable, "-m", "tests.soak", "nothing"]
    completed = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert completed.returncode == 2
    assert "there is no scenario nothing; there are: kill, draw, fleet, survive, endurance" in completed.stderr


def test_every_scenario_has_a_defect_that_its_small_form_finds() -> None:
    assert {defect.name for defect in DEFECTS} >= {scenario.name for scenario in SCENARIOS}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_every_defect_still_applies(defect) -> None:
    assert (PACKAGE / defect.file).read_text().count(defect.old) == 1
    file, _, name = defect.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
