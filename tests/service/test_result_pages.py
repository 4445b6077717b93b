"""GET /v1/results: the table of rollouts, its filters and its search, of the caller's runs only."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, task

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """Two ended rollouts in the run `mine`, one with reward 0; one in `other`; two that stay queued."""
    folder: Path = tmp_path_factory.mktemp("site")
    async with (
        scripted("I look at the files first.", finish()) as engine,
        open_site(folder, engines=[engine_table(engine)]) as opened,
    ):
        for run, token in (("mine", TRAINER), ("other", OTHER)):
            assert (await opened.post("/v1/runs", {"id": run}, token=token)).status == 201
        failing = task("count the pebbles")
        failing["data"]["checks"] = ["false"]
        for run, rollout_id, each in (
            ("mine", "m-0", failing),
            ("mine", "m-1", task()),
            ("other", "o-0", task("a secret word: xylophone")),
        ):
            token = TRAINER if run == "mine" else OTHER
            body = {"run": run, "rollouts": [{"id": rollout_id, "task": each}]}
            assert (await opened.post("/v1/rollouts", body, token=token)).status == 202
            await opened.ended(rollout_id)
        await opened.hold()
        await opened.submit("q-0", "q-1")
        async with asyncio.timeout(60):
            while (await opened.get("/v1/results")).body["behind"]:
                await asyncio.sleep(0.02)
        yield opened


async def rows(site: Site, query: str = "", token: str | None = None) -> list[dict[str, Any]]:
    answer = await site.get(f"/v1/results?{query}", token=token)
    assert answer.status == 200, answer.body
    assert answer.body["behind"] == 0
    return answer.body["rows"]


async def ids(site: Site, query: str = "", token: str | None = None) -> list[str]:
    return [row["id"] for row in await rows(site, query, token)]


async def test_a_row_is_a_short_record(site: Site):
    (row,) = await rows(site, "run=mine&max_reward=0.5")
    record = (await site.get("/v1/rollouts/m-0")).body
    for field in ("id", "run", "group", "index", "state", "attempt", "outcome", "reward", "trainable", "created_at"):
        assert row[field] == record[field], field
    assert row["name"] == "count the pebbles" and row["environment"] == "shell" and row["agent"] == "native"
    assert row["policy"] == "default" and row["engine"] == "e1" and row["code"] is row["blame"] is None
    assert row["ended_at"] == record["updated_at"] and row["turns"] == record["summary"]["turns"]
    assert row["seconds"]["run"] == record["timings"]["run_s"]
    assert "match" not in row


async def test_filters(site: Site):
    assert await ids(site) == ["o-0", "m-1", "m-0"]
    assert await ids(site, "run=mine&min_reward=1") == ["m-1"]
    assert await ids(site, "environment=shell&outcome=completed&trainable=true&limit=2") == ["o-0", "m-1"]
    assert await ids(site, "code=turn_limit") == await ids(site, "group=none") == await ids(site, "agent=codex") == []
    assert await ids(site, "state=ended&policy=default") == ["o-0", "m-1", "m-0"]


async def test_pages(site: Site):
    first = (await site.get("/v1/results?limit=2")).body
    assert first["total"] == 3 and first["total_is_exact"]
    second = (await site.get(f"/v1/results?limit=2&after={first['next']}")).body
    assert [row["id"] for row in second["rows"]] == ["m-0"] and second["next"] is None


async def test_search_finds_words_of_messages_and_tasks(site: Site):
    (row,) = await rows(site, "search=the%20pebb")
    assert row["id"] == "m-0"
    assert row["match"]["hit"] == "the pebb" and row["match"]["before"].endswith("count ")
    assert len(await ids(site, "search=files%20first")) == 3
    assert await ids(site, "search=nowhere") == []
    assert len(await ids(site, "search=%20")) == 3, "an empty field is no search"


async def test_live_rollouts(site: Site):
    assert await ids(site, "state=live") == ["q-1", "q-0"] == await ids(site, "state=queued")
    assert await ids(site, "state=run") == await ids(site, "state=live&outcome=failed") == []
    first = (await site.get("/v1/results?state=live&limit=1")).body
    assert [row["id"] for row in first["rows"]] == ["q-1"] and not first["total_is_exact"]
    assert first["rows"][0]["state"] == "queued" and first["rows"][0]["ended_at"] is None
    second = (await site.get(f"/v1/results?state=live&limit=1&after={first['next']}")).body
    assert [row["id"] for row in second["rows"]] == ["q-0"]


async def test_other_tenants_rollouts_are_not_in_it(site: Site):
    assert await ids(site, "", TRAINER) == await ids(site, "search=files", TRAINER) == ["m-1", "m-0"]
    assert await ids(site, "search=xylophone", TRAINER) == [] != await ids(site, "search=xylophone", OTHER)
    assert await ids(site, "state=live", OTHER) == []
    assert (await site.get("/v1/results", token=TRAINER)).body["total"] == 2
    assert (await site.get("/v1/results?run=other", token=TRAINER)).status == 404


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=201", "limit"),
        ("limit=0", "limit"),
        ("after=e:1", "after"),
        ("after=c:x", "after"),
        ("state=live&after=c:1", "after"),
        ("state=gone", "state"),
        ("min_reward=nan", "min_reward"),
        ("min_reward=1&max_reward=0", "min_reward"),
        ("version=-1", "version"),
        ("outcome=good", "outcome"),
        ("group=a%20b", "group"),
        ("search=%22%22", "search"),
        ("search=" + "x" * 201, "search"),
        ("state=live&search=x", "search"),
        ("environmnt=shell", "environmnt"),
    ],
)
async def test_invalid_queries_are_named(site: Site, query: str, named: str):
    answer = await site.get(f"/v1/results?{query}")
    assert answer.status == 422, answer.body
    assert named in str(answer.body)
