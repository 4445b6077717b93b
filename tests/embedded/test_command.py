"""`rollyard engine` as a person types it: what is wrong is one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.embedded.environment import environ, make_tiny_model
from tests.trainers.environment import trainer_python

pytestmark = pytest.mark.slow


def test_without_the_extra_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # `make demo` may have installed it
    assert main(["engine", "--model", "anything"]) == 1
    said = capsys.readouterr().err
    assert "torch" in said and "pip install 'rollyard[local]'" in said and len(said.splitlines()) == 1


def said_by(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(trainer_python("local")), "-m", "rollyard", "engine", "--port", "0", *options],
        env=environ(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.local
@pytest.mark.timeout(300)
def test_what_cannot_be_served_is_one_line(tmp_path: Path):
    model = str(make_tiny_model(tmp_path / "tiny", tokenizer_dir()))
    for options, status, words in (
        (["--model", str(tmp_path / "nothing")], 1, "cannot be loaded"),
        (["--model", model, "--max-context", "9000"], 1, "made for 8192"),
        (["--model", model, "--cache-gib", "0.002"], 1, "fewer than the context"),
        (["--model", model, "--device", "nowhere"], 1, "cannot be used"),
        (["--model", model, "--dtype", "int3"], 2, "--dtype"),
    ):
        found = said_by(tmp_path, *options)
        assert found[0] == status and words in found[1] and found[1].startswith("rollyard: "), found
