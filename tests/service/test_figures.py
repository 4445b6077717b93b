"""What the dashboard shows of runs, draws, evaluations and policies: series, and lists of groups, batches and tasks."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.service.site import OTHER, TRAINER, Site, engine_table, open_site, scripted
from tests.service.skill import skilled
from tests.service.test_draws import mixed, take, tasks
from tests.service.test_evals import graded, over

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A draw `d` with two batches in the default run, the first acknowledged, and an evaluation `e`."""
    folder: Path = tmp_path_factory.mktemp("site")
    async with skilled(mixed) as engine, open_site(folder, engines=[engine_table(engine)]) as opened:
        body = {"id": "d", "source": {"tasks": tasks(6)}, "group_size": 2, "budget": {"batches": 2}}
        assert (await opened.post("/v1/draws", body)).status == 201
        for number in (1, 2):
            await take(opened, 2, number)
        assert (await opened.post("/v1/draws/d/ack", {"batch": 1})).status == 200
        source = {"tasks": [graded("first", system_prompt="a"), graded("second", system_prompt="b")]}
        assert (
            await opened.post("/v1/evals", {"id": "e", "source": source, "k": 2, "by": "system_prompt"})
        ).status == 201
        await over(opened)
        async with asyncio.timeout(60):
            store = opened.served.app_state.store
            while await store.has_unfinished() or (await opened.get("/v1/results")).body["behind"]:
                await asyncio.sleep(0.02)
        yield opened


async def test_a_runs_series(site: Site):
    body = (await site.get("/v1/runs/default/series?by=time&points=10")).body
    listed = (await site.get("/v1/results?run=default&limit=200")).body["rows"]
    rewards = [row["reward"] for row in listed if row["reward"] is not None]
    assert sum(body["count"]) == body["totals"]["count"] == len(listed)
    assert body["totals"]["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert len(body["x"]) <= 10 and body["x"] == sorted(body["x"])
    columns = ("count", "reward", "pass_rate", "response_tokens", "turns", "staleness")
    assert {len(body[name]) for name in columns} == {len(body["x"])}
    assert {len(column) for column in body["share"].values()} == {len(body["x"])}
    draw = (await site.get("/v1/draws/d")).body["figures"]
    assert body["groups"]["delivered"] == draw["delivered"] == 4
    assert body["tokens"]["delivered"] == draw["tokens_delivered"] > 0
    assert body["tokens"]["sampled"] == sum(row["sampled_tokens"] for row in listed)
    counts, spent = body["group_counts"], body["group_tokens"]
    assert {len(column) for column in (*counts.values(), *spent.values())} == {len(body["x"])}
    assert {state: sum(column) for state, column in counts.items()} == {
        state: number for state, number in body["groups"].items() if number and state != "open"
    }
    assert sum(spent["delivered"]) == draw["tokens_delivered"]
    assert body["environments"] == ["shell"]
    by_version = (await site.get("/v1/runs/default/series?by=version")).body
    assert by_version["x"] == [0.0] and by_version["staleness"] == [0.0]
    assert by_version["group_counts"]["delivered"] == [4]
    assert (await site.get("/v1/runs/default/series?by=age")).status == 422
    assert (await site.get("/v1/runs/default/series?points=100000")).status == 422
    assert (await site.get("/v1/runs/unknown/series")).status == 404


async def test_groups_are_listed_newest_first(site: Site):
    async def ids(query: str, token: str | None = None) -> list[str]:
        found, after = list[str](), ""
        while True:
            answer = await site.get(f"/v1/groups?limit=3&{query}{after}", token=token)
            assert answer.status == 200, answer.body
            found += [group["id"] for group in answer.body["groups"]]
            assert all("members" not in group for group in answer.body["groups"])
            if answer.body["next"] is None:
                return found
            after = f"&after={answer.body['next']}"

    every = await ids("")
    assert every[:2] == ["e.1", "e.0"] and len(every) == len(set(every))
    assert await ids("draw=d") == await ids("run=default") == every[2:]
    assert len(await ids("state=delivered")) == 4
    assert await ids("", TRAINER) == []
    assert (await site.get("/v1/groups?run=default.x", token=OTHER)).status == 404
    assert (await site.get("/v1/groups?draw=none")).status == 404
    assert (await site.get("/v1/groups?after=e:1")).status == 422


async def test_batches_are_listed_with_their_acknowledgement(site: Site):
    body = (await site.get("/v1/draws/d/batches")).body
    assert [(batch["number"], batch["acked"], batch["delivered"]) for batch in body["batches"]] == [
        (2, False, 2),
        (1, True, 2),
    ]
    assert body["next"] is None
    assert all(0 < batch["created_at"] <= batch["closed_at"] for batch in body["batches"])
    await site.post("/v1/draws", {"id": "o", "source": {"push": True}, "group_size": 2})
    await site.post("/v1/draws/o/batches", {"want": 1, "number": 1})
    assert (await site.get("/v1/draws/o/batches")).body["batches"][0]["closed_at"] is None
    first = (await site.get("/v1/draws/d/batches?limit=1")).body
    second = (await site.get(f"/v1/draws/d/batches?limit=1&after={first['next']}")).body
    assert [batch["number"] for batch in first["batches"] + second["batches"]] == [2, 1] and second["next"] is None
    assert (await site.get("/v1/draws/d/batches", token=TRAINER)).status == 404


async def test_the_tasks_of_an_evaluation(site: Site):
    body = (await site.get("/v1/evals/e/tasks")).body
    assert body["tasks"] == [
        {
            "index": index,
            "group": f"e.{index}",
            "name": name,
            "by": {"environment": "shell", "system_prompt": family},
            "samples": 2,
            "passes": 1,
            "mean_reward": 0.5,
            "missing": 0,
        }
        for index, (name, family) in enumerate((("first", "a"), ("second", "b")))
    ]
    assert body["next"] is None
    first = (await site.get("/v1/evals/e/tasks?limit=1")).body
    second = (await site.get(f"/v1/evals/e/tasks?limit=1&after={first['next']}")).body
    assert first["tasks"] + second["tasks"] == body["tasks"] and second["next"] is None
    assert (await site.get("/v1/evals/e/tasks?after=t:999999999999")).body == {"tasks": [], "next": None}
    assert (await site.get("/v1/evals/e/tasks?after=g:1")).status == 422
    assert (await site.get("/v1/evals/e/tasks", token=TRAINER)).status == 404


async def test_changes_of_versions(tmp_path: Path):
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as opened:
        history = opened.served.app_state.history
        for version in (3, 4):
            assert (await opened.post("/v1/policies/default/pause", {})).status == 200
            assert (await opened.post("/v1/policies/default/resume", {"version": version})).status == 200
            history.sample_versions()
            history.sample_versions()
        changes = (await opened.get("/v1/policies/default/versions?hours=1")).body["engines"]["e1"]
        assert [version for _, version in changes] == [0, 3, 4]
        assert [at for at, _ in changes] == sorted(at for at, _ in changes)
        assert (await opened.get("/v1/policies/none/versions")).status == 404
        assert (await opened.get("/v1/policies/default/versions?hours=0")).status == 422
        latest = history.versions("default", changes[-1][0])
        assert latest == {"e1": [tuple(changes[-1])]}
