"""The whole text of errors that need a preparation: a full disk, no user namespaces, a reused name, a missing package.

As in `test_error_texts.py`, the real program prints them. Durations in a text are replaced by "N s".
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard.client import Client
from rollyard.core.failure import StoreLost
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.error_site import CONTEXT, TIMEOUT_S, Background, ErrorSite, Printed, error_site
from tests.client.served import task
from tests.worker import free_port

pytestmark = pytest.mark.slow

START = "start the service with `rollyard serve`, or give its URL with --url or ROLLYARD_URL"
ROLLYARD = f"{sys.executable} -m rollyard"

SMALL_DISK = 'mkdir -p disk && mount -t tmpfs -o size="$0" tmpfs disk && eval "$1"'
"""Runs $1 with a folder `disk` of size $0, in namespaces of its own: `unshare -Urm sh -c SMALL_DISK SIZE COMMAND`."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[ErrorSite, None, None]:
    with error_site(tmp_path_factory.mktemp("situations")) as site:
        site.write("t.jsonl", task())
        yield site


def without_times(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? s\b", "N s", text)


# --- the service and its engines --------------------------------------------------------------------------------------


def test_a_service_that_closes_the_connection_did_not_answer(site: ErrorSite):
    @asynccontextmanager
    async def closing() -> AsyncGenerator[str, None]:
        server = await asyncio.start_server(lambda _, writer: writer.transport.abort(), "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    with Background() as background:
        url = background.open(closing())
        printed = site.run("top", "--once", ROLLYARD_URL=url)
    assert printed.err in {
        f"rollyard: {url} did not answer GET /v1/status ({why}) — {START}\n"
        for why in ("Server disconnected", "[Errno 104] Connection reset by peer")
    }
    assert (printed.status, printed.out) == (1, "")


PROGRAM = """
import rollyard, traceback
from rollyard.core import RollyardError
try:
    with rollyard.Client(retry_s=0) as client:
        client.status()
except RollyardError:
    traceback.print_exc()
with rollyard.Client(retry_s=600) as client:
    client.status()
"""


def test_the_python_client_warns_while_it_waits_for_an_absent_service(site: ErrorSite):
    url = f"http://127.0.0.1:{free_port()}"
    environ = {**os.environ, "ROLLYARD_URL": url, "ROLLYARD_TOKEN": "a-token-of-this-test"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stderr is not None
        lines: list[str] = []
        while not lines or "trying again" not in lines[-1]:
            lines.append(without_times(program.stderr.readline()))
            assert lines[-1], lines
    finally:
        program.kill()
        program.communicate()
    what = f"cannot connect to {url} (Connection refused)"
    fix = "Start the service with `rollyard serve`, or give its URL with --url or ROLLYARD_URL."
    assert lines[-3:] == [
        f"rollyard.client._errors.ServiceUnreachable: {what}\n",
        f"{fix}\n",
        f"{what}; trying again for N s. {fix}\n",
    ]


def test_an_engine_without_logprobs_says_what_is_lost_and_a_prompt_that_is_too_long_how_long_it_is(site: ErrorSite):
    added = site.run(
        *("engines", "add", site.engine.url, "--id", "mute", "--policy", "mute", "--tokenizer", str(tokenizer_dir()))
    )
    assert (added.status, added.err) == (
        0,
        "engine mute: it returns no logprobs, so its trajectories are not trainable; for training, add a vLLM or"
        " SGLang server that returns them\n",
    )
    site.write("long.jsonl", task("word " * CONTEXT))
    printed = site.run("submit", "long.jsonl", "--policy", "mute", "--id-prefix", "long")
    (length,) = re.findall(r"the prompt has (\d+) tokens", printed.err)
    assert (printed.status, without_times(printed.err)) == (
        1,
        "1 rollout submitted to run mute\n1 failed, 0 tokens sampled; N s\n"
        f"rollyard: long-0: the prompt has {length} tokens, the context {CONTEXT} — shorten the instruction or serve"
        " the model with a longer context\n",
    )
    assert int(length) > CONTEXT


def test_a_name_that_is_used_again_says_which_field_differs(site: ErrorSite):
    with Client(site.service.url, site.service.token) as client:
        client.create_run("grpo", seed=7, policy="actor")
        client.evaluate([task()], id="nightly", k=1)
    defaults = json.dumps({"limits": {"max_turns": 4}})
    assert site.run("runs", "create", "grpo", "--policy", "actor", "--defaults", defaults) == Printed(
        1,
        "",
        "rollyard: run 'grpo' already exists, with other settings: defaults.limits is unset, not {'max_turns': 4}; seed"
        " is 7, not 0 — use another name, or the settings that the run has\n",
    )
    assert site.run("eval", "t.jsonl", "--k", "2", "--run", "nightly") == Printed(
        1,
        "",
        "rollyard: evaluation 'nightly' already exists, with other settings: k is 1, not 2; samples is 1, not 2 —"
        " repeat the original command, or give another --run\n",
    )


BROKEN = """
from rollyard.envs import Environment, Plan

class Broken(Environment):
    name = "broken"

    def plan(self, task):
        return Plan(needs_sandbox=False)

    async def init(self, context):
        return undefined
"""


def test_an_exception_of_an_environment_is_shown_once_and_its_line_for_each_task(site: ErrorSite, tmp_path: Path):
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "rollyard.toml").write_text(f'[environments]\nbroken = "{tmp_path}/broken.py:Broken"\n')
    site.write("broken.jsonl", *({"environment": "broken", "data": {"number": number}} for number in range(3)))
    config = str(tmp_path / "rollyard.toml")
    printed = site.run("tasks", "validate", "broken.jsonl", "--run", ROLLYARD_CONFIG=config)
    line = "broken.init raised NameError: name 'undefined' is not defined (broken.py, line 11, in init)"
    for number in (1, 2, 3):
        assert f"broken.jsonl:{number}: oracle: environment_broken in init: {line}\n" in printed.out
    first, *traceback, end, _ = printed.err.splitlines()
    assert first == "rollyard: unexpected exception in broken.init"
    assert traceback.count("Traceback (most recent call last):") == 1
    assert end == "NameError: name 'undefined' is not defined"
    assert printed.status == 1


# --- disks ------------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_results_of_a_submit(site: ErrorSite):
    fill = "head -c 4096 /dev/zero > disk/ballast"
    command = f"{fill}; {ROLLYARD} submit t.jsonl --out disk/out.jsonl --id-prefix w; ls -A disk"
    printed = site.run_program("unshare", "-Urm", "sh", "-c", SMALL_DISK, "4k", f"{command}; exit 0")
    assert without_times(printed.err) == (
        "1 rollout submitted to run default\n1 completed, mean reward 1.000 of 1, 39 tokens sampled; N s\n"
        "rollyard: disk/out.jsonl cannot be written: No space left on device — free some space or give another --out,"
        " then run the command again with --id-prefix w, which submits nothing twice\n"
    )
    assert "w-0" in printed.out and printed.out.splitlines()[-2:] == ["ballast", "out.jsonl"]


def test_a_full_disk_behind_stdout_is_reported(site: ErrorSite):
    printed = site.run_program("sh", "-c", f"{ROLLYARD} config > /dev/full")
    assert printed == Printed(
        1,
        "",
        "rollyard: a file cannot be written: No space left on device — free some space on that disk, and run the"
        " command again\n",
    )


def test_a_service_does_not_start_on_a_full_disk(site: ErrorSite):
    fill = "head -c 4096 /dev/zero > disk/ballast"
    command = f"{fill}; exec {ROLLYARD} serve --port 0 --data-dir disk"
    assert site.run_program("unshare", "-Urm", "sh", "-c", SMALL_DISK, "4k", command) == Printed(
        1,
        "",
        "rollyard: data_dir disk cannot be written: No space left on device — free some space there, or give another"
        " folder with --data-dir\n",
    )


def test_a_service_whose_disk_becomes_full_ends_with_one_line_and_tells_its_clients(tmp_path: Path):
    port = free_port()
    command = f"exec {ROLLYARD} serve --port {port} --data-dir disk --log-level error"
    environ = {"HOME": str(tmp_path), "ROLLYARD_RUNTIMES": "local", "ROLLYARD_RUNTIME": "local"}
    environ["ROLLYARD_ADMIN_TOKENS"] = token = "a-token-of-this-test"
    service = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", SMALL_DISK, "2m", command],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stderr is not None
        assert service.stderr.readline() == f"rollyard 0.1.0 at http://127.0.0.1:{port}\n"
        with Client(f"http://127.0.0.1:{port}", token, retry_s=0.0) as client:
            client.resize_pools(init=0)  # so that only submits write
            with pytest.raises(StoreLost) as caught:
                for _ in range(1000):
                    client.submit([task("x" * 100_000)])
        reason = "the store failed and was stopped: OperationalError: database or disk is full"
        assert caught.value.detail == f"the store cannot be used: {reason}"
        assert caught.value.remedy == (
            "Check the database or the disk, and restart the service. Acknowledged writes are safe."
        )
        _, stderr = service.communicate(timeout=TIMEOUT_S)
        assert (service.returncode, [line for line in stderr.splitlines() if line.startswith("rollyard")]) == (
            1,
            [
                f"rollyard: {reason} — free some space on the disk of disk/rollyard.db, then start the service again:"
                " it continues with what it acknowledged"
            ],
        )
        assert "Traceback" not in stderr
    finally:
        service.kill()
        service.communicate()


# --- the machine ------------------------------------------------------------------------------------------------------


def test_without_bubblewrap_the_package_is_named(site: ErrorSite):
    assert site.run("shell", "t.jsonl", "--runtime", "bubblewrap", PATH="/nowhere") == Printed(
        1,
        "",
        "rollyard: t.jsonl:1: bwrap was not found; install it: apt-get install bubblewrap (0.8 or newer) — run"
        " `rollyard doctor` on this machine\n",
    )


def test_forbidden_user_namespaces_are_reported_with_the_command_that_allows_them(site: ErrorSite):
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    command = f"{forbid} && exec setpriv --inh-caps=-all --ambient-caps=-all {ROLLYARD} shell t.jsonl"
    as_user = ("--map-user=1000", "--map-group=1000", "--keep-caps")
    assert site.run_program("unshare", "-U", *as_user, "sh", "-c", command) == Printed(
        1,
        "",
        "rollyard: t.jsonl:1: user namespaces are forbidden here: they are disabled; allow them: sysctl -w"
        " user.max_user_namespaces=15000 (namespaces: [Errno 28] clone: No space left on device) — run `rollyard"
        " doctor` on this machine\n",
    )


def test_a_missing_package_is_reported_with_the_extra_that_has_it(site: ErrorSite, tmp_path: Path):
    missing = 'raise ModuleNotFoundError("No module named \'uvloop\'", name="uvloop")'
    (tmp_path / "uvloop.py").write_text(missing)
    assert site.run("serve", PYTHONPATH=str(tmp_path)) == Printed(
        1,
        "",
        "rollyard: this command needs the package uvloop, which is not installed — pip install 'rollyard[server]'\n",
    )
