"""serve, config, doctor and bench: commands for this machine."""

import asyncio
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.report import machine, picture, show_result
from rollyard.cli.commands.bench import BENCHES
from tests.cli.conftest import Cli

pytestmark = pytest.mark.slow


async def test_config_shows_no_password_of_a_store(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLYARD_STORE", "postgresql://rollyard:hunter2@db.example/rollouts")
    for options in ((), ("--json",)):
        result = await cli("config", *options)
        assert "postgresql://rollyard@db.example/rollouts" in result.out and "hunter2" not in result.out


async def test_config_shows_values_and_their_sources(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rollyard.toml").write_text('run_slots = 9\n[[engines]]\nurl = "http://e:1"\napi_key = "hidden-key"\n')
    monkeypatch.setenv("ROLLYARD_EVAL_SLOTS", "7")
    monkeypatch.setenv("ROLLYARD_ADMIN_TOKENS", "hidden-token-hidden")
    (settings,) = (await cli("config", "--json")).json
    assert settings["run_slots"] == {"value": 9, "source": "file rollyard.toml"}
    assert settings["eval_slots"] == {"value": 7, "source": "env ROLLYARD_EVAL_SLOTS"}
    assert settings["init_slots"]["source"] == "default"
    assert settings["engines"]["value"][0]["url"] == "http://e:1"
    result = await cli("config")
    assert result.status == 0 and "env ROLLYARD_EVAL_SLOTS" in result.out and "********" in result.out
    assert "hidden" not in result.out + json.dumps(settings)


async def test_an_invalid_setting_is_reported_in_one_line(cli: Cli, tmp_path: Path):
    (tmp_path / "rollyard.toml").write_text("run_slot = 9\n")
    result = await cli("config")
    assert (result.status, result.out) == (1, "")
    assert "did you mean run_slots?" in result.err and result.err.count("\n") == 1


async def test_doctor_checks_this_machine(cli: Cli, tmp_path: Path):
    result = await cli("doctor", "--json")
    checks = {check["name"]: check for check in result.json}
    assert checks["local: start"]["state"] == "ok"
    assert {"bubblewrap: start", "apptainer: apptainer", "oci: engine"} <= set(checks)
    assert {"user namespaces", "open files", "pseudo terminals", "data_dir", "memory", "/dev/fuse", "cgroups"} <= set(
        checks
    )
    assert checks["tokenizers"]["state"] == checks["portable Python"]["state"] == "ok"
    assert [check for check in checks.values() if check["state"] != "ok" and not check["remedy"]] == []
    assert result.status == (1 if any(check["state"] == "fail" for check in checks.values()) else 0)
    for name in ("bubblewrap", "apptainer", "oci"):
        if checks.get(f"{name}: start", {}).get("state") == "ok":
            tried = ("seccomp", "capabilities", "nested namespaces", "network", "doorway", "user", "layers")
            assert {checks[f"{name}: {feature}"]["state"] for feature in tried} == {"ok"}
            limits = ("memory limit", "processes limit", "cpu limit", "open files limit")
            assert all(checks[f"{name}: {limit}"]["detail"] for limit in limits)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


async def test_doctor_ends_with_1_if_the_default_runtime_is_missing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = await cli("doctor")
    assert result.status == 1
    assert "bwrap was not found" in result.out and "apt-get install bubblewrap" in result.out
    assert "does not work on this machine" in result.err
    monkeypatch.setenv("ROLLYARD_RUNTIMES", "local")
    assert (await cli("doctor")).status == 0


async def test_a_service_is_found_by_its_data_folder_and_ends_on_sigterm(cli: Cli, tmp_path: Path, monkeypatch):
    data = tmp_path / "data"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "serve", "--port", "0", "--data-dir", str(data), "--runtime", "local",
        "--run-slots", "3", env={**os.environ, "HOME": str(tmp_path)}, stderr=asyncio.subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        async with asyncio.timeout(90):
            output = b""
            while b" at http://127.0.0.1:" not in output:
                output += (line := await process.stderr.readline())
                assert line, output.decode()
            monkeypatch.setenv("ROLLYARD_DATA_DIR", str(data))
            (status,) = (await cli("top", "--once", "--json")).json
            assert status["pools"]["run"]["size"] == 3
            assert set(status["runtimes"]) >= {"local"} and status["runtimes"]["local"]["is_default"]
            process.terminate()
            output += await process.stderr.read()
            assert b"#code=" not in output, "only terminals get a link that signs in"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def test_serve_beyond_loopback_needs_tokens(tmp_path: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "serve", "--host", "0.0.0.0", "--port", "0", "--runtime", "local",
        "--data-dir", str(tmp_path / "d"),
        env={**os.environ, "HOME": str(tmp_path)}, stderr=asyncio.subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    _, stderr = await asyncio.wait_for(process.communicate(), 40)
    assert process.returncode == 1
    assert b"set admin_tokens" in stderr and b"Traceback" not in stderr


async def test_benches_are_listed(cli: Cli):
    assert [line["bench"] for line in (await cli("bench", "--json")).json] == list(BENCHES)


@pytest.mark.parametrize("name", ["shell", "survive", "endurance"])
async def test_a_bench_with_an_unknown_runtime_is_wrong_usage(cli: Cli, name: str):
    result = await cli("bench", name, "--runtime", "chroot")
    assert result.status == 2 and "there is no runtime 'chroot'" in result.err


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_defined(name: str):
    assert asyncio.iscoroutinefunction(getattr(import_module(f"bench.{name}"), f"bench_{name}"))


def test_the_machine_is_described():
    description = machine()
    assert list(description) == ["cpu", "cores", "memory_gb", "kernel", "python", "rollyard"]
    assert all(description.values())


def test_a_result_is_shown_beside_its_peers(capsys: pytest.CaptureFixture[str]):
    peers = {"tmux": {"echo_p50_ms": 510.0}, "swe-rex": {"echo_p50_ms": 105, "extra_s": 1}}
    show_result({"metrics": {"echo_p50_ms": 0.2, "commands_per_s": 8700}, "versus": peers, "machine": machine()})
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if "echo_p50_ms" in line)
    assert row == ["echo_p50_ms", "0.2", "510", "(2,550×)", "105", "(525×)"]
    assert "8,700" in out and "extra_s" in out and "cores: " in out and "█" in out


def test_the_headline_is_drawn_as_bars_if_there_is_a_peer():
    peers = {"slow": {"echo_p50_ms": 120.0}, "broken": {"error": "it could not be installed"}}
    lines = picture({"metrics": {"echo_p50_ms": 0.12, "start_p50_ms": 8}, "versus": peers})
    assert lines[0] == "echo_p50_ms (logarithmic)"
    own_bar, peer_bar = (line.count("█") for line in lines[1:])
    assert 0 < own_bar < peer_bar == 40
    near = picture({"metrics": {"peak_turns_per_s": 600}, "versus": {"slow": {"peak_turns_per_s": 300}}})
    assert [line.count("█") for line in near[1:]] == [40, 20]
    assert picture({"metrics": {"echo_p50_ms": 0.12}, "versus": {}}) == []
