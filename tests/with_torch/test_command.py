# pyright: reportMissingImports=false
"""`rollyard engine` on the command line: a model that cannot be served gives a one-line error with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.cli import main
from tests.with_torch.parts import tiny, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--model", "nothing"], 1, "cannot be loaded"),
        (["--max-context", "9000"], 1, "made for 8192"),
        (["--cache-gib", "0.001"], 1, "fewer than the context"),
        (["--device", "nowhere"], 1, "cannot be used"),
        (["--host", "192.0.2.1"], 1, "cannot be listened on"),  # reserved for documentation
        (["--dtype", "int3"], 2, "--dtype"),
    ],
)
def test_an_unusable_option_prints_one_line(
    model: str,
    options: list[str],
    status: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)  # "nothing" does not exist there
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["engine", "--port", "0", "--model", model, *options]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert says in last and last.startswith("rollyard: ")
