"""`rollyard engine` on the command line, without torch: an error is one line with a remedy. The errors that need torch
are in tests/with_torch/test_command.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.cli.commands import engine


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
