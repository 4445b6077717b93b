"""GET /v1/overview, and the history that it shows."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from rollyard.service import history
from tests.service.site import OTHER, TRAINER, Site, engine_table, open_site, scripted, task

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service with a rollout that failed, of TRAINER, one that completed, one that is queued, and a dead engine."""
    folder: Path = tmp_path_factory.mktemp("site")
    dead = {"id": "dead", "url": "http://127.0.0.1:9", "policy": "another"}
    async with scripted() as engine, open_site(folder, engines=[engine_table(engine), dead]) as opened:
        assert (await opened.post("/v1/runs", {"id": "mine"}, token=TRAINER)).status == 201
        failing = task()
        failing["data"]["setup"] = ["false"]
        body = {"run": "mine", "rollouts": [{"id": "bad", "task": failing}, {"id": "good", "task": task()}]}
        assert (await opened.post("/v1/rollouts", body, token=TRAINER)).status == 202
        for rollout_id in ("bad", "good"):
            await opened.ended(rollout_id)
        await opened.hold()
        await opened.submit("queued")
        async with asyncio.timeout(60):
            while (await opened.get("/v1/results")).body["behind"]:
                await asyncio.sleep(0.02)
        opened.served.app_state.overviews.clear()
        yield opened


async def test_the_flow_and_the_failures(site: Site):
    body = (await site.get("/v1/overview")).body
    assert body["flow"] == {"queued": 1, "init": 0, "ready": 0, "run": 0, "eval": 0, "ended": 2}
    ((failure),) = body["failures"]
    assert (failure["code"], failure["blame"], failure["count"]) == ("setup_failed", "task", 1)
    assert failure["last_at"] == pytest.approx(body["at"], abs=600)
    status = (await site.get("/v1/status")).body
    assert body["pools"] == status["pools"] and body["nodes"] == [] and not body["is_draining"]
    assert [engine["id"] for engine in body["engines"]] == [engine["id"] for engine in status["engines"]]
    assert [policy["name"] for policy in body["policies"]] == [policy["name"] for policy in status["policies"]]


async def test_engines_that_are_down_and_paused_policies_are_alerts(site: Site):
    assert (await site.post("/v1/policies/default/pause", {})).status == 200
    site.served.app_state.overviews.clear()
    try:
        alerts = (await site.get("/v1/overview")).body["alerts"]
        assert {(alert["kind"], alert["what"], alert["severity"]) for alert in alerts} == {
            ("engine_down", "dead", "bad"),
            ("paused_policy", "default", "warn"),
        }
        assert all(alert["detail"] for alert in alerts)
    finally:
        await site.post("/v1/policies/default/resume", {"version": 7})
        site.served.app_state.overviews.clear()


async def test_failures_of_other_tenants_are_not_in_it(site: Site):
    assert len((await site.get("/v1/overview", token=TRAINER)).body["failures"]) == 1
    assert (await site.get("/v1/overview", token=OTHER)).body["failures"] == []


async def test_an_answer_is_kept_for_a_moment(site: Site):
    first = (await site.get("/v1/overview", token=TRAINER)).body
    cached = site.served.app_state.overviews
    assert len(cached) > 0
    until, data = cached[next(key for key in cached if key)]
    cached[next(key for key in cached if key)] = (until + 60, data)
    assert (await site.get("/v1/overview", token=TRAINER)).body["at"] == first["at"]
    cached.clear()


async def test_the_history_has_a_step_for_each_sample(site: Site):
    running = site.served.app_state.history
    before = running.steps()
    running.sample()
    after = running.steps()
    for name in ("turns", "tokens", "ended", "live"):
        column = after[name]
        assert isinstance(column, list) and len(column) == history.STEPS
        assert column[0] is None and column[-1] is not None
    assert after["ended"] != before["ended"] and sum(step or 0 for step in after["ended"]) == 2  # type: ignore[union-attr]
    assert sum(step or 0 for step in after["turns"]) >= 1  # type: ignore[union-attr]
    running.sample()
    assert running.steps()["ended"][-1] == 0  # type: ignore[index]
