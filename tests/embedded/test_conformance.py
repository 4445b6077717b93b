"""The conformance suite of engines, run against `rollyard engine` with a tiny model, over HTTP, in a real process."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rollyard.engines import EngineSpec, Kind, make_engine, open_http
from rollyard.testing.engine_conformance import CHECKS, Context, EngineCheck
from tests.embedded.environment import serving

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

PROMPT = [5, 17, 40, 200, 9, 31, 7]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, Any], None, None]:
    with serving(tiny_model, tmp_path_factory.mktemp("engine") / "log") as ready:
        yield ready


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
async def test_the_embedded_engine_conforms(check: EngineCheck, engine: dict[str, Any]):
    async with open_http() as http:
        client = make_engine(EngineSpec("e1", engine["url"], Kind.VLLM), http)
        await client.probe()
        try:
            await check.run(client, Context(PROMPT, long_tokens=7000))
        finally:
            await client.close()


async def test_the_probe_reports_everything_that_a_trainer_needs(engine: dict[str, Any], tiny_model: Path):
    async with open_http() as http:
        client = make_engine(EngineSpec("e1", engine["url"], Kind.VLLM), http)
        info = await client.probe()
        assert (info.model, info.max_context, info.tokenizer) == ("tiny", 8192, str(tiny_model))
        assert (info.logprobs_kind, info.reports_versions, info.api) == ("processed", True, "inference/v1/generate")
        assert info.notes == (), "it streams, schedules by priority, and can be paused"
        assert await client.control.version() == "default"
