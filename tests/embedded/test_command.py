"""`rollyard engine` as a person types it: what is wrong is one line that says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollyard.cli import main
from tests.embedded.environment import commands

pytestmark = pytest.mark.slow


def test_without_the_extra_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # `make demo` may have installed it
    assert main(["engine", "--model", "anything"]) == 1
    said = capsys.readouterr().err
    assert "torch" in said and "pip install 'rollyard[local]'" in said and len(said.splitlines()) == 1


@pytest.mark.local
@pytest.mark.timeout(300)
def test_what_cannot_be_served_is_one_line(tiny_model: Path, tmp_path: Path):
    model = str(tiny_model)
    cases = (
        (["--model", str(tmp_path / "nothing")], 1, "cannot be loaded"),
        (["--model", model, "--max-context", "9000"], 1, "made for 8192"),
        (["--model", model, "--cache-gib", "0.002"], 1, "fewer than the context"),
        (["--model", model, "--device", "nowhere"], 1, "cannot be used"),
        (["--model", model, "--host", "192.0.2.1"], 1, "cannot be listened on"),  # of no machine
        (["--model", model, "--dtype", "int3"], 2, "--dtype"),
    )
    found = commands(tmp_path, *(["engine", "--port", "0", *options] for options, _, _ in cases))
    for done, (_, status, words) in zip(found, cases, strict=True):
        last = done.stderr.splitlines()[-1]
        assert done.returncode == status and words in last and last.startswith("rollyard: "), done
