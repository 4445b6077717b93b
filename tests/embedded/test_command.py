"""`rollyard engine` on the command line, without torch: an error is one line with a remedy. The errors that need torch
are in tests/with_torch/test_command.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.cli.commands import engine
from rollyard.embedded import SHIPPED
from rollyard.embedded.shipped import find_adapter, shipped_adapter


def test_without_the_extra_the_error_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch", None)  # `make demo` may have installed it
    assert main(["engine", "--model", "anything"]) == 1
    stderr = capsys.readouterr().err
    assert "torch" in stderr and "pip install 'rollyard[local]'" in stderr and len(stderr.splitlines()) == 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that would be served. torch appears to be installed, but cannot be imported."""
    models: list[str] = []
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("rollyard.embedded.missing_packages", list)
    monkeypatch.setattr(engine, "_serve", lambda model, *_: models.append(model))
    monkeypatch.setattr(engine, "run", lambda _: None)
    return models


def test_a_port_in_use_is_refused_before_torch_is_imported(started: list[str], capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["engine", "--model", "anything", "--port", str(port)]) == 1
    stderr = capsys.readouterr().err
    assert not started and stderr == (
        f"rollyard: 127.0.0.1:{port} cannot be listened on: Address already in use — stop the program that uses this"
        " port, or give another one with --port\n"
    )


def test_a_folder_without_a_model_is_refused_before_torch_is_imported(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    command = ["engine", "--model", str(tmp_path), "--port", "0"]
    assert main(command) == 1 and not started
    assert "cannot be loaded: it has neither a config.json nor a GGUF file" in capsys.readouterr().err
    for name in ("config.json", "some.gguf"):
        (tmp_path / name).touch()
        assert main(command) == 0 and started.pop() == str(tmp_path)
        (tmp_path / name).unlink()


# --- adapters -----------------------------------------------------------------------------------------


def test_the_shipped_adapters_are_those_in_the_package():
    folder = shipped_adapter("")
    assert sorted(SHIPPED) == sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert find_adapter("yardwork") == folder / "yardwork"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("yardwrk", "there is no adapter yardwrk; did you mean yardwork? — give a folder that PEFT has written, or a"),
        ("else/where", "there is no adapter else/where — give a folder that PEFT has written, or a shipped adapter: "),
        (".", "there is no adapter in .: it has no adapter_config.json — "),
    ],
)
def test_an_unknown_adapter_is_refused_with_the_nearest_name(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["engine", "--model", "anything", "--adapter", name]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"rollyard: {says}") and "shipped adapter: yardwork" in stderr
    assert len(stderr.splitlines()) == 1


def test_a_folder_with_an_adapter_goes_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yardwork").mkdir()
    assert find_adapter("yardwork") == shipped_adapter("yardwork"), "a folder without one does not hide it"
    (tmp_path / "yardwork" / "adapter_config.json").write_text("{}")
    assert find_adapter("yardwork") == Path("yardwork")


def test_a_shipped_adapter_selects_the_weights_that_it_was_trained_on(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def get_model(name: str, source: str) -> Path:
        asked.append(f"{name} {source}")
        return tmp_path

    monkeypatch.setattr(engine, "get_model", get_model)
    (tmp_path / "config.json").touch()
    assert main(["engine", "--model", "smollm2", "--port", "0"]) == 0
    assert main(["engine", "--model", "smollm2", "--port", "0", "--adapter", "yardwork"]) == 0
    assert asked == ["smollm2 auto", "smollm2 pypi"]


def test_an_adapter_of_other_weights_is_refused_before_torch_is_imported(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert main(["engine", "--model", str(tmp_path), "--port", "0", "--adapter", "yardwork"]) == 1 and not started
    stderr = capsys.readouterr().err
    assert "belongs to other weights (sha256 7ef915c9" in stderr and len(stderr.splitlines()) == 1
