"""The systemd units: accepted by systemd, with commands that exist, and with nothing that breaks sandboxes."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from rollyard.cli.app import app
from rollyard.service.settings import Settings, load_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
UNITS = ["rollyard.service", "rollyard-node.service", "user/rollyard.service"]
BREAKS_SANDBOXES = {
    *("LockPersonality", "MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers", "ProcSubset"),
    *("ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelTunables", "ProtectProc"),
    *("RestrictAddressFamilies", "RestrictNamespaces", "RestrictSUIDSGID", "SystemCallFilter"),
}


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment]  # names keep their case
    parser.read(FOLDER / name)
    return parser


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path):
    text, path = (FOLDER / name).read_text(), tmp_path / Path(name).name
    for program in ("/opt/rollyard/bin/rollyard", "%h/.local/bin/rollyard"):
        text = text.replace(program, "/bin/true")
    argv = ["systemd-analyze", "verify", "--man=no", *(["--user"] if name.startswith("user/") else []), str(path)]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    for wrong in ("", "Delegat=yes\n"):
        path.write_text(text.replace("[Install]", f"{wrong}[Install]"))
        completed = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
        said = [line for line in completed.stderr.splitlines() if path.name in line]
        assert bool(said) == bool(wrong), completed.stderr
        assert completed.returncode == 0 or wrong, completed.stderr


@pytest.mark.parametrize("name", UNITS)
def test_sandboxes_work_in_the_unit(name: str):
    service = unit(name)["Service"]
    assert not BREAKS_SANDBOXES & service.keys()
    assert service["Delegate"] == "yes", "cgroups for sandboxes"
    assert service["KillMode"] == "mixed", "SIGTERM must not reach commands in sandboxes"
    assert float(service["TimeoutStopSec"]) > Settings.model_fields["drain_s"].default
    assert service["NoNewPrivileges"] == "yes"


@pytest.mark.parametrize("name", UNITS)
def test_the_command_and_its_options_exist(name: str):
    _, command, *arguments = unit(name)["Service"]["ExecStart"].split()
    known = {option for parameter in get_command(app).commands[command].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_the_example_settings_are_valid(tmp_path: Path):
    uncommented = (FOLDER / "rollyard.toml").read_text().replace("# host", "host").replace("# admin_", "admin_")
    tokens = tmp_path / "admin-tokens"
    tokens.write_text("x" * 40)
    (tmp_path / "rollyard.toml").write_text(uncommented.replace("/etc/rollyard/admin-tokens", str(tokens)))
    settings = load_settings({}, {}, tmp_path / "rollyard.toml").settings
    assert settings.host == "10.0.0.1" and len(settings.engines) == len(settings.admin_tokens) == 1
