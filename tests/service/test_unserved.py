"""A service without a usable engine says so everywhere, instead of looking busy."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.site import TRAINER, Site, engine_table, open_site, scripted, task

pytestmark = pytest.mark.slow

NONE = "no engine serves policy default: add one with `rollyard engines add URL`"


async def unserved(site: Site) -> dict[str, Any]:
    return (await site.get("/v1/status")).body["unserved_policies"]


async def test_a_service_without_engines_reports_the_default_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site(tmp_path) as site:
        assert await unserved(site) == {"default": NONE}
        assert (await site.get("/readyz", token="")).body["unserved_policies"] == 1, "without a token, no names"
        assert b'rollyard_policy_unserved{policy="default"} 1.0' in (await site.get("/metrics")).body
        await site.post("/v1/runs", {"id": "other", "policy": "actor"})
        answer = await site.post("/v1/rollouts", {"run": "other", "rollouts": [{"id": "r1", "task": task()}]})
        assert answer.status == 202, answer.body
        async with asyncio.timeout(30):
            while "no engine serves a policy: its calls wait" not in caplog.text:
                await asyncio.sleep(0.02)
        assert (await unserved(site))["actor"].endswith("add one with `rollyard engines add URL --policy actor`")
        async with scripted() as engine:
            await site.post("/v1/engines", {**engine_table(engine), "policy": "actor"})
            assert (await site.ended("r1"))["reward"] == 1.0
            assert await unserved(site) == {}
    assert len([record for record in caplog.records if "its calls wait" in record.message]) == 1


async def test_a_tenant_does_not_learn_the_policies_of_others(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.post("/v1/runs", {"id": "other", "policy": "secret-project"})
        await site.post("/v1/rollouts", {"run": "other", "rollouts": [{"id": "r1", "task": task()}]})
        assert {*await unserved(site)} == {"default", "secret-project"}
        assert {*(await site.get("/v1/status", token=TRAINER)).body["unserved_policies"]} == {"default"}


async def test_a_refused_engine_is_named_with_the_reason(tmp_path: Path) -> None:
    async with scripted() as engine:
        table = {"id": "e1", "url": engine.url, "tokenizer": str(tmp_path)}
        async with open_site(tmp_path, engines=[table]) as site:
            async with asyncio.timeout(60):
                while "was refused" not in (reason := (await unserved(site))["default"]):
                    await asyncio.sleep(0.05)
    assert "engine e1 was refused (engine e1: its tokenizer cannot be used: " in reason
    assert "the folder lacks tokenizer.json and tokenizer_config.json" in reason


async def test_an_engine_without_a_tokenizer_is_down_with_the_fix(tmp_path: Path) -> None:
    async with scripted() as engine:
        engine.root = "Qwen/Qwen3-8B"
        async with open_site(tmp_path, engines=[{"id": "e1", "url": engine.url}]) as site:
            await site.submit("r1")
            async with asyncio.timeout(60):
                while "was not found" not in (reason := (await unserved(site))["default"]):
                    await asyncio.sleep(0.05)
    assert reason.startswith("no engine serves policy default: engine e1 is down (the tokenizer of engine e1 ")
    assert "--tokenizer PATH" in reason


async def test_an_engine_that_is_down_is_named_with_its_error(tmp_path: Path) -> None:
    async with open_site(tmp_path, health_s=0.1) as site:
        async with scripted() as engine:
            await site.post("/v1/engines", engine_table(engine))
            assert await unserved(site) == {}
        await site.submit("r1")
        async with asyncio.timeout(60):
            while not (found := await unserved(site)):
                await asyncio.sleep(0.05)
        assert found["default"].startswith("no engine serves policy default: engine e1 is down (")
        assert found["default"].endswith("); start it, or add another with `rollyard engines add URL`")


async def test_a_paused_policy_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.post("/v1/policies/default/pause", {"mode": "abort"})
        await site.submit("r1")
        assert await unserved(site) == {}
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_serve_logs_it_at_start(tmp_path: Path) -> None:
    env = {**os.environ, "ROLLYARD_DATA_DIR": str(tmp_path / "data"), "ROLLYARD_RUNTIMES": '["local"]'}
    command = (sys.executable, "-m", "rollyard", "serve", "--port", "0")
    process = await asyncio.create_subprocess_exec(*command, env=env, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while NONE not in (line := (await process.stderr.readline()).decode()):
                assert line, "it has ended"
    finally:
        process.terminate()
        await process.wait()
