"""What people look at: ids by their prefix, the results of runs, the texts of tokens."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, task

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service with three ended rollouts in the run `mine` of one trainer, two with reward 1; two in the default run,
    which stay queued; a group in the run `ours`."""
    folder: Path = tmp_path_factory.mktemp("site")
    async with scripted() as engine, open_site(folder, engines=[engine_table(engine)]) as opened:
        for run, token in (("mine", TRAINER), ("other", OTHER), ("empty", TRAINER)):
            assert (await opened.post("/v1/runs", {"id": run}, token=token)).status == 201
        failing = task()
        failing["data"]["checks"] = ["false"]
        rollouts = [{"id": f"r-{n}", "task": task("do it: 漢字 🚀") if n else failing} for n in range(3)]
        answer = await opened.post("/v1/rollouts", {"run": "mine", "rollouts": rollouts}, token=TRAINER)
        assert answer.status == 202, answer.body
        for rollout in rollouts:
            await opened.ended(str(rollout["id"]))
        await opened.hold()
        await opened.submit("r-queued", "s")
        await opened.post("/v1/groups", {"id": "group-1", "run": "other", "task": task(), "size": 1}, token=OTHER)
        yield opened


async def ids(site: Site, kind: str, prefix: str, *, run: str = "", token: str | None = None) -> list[tuple[str, str]]:
    answer = await site.get(f"/v1/ids?kind={kind}&prefix={prefix}" + (f"&run={run}" if run else ""), token=token)
    assert answer.status == 200, answer.body
    return [(item["id"], item["run"]) for item in answer.body["ids"]]


async def test_ids_are_found_by_their_prefix(site: Site):
    mine = [(f"r-{n}", "mine") for n in range(3)]
    assert sorted(await ids(site, "rollout", "r-")) == [*mine, ("r-queued", "default")]
    assert await ids(site, "rollout", "r-q") == [("r-queued", "default")]
    assert await ids(site, "rollout", "r-", run="mine") == mine
    assert await ids(site, "rollout", "r-1") == [("r-1", "mine")]
    assert await ids(site, "rollout", "r-11") == []
    assert await ids(site, "group", "gr") == [("group-1", "other")]
    assert await ids(site, "run", "mi") == [("mine", "mine")]
    assert await ids(site, "draw", "r") == await ids(site, "eval", "r") == []
    assert await ids(site, "rollout", "s") == [("s", "default")], "an id is not a prefix of others"


async def test_ids_of_other_tenants_are_not_found(site: Site):
    assert await ids(site, "rollout", "r-", token=OTHER) == []
    assert await ids(site, "rollout", "r-1", token=OTHER) == []
    assert await ids(site, "run", "m", token=OTHER) == []
    assert await ids(site, "group", "group-1", token=TRAINER) == []
    assert len(await ids(site, "rollout", "r-", token=TRAINER)) == 3
    assert (await site.get("/v1/ids?kind=rollout&prefix=r&run=mine", token=OTHER)).status == 404


@pytest.mark.parametrize(
    "query", ["kind=rollout", "kind=engine&prefix=a", "kind=rollout&prefix=", "kind=run&prefix=a~b"]
)
async def test_a_prefix_must_be_the_start_of_an_id(site: Site, query: str):
    assert (await site.get(f"/v1/ids?{query}")).status == 422


async def test_the_results_of_runs_are_listed(site: Site):
    answer = await site.get("/v1/runs?include=results", token=TRAINER)
    runs = {run["id"]: run["results"] for run in answer.body["runs"]}
    mine = runs["mine"]
    assert mine["states"] == {"queued": 0, "init": 0, "ready": 0, "run": 0, "eval": 0, "ended": 3}
    assert (mine["rewarded"], round(mine["mean_reward"], 3), mine["trainable"]) == (3, 0.667, 3)
    last = max([(await site.get(f"/v1/rollouts/r-{n}")).body["updated_at"] for n in range(3)])
    assert abs(mine["active_at"] - last) < 0.001
    assert runs["empty"]["mean_reward"] is runs["empty"]["active_at"] is None and "other" not in runs
    assert (await site.get("/v1/runs/mine?include=results")).body["results"] == mine
    assert "results" not in (await site.get("/v1/runs/mine")).body
    assert (await site.get("/v1/runs/default?include=results")).body["results"]["states"]["queued"] == 2
    assert (await site.get("/v1/runs?include=everything")).status == 422


async def test_a_listing_of_ended_rollouts_says_whether_others_are_unfinished(site: Site):
    assert (await site.get("/v1/rollouts?state=ended&run=mine")).body["unfinished"] is False
    assert (await site.get("/v1/rollouts?state=ended")).body["unfinished"] is True
    assert (await site.get("/v1/rollouts?state=ended", token=TRAINER)).body["unfinished"] is False
    assert (await site.get("/v1/rollouts?state=ended&group=group-1")).body["unfinished"] is True
    assert "unfinished" not in (await site.get("/v1/rollouts?run=mine")).body


async def test_tokens_have_their_texts(site: Site):
    (trace,) = (await site.get("/v1/rollouts/r-1/traces")).body["traces"]
    (texts,) = (await site.get("/v1/rollouts/r-1/texts")).body["texts"]
    assert len(texts) == len(trace["token_ids"])
    sampled = "".join(text for text, mask in zip(texts, trace["mask"], strict=True) if mask)
    assert sampled.startswith(finish()) and "do it: 漢字 🚀" in "".join(texts), "characters of several tokens, too"
    waiting = await site.get("/v1/rollouts/r-queued/texts")
    assert (waiting.status, waiting.code) == (404, "not_found")
    await site.delete("/v1/engines")
    assert (await site.get("/v1/rollouts/r-1/texts")).body == {"texts": [None]}, "no engine has the tokenizer now"
