"""When the disk fills up, the service reports it, ends with a status, and keeps what it acknowledged."""

import asyncio
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from rollyard import AsyncClient
from rollyard.core import RollyardError
from tests.worker import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TOKEN = "a-token-for-the-full-disk-test"
TASK = {"environment": "math", "data": {"question": "x" * 2000, "answer": "4"}}


async def test_a_full_disk_ends_the_service_with_an_error_and_loses_nothing_acknowledged(tmp_path: Path):
    if shutil.which("unshare") is None:
        pytest.skip("unshare (util-linux) is not installed")
    port = free_port()
    settings = {
        "DATA_DIR": str(tmp_path / "data"),
        "PORT": str(port),
        "RUNTIMES": '["local"]',
        "ADMIN_TOKENS": json.dumps([TOKEN]),
        "LOG_LEVEL": "error",
    }
    data, copy = tmp_path / "data", tmp_path / "copy"
    data.mkdir()
    # The small file system ends with its namespace: its files are copied out of it first.
    script = f'mount -t tmpfs -o size=8m,mode=0700 tmpfs {data} && "$@"; status=$?; cp -r {data} {copy}; exit $status'
    process = await asyncio.create_subprocess_exec(
        *("unshare", "-Urmpf", "--kill-child", "sh", "-c", script, "sh", sys.executable, "-m", "rollyard", "serve"),
        env=dict(os.environ) | {f"ROLLYARD_{key}": value for key, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        first = (await process.stderr.readline()).decode()
        assert str(port) in first, first
        acknowledged: list[str] = []
        async with AsyncClient(f"http://127.0.0.1:{port}", TOKEN, retry_s=0.5) as client:
            with pytest.raises(RollyardError):
                for _ in range(2000):
                    acknowledged += [rollout.id for rollout in await client.submit([TASK] * 20)]
        errors = (await process.stderr.read()).decode()
        assert await process.wait() == 1
        assert "full" in errors.splitlines()[-1], errors
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    with sqlite3.connect(copy / "rollyard.db") as database:
        stored = {row[0] for row in database.execute("SELECT id FROM rollouts")}
    assert acknowledged and set(acknowledged) <= stored
