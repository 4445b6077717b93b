"""An engine whose tokenizer cannot be verified: reported everywhere, and trained on only if the operator trusts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollyard.cli.doctor.engines import engine_checks
from rollyard.client import AsyncClient
from rollyard.service.settings import Settings
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.service.site import Site, engine_table, open_site, scripted

pytestmark = pytest.mark.slow


def silent() -> ScriptedEngine:
    engine = scripted()
    engine.can_tokenize = False
    return engine


async def traced(site: Site, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A rollout's record and its one trace; the client reads the same from Arrow."""
    await site.submit(name)
    record = await site.ended(name)
    (trace,) = (await site.get(f"/v1/rollouts/{name}/traces")).body["traces"]
    async with AsyncClient(site.url, site.token) as client:
        (read,) = await client.traces(name)
    assert (read.tokenizer_verified, read.trainable) == (trace["tokenizer_verified"], trace["trainable"])
    return record, trace


async def test_a_compared_tokenizer_is_verified(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        (listed_engine,) = (await site.get("/v1/engines")).body["engines"]
        assert (listed_engine["tokenizer_verified"], listed_engine["trust_tokenizer"]) == (True, False)
        _, trace = await traced(site, "r1")
        assert (trace["tokenizer_verified"], trace["trainable"], trace["reason"]) == (True, True, None)


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_an_unverified_tokenizer_is_reported_and_trained_on_only_if_trusted(
    tmp_path: Path, is_trusted: bool
) -> None:
    async with silent() as engine:
        table = {**engine_table(engine), "trust_tokenizer": is_trusted}
        async with open_site(tmp_path, engines=[table]) as site:
            status = (await site.get("/v1/status")).body
            (listed_engine,) = status["engines"]
            assert (listed_engine["tokenizer_verified"], listed_engine["trust_tokenizer"]) == (False, is_trusted)
            record, trace = await traced(site, "r1")
    assert record["outcome"] == "completed" and record["reward"] is not None, "it is scored anyway"
    assert (trace["tokenizer_verified"], trace["trainable"]) == (False, is_trusted)
    if is_trusted:
        assert trace["reason"] is None
    else:
        assert "engine e1 could not be verified" in trace["reason"] and "trust_tokenizer" in trace["reason"]


async def test_trust_in_a_tokenizer_survives_a_restart(tmp_path: Path) -> None:
    async with silent() as engine:
        async with open_site(tmp_path) as site:
            assert (await site.post("/v1/engines", {**engine_table(engine), "trust_tokenizer": True})).status == 201
        async with open_site(tmp_path) as site:
            _, trace = await traced(site, "r1")
            assert (trace["tokenizer_verified"], trace["trainable"]) == (False, True)


@pytest.mark.parametrize(
    ("can_tokenize", "is_trusted", "state", "detail"),
    [
        (True, False, "ok", "is the one that prompts are rendered with"),
        (False, False, "warn", "its traces are not trainable"),
        (False, True, "warn", "is trusted"),
    ],
)
async def test_the_doctor_probes_the_configured_engines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    can_tokenize: bool,
    is_trusted: bool,
    state: str,
    detail: str,
) -> None:
    monkeypatch.setenv("ROLLYARD_URL", "http://127.0.0.1:9")  # no service listens there
    async with scripted() as engine:
        engine.can_tokenize = can_tokenize
        table = {**engine_table(engine), "trust_tokenizer": is_trusted}
        (check,) = await engine_checks(Settings.model_validate({"data_dir": tmp_path, "engines": [table]}))
    assert (check.name, check.state) == ("engine e1", state) and detail in check.detail


async def test_the_doctor_gets_the_engines_of_a_running_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with silent() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        monkeypatch.setenv("ROLLYARD_URL", site.url)
        monkeypatch.setenv("ROLLYARD_TOKEN", site.token)
        (check,) = await engine_checks(Settings.model_validate({"data_dir": tmp_path}))
    assert check.state == "warn" and "--trust-tokenizer" in check.remedy


async def test_an_engine_that_is_down_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_URL", "http://127.0.0.1:9")
    unreachable = {"url": "http://127.0.0.1:9", "id": "e1"}
    (check,) = await engine_checks(Settings.model_validate({"data_dir": tmp_path, "engines": [unreachable]}))
    assert check.state == "warn" and "not probed" in check.detail
