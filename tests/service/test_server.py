"""The server: start, drain, signals, restart. In this loop to inspect its state, otherwise as a process."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.service.server import bind, serve
from rollyard.service.settings import SettingsError
from rollyard.store.base import StoreLocked
from rollyard.testing.script import Reply
from tests.service.site import engine_table, finish, open_site, scripted, settings, task

pytestmark = pytest.mark.slow

MAIN = """
import os, sys
from rollyard.service.server import run_server
from rollyard.service.settings import load_settings
sys.exit(run_server(load_settings({}, os.environ).settings))
"""


async def test_a_running_service_has_private_files_its_url_in_a_file_and_the_store_lock(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        data = tmp_path / "data"
        assert stat.S_IMODE(data.stat().st_mode) == 0o700
        assert stat.S_IMODE((data / "token").stat().st_mode) == 0o600
        assert (data / "url").read_text().strip() == site.url
        assert (await site.get("/readyz")).body == {"status": "ready", "waiting_for_room": 0, "unserved_policies": 1}
        with pytest.raises(StoreLocked):
            async with serve(settings(tmp_path)):
                pass
        assert (await site.get("/v1/status")).status == 200
    assert not (data / "url").exists()


async def test_a_port_in_use_is_reported_before_anything_is_opened(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(SettingsError, match="cannot be listened on"),
    ):
        async with serve(settings(tmp_path, port=listening.getsockname()[1])):
            pass
    assert not (tmp_path / "data").exists()


def test_the_socket_has_the_tcp_protocol_set(tmp_path: Path) -> None:
    """asyncio sets TCP_NODELAY only then; without it every response takes 40 ms."""
    with bind(settings(tmp_path)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def test_an_unknown_runtime_is_an_invalid_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no runtime 'docker'; there are: bubblewrap, apptainer, oci, local"):
        async with serve(settings(tmp_path, runtimes=["docker"])):
            pass


async def test_a_drain_refuses_new_work_and_lets_run_finish(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=1.0)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], run_slots=1, ready_slots=0) as site,
    ):
        await site.submit("r1")
        await engine.busy()
        await site.submit("r2")
        poll = asyncio.create_task(site.get("/v1/rollouts/r1?wait_s=30"))
        draining = asyncio.create_task(site.served.app_state.pipeline.drain())
        await asyncio.sleep(0)
        for answer in (
            await site.get("/readyz"),
            await site.post("/v1/rollouts", {"id": "r3", "task": task()}),
            await site.post("/v1/runs", {"id": "run"}),
            await site.post("/v1/rollouts/r1/rescore"),
        ):
            assert (answer.status, answer.code) == (503, "draining")
            assert int(answer.headers["retry-after"]) > 0
        assert (await site.get("/healthz")).status == 200
        assert (await poll).body["outcome"] == "completed"
        await draining
        assert (await site.get("/v1/rollouts/r2")).body["state"] == "queued"


async def test_closing_ends_waiting_calls(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with open_site(tmp_path) as site:
            await site.hold()
            await site.submit("r1")
            headers = {"Authorization": f"Bearer {site.token}"}
            poll = asyncio.create_task(_get(http, f"{site.url}/v1/rollouts/r1?wait_s=60", headers))
            stream = asyncio.create_task(_get(http, f"{site.url}/v1/events", headers))
            while len([t for t in asyncio.all_tasks() if "disconnected" in str(t.get_coro())]) < 2:
                await site.get("/healthz")
        assert json.loads(await poll)["state"] == "queued"
        assert (await stream).startswith(b": open")


async def _get(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> bytes:
    async with http.get(url, headers=headers) as reply:
        return await reply.read()


async def test_a_service_with_an_unusable_store_is_not_ready(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.served.app_state.store.close()
        answer = await site.get("/readyz")
        assert (answer.status, answer.code) == (503, "store_lost")
        assert int(answer.headers["retry-after"]) > 0
        assert (await site.get("/v1/rollouts")).code == "store_lost"
        assert (await site.get("/healthz")).status == 200


# --- as a process -------------------------------------------------------------------------------------


@asynccontextmanager
async def process(folder: Path, **environ: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str], None]:
    """`rollyard serve` without the CLI; yields the process and its first line."""
    variables = {
        "ROLLYARD_DATA_DIR": str(folder / "data"),
        "ROLLYARD_PORT": "0",
        "ROLLYARD_RUNTIMES": "local",
        **environ,
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MAIN, env={**os.environ, **variables}, cwd=folder, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert child.stderr is not None
        line = ""
        while not line.startswith("rollyard"):  # log lines precede it
            raw = await child.stderr.readline()
            assert raw, "it ended without printing its URL"
            line = raw.decode()
        yield child, line
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


class Remote:
    """Calls to a service in another process."""

    def __init__(self, http: aiohttp.ClientSession, folder: Path) -> None:
        self._http = http
        self._url = (folder / "data" / "url").read_text().strip()
        self._headers = {"Authorization": f"Bearer {(folder / 'data' / 'token').read_text().strip()}"}

    async def __call__(self, method: str, path: str, body: Any = None) -> Any:
        async with self._http.request(method, self._url + path, json=body, headers=self._headers) as reply:
            return await reply.json()


def sandbox_processes(folder: Path) -> list[str]:
    """Processes of this machine whose working folder is below that folder."""
    command_lines: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str((entry / "cwd").readlink()).startswith(str(folder / "data" / "sandboxes")):
                command_lines.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return command_lines


async def test_it_prints_its_url_and_ends_on_sigterm(tmp_path: Path) -> None:
    async with process(tmp_path) as (child, line):
        url = (tmp_path / "data" / "url").read_text().strip()
        assert f" at {url}, token in {tmp_path / 'data' / 'token'}" in line
        assert not url.endswith(":0")
        async with aiohttp.ClientSession() as http, http.get(f"{url}/readyz") as reply:
            assert reply.status == 200
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    assert not (tmp_path / "data" / "url").exists()


async def test_the_second_signal_ends_it_at_once_and_requeues_work(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=300)) as engine, aiohttp.ClientSession() as http:
        engines = json.dumps([engine_table(engine)])
        async with process(tmp_path, ROLLYARD_ENGINES=engines, ROLLYARD_DRAIN_S="300") as (child, _):
            call = Remote(http, tmp_path)
            await call("POST", "/v1/rollouts", {"id": "r1", "task": task()})
            await engine.busy()
            child.send_signal(signal.SIGINT)
            while not (await call("GET", "/v1/status"))["is_draining"]:
                pass
            assert child.returncode is None
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        assert sandbox_processes(tmp_path) == []
        await engine.idle()
        engine.script = lambda turn: finish()
        async with process(tmp_path, ROLLYARD_ENGINES=engines):
            record = await Remote(http, tmp_path)("GET", "/v1/rollouts/r1?wait_s=60")
            assert (record["outcome"], record["attempt"]) == ("completed", 2)
            assert [lost["code"] for lost in record["lost"]] == ["drained"]


async def test_with_on_term_stop_one_sigterm_requeues_all_work_at_once(tmp_path: Path) -> None:
    """Commands in its sandboxes received the signal too: what they do after it must not be scored."""
    async with scripted(Reply(finish(), latency_s=300)) as engine, aiohttp.ClientSession() as http:
        settings = {"ROLLYARD_ENGINES": json.dumps([engine_table(engine)]), "ROLLYARD_DRAIN_S": "300"}
        async with process(tmp_path, **settings, ROLLYARD_ON_TERM="stop") as (child, _):
            call = Remote(http, tmp_path)
            await call("POST", "/v1/rollouts", {"id": "r1", "task": task()})
            await engine.busy()
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        await engine.idle()
        engine.script = lambda turn: finish()
        async with process(tmp_path, **settings):
            record = await Remote(http, tmp_path)("GET", "/v1/rollouts/r1?wait_s=60")
            assert (record["attempt"], [lost["code"] for lost in record["lost"]]) == (2, ["drained"])


async def test_a_kill_loses_nothing(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=300)) as engine, aiohttp.ClientSession() as http:
        engines = json.dumps([engine_table(engine)])
        async with process(tmp_path, ROLLYARD_ENGINES=engines) as (child, _):
            await Remote(http, tmp_path)("POST", "/v1/rollouts", {"id": "r1", "task": task()})
            await engine.busy()
            child.kill()
            await child.wait()
        engine.script = lambda turn: finish()
        async with process(tmp_path, ROLLYARD_ENGINES=engines):
            call = Remote(http, tmp_path)
            record = await call("GET", "/v1/rollouts/r1?wait_s=60")
            assert (record["outcome"], record["attempt"]) == ("completed", 2)
            assert (await call("GET", "/v1/status"))["recovered"]["requeued"] == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ROLLYARD_HOST": "0.0.0.0"}, "is reachable from other machines: set admin_tokens"),
        ({"ROLLYARD_STORE": "/proc/nothing/here.db"}, "cannot be opened"),
        ({"ROLLYARD_DATA_DIR": "/proc/nothing"}, "data_dir /proc/nothing cannot be used"),
    ],
)
def test_a_service_that_cannot_start_prints_the_reason_in_one_line(
    tmp_path: Path, environ: dict[str, str], message: str
) -> None:
    variables = {"ROLLYARD_DATA_DIR": str(tmp_path / "data"), "ROLLYARD_PORT": "0", "ROLLYARD_RUNTIMES": "local"}
    completed = subprocess.run(
        [sys.executable, "-c", MAIN],
        env={**os.environ, **variables, **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert completed.returncode == 1
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
