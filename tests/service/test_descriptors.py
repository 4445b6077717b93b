"""A service that runs out of file descriptors loses rollouts, but leaves nothing behind when it ends."""

import json
import resource
from pathlib import Path

import pytest

from bench._census import adopting
from rollyard.cli.rig import engine_process, service, stop
from rollyard.client import AsyncClient
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.fleet.chaos import below_us, nobody_left
from tests.service.site import finish, shell, task

COUNT = 40
SIZES = {"init_slots": 16, "run_slots": 40, "eval_slots": 16, "ready_slots": 16}


@pytest.mark.slow
async def test_a_service_without_descriptors_leaves_nothing_behind_after_a_clean_exit(tmp_path: Path) -> None:
    rule = {"if": "<|im_start|>", "turns": [shell("sleep 0.5; echo hi > out.txt"), finish()]}
    (tmp_path / "script.json").write_text(json.dumps({"rules": [rule]}))
    with adopting():
        async with engine_process(tmp_path, 0.05) as (_, engine_url):
            before = below_us()
            async with service(tmp_path, {"runtimes": "local", "max_attempts": 2, **SIZES}) as served:
                async with AsyncClient(served.url, served.token) as client:
                    await client.add_engine(url=engine_url, kind="vllm", tokenizer=str(tokenizer_dir()))
                    few = len(list(Path(f"/proc/{served.process.pid}/fd").iterdir())) + 50
                    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (few, few))
                    ids = [f"r{number}" for number in range(COUNT)]
                    await client.submit([task(f"do {one}") for one in ids], ids=ids)
                    records = await client.wait_all(ids, timeout_s=90)
                details = [lost["detail"] for record in records for lost in record.lost]
                assert any("Too many open files" in detail or "no file descriptor" in detail for detail in details)
                await stop(served.process)
                assert served.process.returncode == 0
            await nobody_left(before)
    sandboxes = tmp_path / "data" / "sandboxes" / "local"
    assert sorted(path.name for path in sandboxes.iterdir()) == [".lock", "layers"]
