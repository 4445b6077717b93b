"""A service that is stopped by a signal and continued: the time in between does not count against its rollouts."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

from rollyard.cli.rig import engine_process, service
from rollyard.client import AsyncClient
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import engine_table, finish, open_site, scripted, shell, task

RUN_S, STOPPED_S = 10.0, 11.0


@pytest.mark.slow
async def test_a_stopped_service_does_not_use_up_the_deadlines_of_its_rollouts(tmp_path: Path) -> None:
    """Stopped during a call to the engine, and again during a tool call; longer than all deadlines and `stall_s`."""
    rule = {"if": "<|im_start|>", "turns": [shell("sleep 1.5"), finish()]}
    (tmp_path / "script.json").write_text(json.dumps({"rules": [rule]}))
    limits = {"init_s": 30, "run_s": RUN_S, "eval_s": 30, "model_s": 3, "stall_s": 5, "max_turns": 4}
    async with (
        engine_process(tmp_path, 1.0) as (_, engine_url),
        service(tmp_path, {"runtimes": "local", "max_attempts": 1}) as served,
        AsyncClient(served.url, served.token) as client,
    ):
        await client.add_engine(url=engine_url, kind="vllm", tokenizer=str(tokenizer_dir()))
        await client.submit([{**task(), "limits": limits}], ids=["r1"])
        for _ in range(2):
            async with asyncio.timeout(60):
                while (await client.get("r1")).state not in ("run", "ended"):
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.4)
            served.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            served.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.9)
        record = await client.wait("r1", timeout_s=60)
        assert (record.outcome, record.reward, record.lost) == ("completed", 1.0, ()), record


async def test_a_jump_of_the_clock_does_not_change_queued_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.hold()
        await site.submit("r1")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 7 * 86_400)
        await site.call("PATCH", "/v1/pools", json={"init": 2})
        assert 0 <= (await site.ended("r1"))["timings"]["queued_s"] < 3600
        await site.hold()
        await site.submit("r2")
        monkeypatch.setattr(time, "time", real)
        await asyncio.sleep(0.05)
        await site.call("PATCH", "/v1/pools", json={"init": 2})
        assert 0.05 <= (await site.ended("r2"))["timings"]["queued_s"] < 3600
