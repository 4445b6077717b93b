"""The container of the service: built from deploy/Containerfile, it runs rollouts in sandboxes, without privileges."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard import AsyncClient, __version__
from rollyard.testing import FolderTokenizer, ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.client.served import SCRIPT, task
from tests.worker import NAME, free_port

ROOT = Path(__file__).parents[2]
IMAGE = "localhost/rollyard-smoke:test"
TOKEN = "a-token-of-this-test-and-nothing-else"
AS_ON_KUBERNETES = [
    *("--uidmap", "0:300000:65536"),  # hostUsers: false
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--security-opt", "unmask=ALL", "--security-opt", "seccomp=unconfined"),
]
"""The securityContext of deploy/kubernetes. Without either of the last two, no sandbox starts."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("podman"),
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the base image"),
    pytest.mark.asyncio(loop_scope="module"),
]


def podman(*words: str, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
    """Uses runc, because crun does not support machines that have cgroups of both kinds."""
    argv = ["podman", "--runtime", shutil.which("runc") or "crun", *words]
    completed = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert completed.returncode == 0 or not is_checked, completed.stderr
    return completed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def container() -> AsyncGenerator[tuple[str, str], None]:
    """A running container and the URL of its service. It is in the machine's network, where the engine listens."""
    built = subprocess.run([ROOT / "scripts" / "build-test-container", IMAGE], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    image = built.stdout.split()[-1]  # another checkout may take the tag meanwhile
    name, port = f"rollyard-smoke-{NAME}-{os.getpid()}", free_port()
    settings = {"HOST": "127.0.0.1", "PORT": port, "ADMIN_TOKENS": TOKEN, "RUN_SLOTS": 4, "DRAIN_S": 5}
    async with ScriptedEngine(SCRIPT, tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        variables = [word for key, value in settings.items() for word in ("--env", f"ROLLYARD_{key}={value}")]
        options = ["--detach", "--name", name, "--network", "host", *AS_ON_KUBERNETES, *variables]
        options += ["--volume", f"{tokenizer_dir()}:/tokenizer:ro"]
        options += [
            "--ulimit",
            "nofile=16384",
            "--ulimit",
            "nproc=32768",
        ]  # podman's defaults may be above the hard limits
        options += ["--health-cmd", "none"]  # podman's timer for it needs systemd; the test calls the program itself
        command = ["serve", "--engine", engine.url, "--tokenizer", "/tokenizer"]
        await asyncio.to_thread(podman, "run", *options, image, *command)
        try:
            await ready(name)
            yield name, f"http://127.0.0.1:{port}"
        finally:
            # Without systemd podman reports that it cannot remove the timer of the health check, and removes the rest.
            await asyncio.to_thread(podman, "rm", "--force", "--volumes", name, is_checked=False)
            assert podman("container", "exists", name, is_checked=False).returncode == 1


async def ready(name: str) -> None:
    async with asyncio.timeout(60):
        while podman("exec", name, "rollyard-healthcheck", "/readyz", is_checked=False).returncode:
            assert podman("inspect", "--format", "{{.State.Running}}", name).stdout == "true\n", logs(name)
            await asyncio.sleep(0.1)


def logs(name: str) -> str:
    completed = podman("logs", name, is_checked=False)
    return completed.stdout + completed.stderr


async def test_a_rollout_runs_in_a_sandbox_in_the_container(container: tuple[str, str]):
    name, url = container
    async with AsyncClient(url, TOKEN) as client:
        (record,) = await client.submit([task()])
        ended = await client.wait(record.id, timeout_s=120)
        assert ended.reward == 1.0, (ended, logs(name))
        assert ended.raw["summary"]["limits_in_force"]["calls"] == "seccomp", (
            "bubblewrap, with the sandbox's own filter"
        )


async def test_it_runs_as_an_ordinary_user_with_its_version(container: tuple[str, str]):
    name, _ = container
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert podman("exec", name, "rollyard", "--version").stdout == f"rollyard {__version__} (commit {head[:12]})\n"
    assert podman("exec", name, "cat", "/proc/1/comm", "/proc/1/status").stdout.startswith("rollyard\n")
    assert podman("exec", name, "stat", "-c", "%u", "/proc/1").stdout == "10001\n"
    assert "rollyard-healthcheck" in podman("image", "inspect", "--format", "{{.HealthCheck}}", IMAGE).stdout
    assert podman("exec", name, "rollyard-healthcheck", "/nothing", is_checked=False).returncode == 1


async def test_stopping_it_drains(container: tuple[str, str]):
    name, _ = container
    podman("stop", "--time", "30", name)
    try:
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout == "0\n"
        assert "draining" in logs(name)
    finally:
        podman("start", name)  # for the other tests
        await ready(name)


async def test_the_documented_command_starts_a_service_that_accepts_the_token_behind_the_published_port(
    container: tuple[str, str], tmp_path: Path
):
    """Podman's secrets are readable by everybody unless a mode is given, and requests arrive at the container's own
    address, which is not the one in their Host header."""
    image = podman("inspect", "--format", "{{.Image}}", container[0]).stdout.strip()
    name, port = f"rollyard-documented-{NAME}-{os.getpid()}", free_port()
    (tmp_path / "token").write_text(TOKEN)
    (command,) = re.findall(r"^podman (run (?:.*\\\n)*.* serve) ", (ROOT / "docs/how-to/deploy.md").read_text(), re.M)
    replaced = {"rollyard": image, "127.0.0.1:8127:8127": f"127.0.0.1:{port}:8127", "90": "1"}
    words = [replaced.get(word, word) for word in shlex.split(command.replace("\\\n", " "))]
    words[words.index("--name") + 1] = name
    words[words.index("--volume") + 1] = f"{name}:/var/lib/rollyard"
    words[1:1] = ["--health-cmd", "none", "--ulimit", "nofile=16384", "--ulimit", "nproc=32768"]
    await asyncio.to_thread(podman, "secret", "create", name, str(tmp_path / "token"))
    try:
        await asyncio.to_thread(podman, *(word.replace("rollyard-admin", name) for word in words))
        async with AsyncClient(f"http://127.0.0.1:{port}", TOKEN) as client, asyncio.timeout(60):
            status = await client.status()  # waits until the service answers
        assert status["states"]["queued"] == 0, logs(name)
    finally:
        await asyncio.to_thread(podman, "rm", "--force", "--volumes", name, is_checked=False)
        podman("volume", "rm", "--force", name, is_checked=False)
        podman("secret", "rm", name, is_checked=False)
