"""The batch script of `rollyard slurm`, and the errors without Slurm. Nothing is submitted here."""

import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.cli import _slurm_job
from rollyard.fleet.slurm import JobSpec, SlurmError, script
from rollyard.fleet.slurm_jobs import SlurmCluster
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

VLLM = "vllm serve 'my model' --host {host} --port {port} --seed $SEED"


def spec(**fields: object) -> JobSpec:
    places = {"folder": Path("/shared/yard"), "python": Path("/venv/bin/python"), "service_dir": Path("/disk/yard")}
    return JobSpec(**{**places, **fields})  # type: ignore[arg-type]


def lines_of(text: str) -> list[str]:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)  # the syntax is valid
    return text.splitlines()


def test_all_sbatch_lines_come_before_the_first_command():
    lines = lines_of(
        script(
            spec(
                nodes=4,
                uses_ray=True,
                partition="cpu",
                account="lab",
                qos="high",
                time="24:00:00",
                gres="gpu:8",
                mem="64G",
                cpus=16,
                drain_s=30.0,
                extra=("#SBATCH --constraint=nvme",),
            )
        )
    )
    head = lines[: next(i for i, line in enumerate(lines) if line and not line.startswith("#"))]
    asked = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")}
    assert lines[0] == "#!/bin/bash"
    assert asked == {
        *("--job-name=rollyard", "--nodes=4", "--ntasks-per-node=1", "--partition=cpu", "--account=lab", "--qos=high"),
        *("--time=24:00:00", "--gres=gpu:8", "--mem=64G", "--cpus-per-task=16", "--output=/shared/yard/job.log"),
        *("--open-mode=append", "--requeue", "--no-kill", "--signal=B:USR1@90", "--constraint=nvme"),
    }


def test_without_cpus_the_job_takes_whole_nodes_with_all_their_memory():
    lines = lines_of(script(spec()))
    assert "#SBATCH --exclusive" in lines and "#SBATCH --mem=0" in lines


def test_one_node_needs_no_ray_and_several_do():
    assert "USES_RAY=0 REQUEUES=1" in lines_of(script(spec()))
    assert "USES_RAY=1 REQUEUES=0" in lines_of(script(spec(nodes=2, uses_ray=True, is_requeued=False)))
    with pytest.raises(SlurmError, match="several nodes need Ray"):
        spec(nodes=2)


def test_an_engines_command_is_left_to_the_shell_unchanged():
    lines = lines_of(script(spec(engine_command=VLLM, nodes=3, uses_ray=True, engine_nodes=2)))
    assert """  vllm serve 'my model' --host "$ENGINE_HOST" --port "$ENGINE_PORT" --seed $SEED""" in lines
    assert "ENGINE_NODES=2  # number of this job's nodes with an engine" in lines
    with pytest.raises(SlurmError, match=r"does not contain \{port\}"):
        spec(engine_command="vllm serve m")


def test_words_with_blanks_are_quoted():
    lines = lines_of(script(spec(engines=("http://a:1", "http://b c"), settings={"images": "/a b,/c"})))
    assert "ENGINES=(http://a:1 'http://b c')" in lines
    assert "export ROLLYARD_IMAGES='/a b,/c'" in lines


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"folder": Path("/shared/my yard")}, "cannot be used in a batch script"),
        ({"scratch": "/a/very/long/path/to/scratch"}, "at most 24"),
        ({"extra": ("--constraint=x",)}, "is not an #SBATCH line"),
        ({"extra": ("#SBATCH -x\nrm -r /",)}, "is not an #SBATCH line"),
    ],
)
def test_invalid_job_specs_are_refused_before_the_submit(fields: dict[str, object], why: str):
    with pytest.raises(SlurmError, match=why):
        spec(**fields)


def function(name: str) -> str:
    """Returns one of the script's functions, to be called by a test."""
    body = script(spec())
    begin = body.index(f"\n{name}() {{")
    return body[begin : body.index("\n}\n", begin) + 3]


def test_a_scratch_folder_of_another_user_is_not_used(tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    call = f'say() {{ echo "$@"; }}; SLURMD_NODENAME=n1{function("make_scratch")}make_scratch && echo made'

    def output_of(name: str) -> str:
        environ = {"PATH": "/usr/bin:/bin", "SCRATCH": str(tmp_path / name)}
        return subprocess.run(["bash", "-c", call], env=environ, capture_output=True, text=True, check=False).stdout

    assert output_of("new") == output_of("new") == "made\n"
    assert output_of("link") == f"{tmp_path}/link on n1 is a link or belongs to another user\n"
    if os.geteuid() == 0:
        os.chown(tmp_path / "theirs", 65534, 65534)
        assert output_of("theirs") == f"{tmp_path}/theirs on n1 is a link or belongs to another user\n"


def test_the_jobs_variables_do_not_reach_what_the_script_starts():
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n", "PMIX_RANK": "0", "PMI_FD": "3"}
    more = {"SBATCH_ACCOUNT": "a", "SRUN_DEBUG": "3", "ROLLYARD_RUN_SLOTS": "4"}
    completed = subprocess.run(
        ["bash", "-uc", function("bare") + "bare env"],
        env={**environ, **more},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.partition("=")[0] for line in completed.stdout.splitlines()}
    assert names - {"PWD", "SHLVL", "_"} == {"PATH", "ROLLYARD_RUN_SLOTS"}


def test_secret_files_are_readable_by_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho '17;yard'\n")
    sbatch.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cluster = SlurmCluster(tmp_path / "yard")
    store = "postgresql://me:pa55w0rd@db/yard"
    assert cluster.submit(spec(folder=tmp_path / "yard"), store) == "17" == cluster.job_id
    files = {path.name: path for path in cluster.folder.iterdir()}
    assert set(files) == {"token", "ray-token", "store-url", "job.sh", "cluster.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    token, ray_token = (files[name].read_text().strip() for name in ("token", "ray-token"))
    assert token != ray_token and len(token) > 40
    for secret in (token, ray_token, "pa55w0rd"):
        assert secret not in files["job.sh"].read_text()
    cluster.submit(spec(folder=tmp_path / "yard"))
    assert files["token"].read_text().strip() == token, "an existing token is kept"
    assert not files["store-url"].exists()


async def test_a_dry_run_prints_the_script_and_does_nothing(cli: Cli, tmp_path: Path):
    result = await cli(
        *("slurm", "up", "--dry-run", "--nodes", 2, "--run-slots", 64, "--runtime", "bubblewrap"),
        *("--data-dir", tmp_path / "yard", "--setup", "module load x", "--engine", "http://gpu1:8000"),
    )
    assert (result.status, result.err) == (0, "")
    lines = lines_of(result.out)
    assert {"export ROLLYARD_RUN_SLOTS=64", "export ROLLYARD_RUNTIME=bubblewrap", "  module load x"} <= set(lines)
    assert f"FOLDER={tmp_path}/yard  # tokens, logs and the service's address; shared by all nodes" in lines
    assert "ENGINES=(http://gpu1:8000)" in lines
    assert not (tmp_path / "yard").exists()


@pytest.mark.parametrize("command", ["up", "status", "down"])
async def test_without_slurm_the_command_fails_with_an_error(
    cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = await cli("slurm", command)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("rollyard: this machine has no Slurm: sbatch is not in PATH — ")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kind", "vllm"], "need an engine"),
        (["--engine-command", "vllm serve m"], "does not contain {port}"),
        (["--nodes", "2", "--no-ray"], "several nodes need Ray"),
    ],
)
async def test_wrong_usage_is_reported(cli: Cli, argv: list[str], says: str):
    result = await cli("slurm", "up", "--dry-run", *argv)
    assert (result.status, result.out) == (2, "") and says in result.err


@pytest.mark.parametrize(
    ("fields", "store", "why"),
    [
        ({}, "", "does not support sandboxes"),
        ({}, "postgresql://db/yard", "does not support sandboxes"),
        ({"uses_ray": True}, "", "does not support its SQLite file"),
        ({"uses_ray": True}, "postgresql://db/yard", ""),
    ],
)
def test_a_network_file_system_is_refused_for_what_it_cannot_hold(
    fields: dict[str, object], store: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    mounts = "1 1 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / /disk rw - lustre a rw\n"
    monkeypatch.setattr(_slurm_job, "mounts", lambda: mounts)
    asked = spec(service_dir=Path("/disk/yard"), **fields)
    if not why:
        _slurm_job.check_disk(asked, store)
        return
    with pytest.raises(_slurm_job.CommandError, match=why):
        _slurm_job.check_disk(asked, store)


@pytest.mark.parametrize(
    ("argv", "module", "extra"),
    [
        (["--nodes", "2", "--store", "postgresql://db/yard"], "ray", "ray"),
        (["--nodes", "1", "--store", "postgresql://db/yard"], "asyncpg", "postgres"),
    ],
)
async def test_a_missing_extra_is_reported_before_the_job_waits_in_the_queue(
    argv: list[str], module: str, extra: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    result = await cli("slurm", "up", *argv, "--data-dir", str(tmp_path))
    assert result.status == 1 and f"needs the package {module}" in result.err and f"rollyard[{extra}]" in result.err


async def test_the_commands_of_the_page_exist(cli: Cli):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md").read_text()
    commands = re.findall(r"^rollyard slurm up .*$|(?<=\$\()rollyard slurm up [^)]*", page, re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        result = await cli(*shlex.split(line)[1:], "--dry-run")
        assert result.status == 0 and lines_of(result.out)
