"""Quotas of tokens, ceilings for tasks, and fairness between tenants."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Run
from rollyard.core.access import Access, Quota
from rollyard.core.failure import RateLimited
from rollyard.pipeline.scheduler import Scheduler
from rollyard.service import build
from rollyard.service.security.access import Caller
from rollyard.service.security.rate_limits import RateLimits
from rollyard.store.base import QueuedRow
from rollyard.testing.script import Reply
from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, task

pytestmark = pytest.mark.slow


@asynccontextmanager
async def tenant(folder: Path, **quota: Any) -> AsyncGenerator[tuple[Site, str], None]:
    """A service, and a trainer's token with that quota."""
    async with scripted(Reply(finish())) as engine, open_site(folder, engines=[engine_table(engine)]) as site:
        created = await site.post("/v1/tokens", {"access": "trainer", "quota": quota})
        assert created.status == 201, created.body
        yield site, created.body["token"]


def many(count: int, **fields: Any) -> dict[str, Any]:
    return {**fields, "rollouts": [{"task": task()} for _ in range(count)]}


async def test_a_tokens_quota_of_queued_rollouts_is_enforced(tmp_path: Path) -> None:
    async with tenant(tmp_path, queued=3) as (site, token):
        await site.hold()
        assert (await site.post("/v1/rollouts", many(2), token=token)).status == 202
        refused = await site.post("/v1/rollouts", many(2), token=token)
        assert (refused.status, refused.code) == (429, "quota_exceeded") and "room for 1" in refused.body["detail"]
        assert int(refused.headers["retry-after"]) > 0
        group = {"task": task(), "size": 2}
        assert (await site.post("/v1/groups", group, token=token)).code == "quota_exceeded"
        draw = {"source": {"tasks": [task()]}, "group_size": 4}
        assert "never has room" in (await site.post("/v1/draws", draw, token=token)).body["detail"]
        assert (await site.post("/v1/rollouts", many(5))).status == 202, "other tokens are not limited"
        assert (await site.post("/v1/rollouts", many(1), token=token)).status == 202
        listed = (await site.get("/v1/rollouts", token=token)).body["rollouts"]
        assert len(listed) == 3
        assert (await site.delete(f"/v1/rollouts/{listed[0]['id']}", token=token)).status == 202
        assert (await site.post("/v1/rollouts", many(1), token=token)).status == 202, "there is room again"


async def test_rescores_beyond_a_tokens_quota_of_queued_rollouts_are_429(tmp_path: Path) -> None:
    async with tenant(tmp_path, queued=1) as (site, token):
        (one,) = (await site.post("/v1/rollouts", many(1), token=token)).body["rollouts"]
        await site.ended(one["id"])
        assert (await site.call("PATCH", "/v1/pools", json={"eval": 0})).status == 200
        path = f"/v1/rollouts/{one['id']}/rescore"
        first = asyncio.create_task(site.post(path, token=token))
        async with asyncio.timeout(60):
            while not (await site.get("/v1/status")).body["pools"]["eval"]["waiting"]:  # it has left the queue
                await asyncio.sleep(0.02)
        calls = [asyncio.create_task(site.post(path, token=token)) for _ in range(4)]
        async with asyncio.timeout(60):
            while sum(call.done() for call in calls) < 3:  # one is queued
                await asyncio.sleep(0.02)
        for refused in [call.result() for call in calls if call.done()]:
            assert (refused.status, refused.code) == (429, "quota_exceeded")
            assert int(refused.headers["retry-after"]) > 0
        assert (await site.call("PATCH", "/v1/pools", json={"eval": 1})).status == 200
        assert sorted(answer.status for answer in await asyncio.gather(first, *calls)) == [200, 200, 429, 429, 429]


async def test_a_runs_quota_of_queued_rollouts_is_enforced(tmp_path: Path) -> None:
    async with tenant(tmp_path) as (site, token):
        await site.hold()
        created = await site.post("/v1/runs", {"id": "small", "max_queued": 2}, token=token)
        assert (created.status, created.body["max_queued"]) == (201, 2)
        assert (await site.post("/v1/rollouts", many(2, run="small"), token=token)).status == 202
        refused = await site.post("/v1/rollouts", many(1, run="small"), token=token)
        assert (refused.status, refused.code) == (429, "quota_exceeded") and "room for 0" in refused.body["detail"]
        draw = {"run": "small", "source": {"tasks": [task()]}, "group_size": 3}
        assert "(the run's quota is 2)" in (await site.post("/v1/draws", draw, token=token)).body["detail"]
        assert (await site.post("/v1/runs", {"id": "other"}, token=token)).status == 201
        assert (await site.post("/v1/rollouts", many(3, run="other"), token=token)).status == 202


async def test_a_tokens_quota_of_live_rollouts_is_enforced(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        created = (await site.post("/v1/tokens", {"access": "trainer", "quota": {"live": 2}})).body
        for run in ("one", "two"):
            assert (await site.post("/v1/runs", {"id": run}, token=created["token"])).status == 201
            assert (await site.post("/v1/rollouts", many(3, run=run), token=created["token"])).status == 202
        (other,) = (await site.post("/v1/rollouts", many(1))).body["rollouts"]
        async with asyncio.timeout(60):
            while (await site.get(f"/v1/rollouts/{other['id']}")).body["state"] != "run":
                await asyncio.sleep(0.02)
        states = [one["state"] for one in (await site.get("/v1/rollouts", token=created["token"])).body["rollouts"]]
        assert states.count("queued") == 4


async def test_a_quota_is_changed_without_a_restart_and_rotation_keeps_it(tmp_path: Path) -> None:
    async with tenant(tmp_path, queued=1) as (site, token):
        await site.hold()
        assert (await site.post("/v1/rollouts", many(2), token=token)).code == "quota_exceeded"
        (listed,) = (await site.get("/v1/tokens")).body["tokens"]
        path = f"/v1/tokens/{listed['id']}"
        assert (await site.put(f"{path}/quota", {"queued": 0})).status == 422
        changed = await site.put(f"{path}/quota", {"queued": 2, "priority": 3})
        assert (changed.status, changed.body["quota"]["queued"], changed.body["quota"]["live"]) == (200, 2, None)
        token = (await site.post(f"{path}/rotate", {})).body["token"]
        assert (await site.post("/v1/rollouts", many(3), token=token)).code == "quota_exceeded"
        assert (await site.post("/v1/rollouts", many(2), token=token)).status == 202
        (entry,) = [one for one in (await site.get("/v1/audit")).body["entries"] if one["action"] == "change_quota"]
        assert (entry["target"], entry["detail"]["queued"]) == (listed["id"], 2)
        assert (await site.put("/v1/tokens/tok_none/quota", {})).status == 404


async def test_a_changed_quota_of_live_rollouts_applies_to_queued_ones(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        created = (await site.post("/v1/tokens", {"access": "trainer", "quota": {"live": 1}})).body
        assert (await site.post("/v1/rollouts", many(3), token=created["token"])).status == 202

        async def running(count: int) -> None:
            async with asyncio.timeout(60):
                while True:
                    listed = (await site.get("/v1/rollouts", token=created["token"])).body["rollouts"]
                    if sum(one["state"] == "run" for one in listed) == count:
                        return
                    await asyncio.sleep(0.02)

        await running(1)
        assert (await site.put(f"/v1/tokens/{created['id']}/quota", {"live": 3})).status == 200
        await running(3)


async def test_a_tokens_highest_priority_is_enforced(tmp_path: Path) -> None:
    async with tenant(tmp_path, priority=5) as (site, token):
        await site.hold()
        for path, body in (
            ("/v1/runs", {"id": "r", "priority": 6}),
            ("/v1/rollouts", {"task": task(), "priority": 6}),
            ("/v1/groups", {"task": task(), "size": 1, "priority": 6}),
            ("/v1/draws", {"source": {"push": True}, "priority": 6}),
            ("/v1/evals", {"source": {"tasks": [task()]}, "priority": 6}),
            ("/v1/sessions", {"priority": 6}),
        ):
            refused = await site.post(path, body, token=token)
            assert refused.code == "forbidden" and "5 at most" in refused.body["detail"], path
        assert (await site.post("/v1/rollouts", {"task": task(), "priority": 5}, token=token)).status == 202
        evaluation = await site.post("/v1/evals", {"source": {"tasks": [task()]}}, token=token)
        assert evaluation.body["priority"] == 5, "the default is the highest allowed priority"


async def test_a_tokens_quota_of_sessions_is_enforced(tmp_path: Path) -> None:
    async with tenant(tmp_path, sessions=1) as (site, token):
        assert (await site.post("/v1/sessions", {"id": "one"}, token=token)).body["is_open"]
        assert (await site.post("/v1/sessions", {"id": "two"}, token=token)).code == "quota_exceeded"
        assert (await site.post("/v1/sessions", {"id": "mine"})).body["is_open"]
        assert (await site.post("/v1/sessions/one/reward", {"reward": 1.0}, token=token)).status == 200
        assert (await site.post("/v1/sessions", {"id": "two"}, token=token)).body["is_open"]


async def at_once(site: Site, path: str, bodies: list[dict[str, Any]], token: str | None) -> list[int]:
    """Sends these bodies in parallel. Returns the statuses in order of size."""
    answers = await asyncio.gather(*[site.post(path, body, token=token) for body in bodies])
    return sorted(answer.status for answer in answers)


async def test_parallel_calls_open_no_more_sessions_than_the_quota(tmp_path: Path) -> None:
    async with tenant(tmp_path, sessions=2) as (site, token):
        await site.hold()  # queued sessions count, too
        statuses = await at_once(site, "/v1/sessions?wait_s=0", [{"id": f"s{n}"} for n in range(8)], token)
        assert statuses == [201, 201, *[429] * 6]
        listed = (await site.get("/v1/rollouts", token=token)).body["rollouts"]
        assert await at_once(site, "/v1/sessions?wait_s=0", [{"id": one["id"]} for one in listed], token) == [201, 201]
        for one in listed:
            assert (await site.delete(f"/v1/sessions/{one['id']}", token=token)).status == 202
        statuses = await at_once(site, "/v1/sessions?wait_s=0", [{"id": f"t{n}"} for n in range(3)], token)
        assert statuses == [201, 201, 429]


async def test_parallel_calls_create_no_more_runs_than_the_limit(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_runs=2) as site:
        await site.hold()
        evaluation = {"source": {"tasks": [task()]}, "on_update": "fail"}
        runs, evals = await asyncio.gather(
            at_once(site, "/v1/runs", [{"id": f"r{n}"} for n in range(4)], TRAINER),
            at_once(site, "/v1/evals", [{"id": f"e{n}", **evaluation} for n in range(4)], TRAINER),
        )
        assert sorted([*runs, *evals]) == [201, 201, *[429] * 6]
        assert len((await site.get("/v1/runs", token=TRAINER)).body["runs"]) == 2


async def test_parallel_calls_create_no_more_draws_than_the_limit(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_draws=2) as site:
        await site.hold()
        draws = [{"id": f"d{n}", "source": {"tasks": [task()]}} for n in range(8)]
        assert (await site.get("/v1/runs/default", token=TRAINER)).status == 200
        assert await at_once(site, "/v1/draws", draws, TRAINER) == [201, 201, *[429] * 6]
        for draw in (await site.get("/v1/draws", token=TRAINER)).body["draws"]:
            assert (await site.delete(f"/v1/draws/{draw['id']}", token=TRAINER)).status == 202
        rewind = {"batch": 0, "version": 0}
        ids = [draw["id"] for draw in (await site.get("/v1/draws", token=TRAINER)).body["draws"]]
        more = [await site.post("/v1/draws", {**draws[0], "id": "more"}, token=TRAINER)]
        more += await asyncio.gather(*[site.post(f"/v1/draws/{id}/rewind", rewind, token=TRAINER) for id in ids])
        assert sorted(answer.status for answer in more) == [200, 201, 429], [answer.body for answer in more]


async def test_draws_of_an_owner_together_keep_to_its_quota_of_queued_rollouts(tmp_path: Path) -> None:
    async with tenant(tmp_path, queued=4) as (site, token):
        await site.hold()
        draws = [{"id": f"d{n}", "source": {"tasks": [task()]}, "group_size": 2} for n in range(6)]
        assert (await site.get("/v1/runs/default", token=token)).status == 200
        assert await at_once(site, "/v1/draws", draws, token) == [201] * 6
        asks = [site.post(f"/v1/draws/d{n}/batches", {"want": 4}, token=token) for n in range(6)]
        assert {answer.status for answer in await asyncio.gather(*asks)} == {200}
        assert len((await site.get("/v1/rollouts?state=queued", token=token)).body["rollouts"]) == 4


async def test_of_two_callers_who_create_one_run_at_once_the_second_is_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        calls = [site.post("/v1/runs", {"id": "one"}, token=token) for token in (TRAINER, OTHER)]
        assert sorted(answer.status for answer in await asyncio.gather(*calls)) == [201, 403]
        evaluation = {"id": "e", "run": "two", "source": {"tasks": [task()]}, "on_update": "fail"}
        calls = [site.post("/v1/evals", evaluation, token=token) for token in (TRAINER, OTHER)]
        assert sorted(answer.status for answer in await asyncio.gather(*calls)) == [201, 403]


async def test_a_tokens_quota_of_stored_bytes_is_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "STORED_EVERY_S", 0.02)
    async with tenant(tmp_path, stored_bytes=1) as (site, token):
        (first,) = (await site.post("/v1/rollouts", many(1), token=token)).body["rollouts"]
        cursor = (await site.ended(first["id"]))["cursor"]
        async with asyncio.timeout(20):
            while (refused := await site.post("/v1/rollouts", many(1), token=token)).status == 202:
                await asyncio.sleep(0.05)
        assert refused.code == "quota_exceeded" and "acknowledge" in refused.body["detail"]
        for one in (await site.get("/v1/rollouts", token=token)).body["rollouts"]:
            cursor = max(cursor, (await site.ended(one["id"]))["cursor"], key=lambda text: int(text[2:]))
        assert (await site.post("/v1/runs/default/ack", {"cursor": cursor}, token=token)).status == 200
        async with asyncio.timeout(20):
            while (await site.post("/v1/rollouts", many(1), token=token)).status != 202:
                await asyncio.sleep(0.05)


async def test_a_tokens_rate_limit_is_enforced(tmp_path: Path) -> None:
    async with tenant(tmp_path, requests_per_s=0.01) as (site, token):
        assert (await site.get("/v1/runs", token=token)).status == 200
        refused = await site.get("/v1/runs", token=token)
        assert (refused.status, refused.code) == (429, "rate_limited") and int(refused.headers["retry-after"]) > 90
        assert (await site.get("/v1/runs")).status == 200, "other tokens are not limited"


async def test_sign_ins_count_as_calls_of_their_token(tmp_path: Path) -> None:
    async with tenant(tmp_path, requests_per_s=0.01) as (site, token):
        assert (await site.post("/v1/login", {"token": token}, token="")).status == 200
        assert (await site.post("/v1/login", {"token": token}, token="")).code == "rate_limited"


def test_the_bucket_of_calls_fills_at_its_rate() -> None:
    rates, caller = RateLimits(), Caller(Access.TRAINER, "t", quota=Quota(requests_per_s=10.0))
    for _ in range(20):
        rates.check(caller, now=100.0)
    with pytest.raises(RateLimited) as refused:
        rates.check(caller, now=100.0)
    assert refused.value.data["retry_after_s"] == pytest.approx(0.1)
    rates.check(caller, now=100.125)
    with pytest.raises(RateLimited):
        rates.check(caller, now=100.125)
    for _ in range(20):
        rates.check(caller, now=1000.0)


# --- fairness -----------------------------------------------------------------------------------------


def test_an_owner_of_many_runs_gets_no_more_turns_than_an_owner_of_one() -> None:
    scheduler = Scheduler()
    for number in range(50):
        scheduler.set_quota(Run(f"flood-{number}", owner="flood"))
    scheduler.set_quota(Run("small", owner="small"))
    runs = [*[f"flood-{number}" for number in range(50)] * 20, *["small"] * 10]
    for seq, run in enumerate(runs):
        scheduler.push(QueuedRow(f"r{seq}", run, 0, seq, 1))
    turns = [row.run for _ in range(40) if (row := scheduler.pop(0.0)) is not None]
    assert [place for place, run in enumerate(turns) if run == "small"] == list(range(1, 20, 2))
    assert (scheduler.queued_by("small"), scheduler.queued_by("flood")) == (0, 1000 - 30)


def test_an_idle_owner_accumulates_no_turns() -> None:
    scheduler = Scheduler()
    for owner in ("a", "b"):
        scheduler.set_quota(Run(owner, owner=owner))
    for number in range(100):
        scheduler.push(QueuedRow(f"a{number}", "a", 0, number, 1))
    for _ in range(50):
        assert scheduler.pop(0.0) is not None
    for number in range(10):
        scheduler.push(QueuedRow(f"b{number}", "b", 0, 100 + number, 1))
    turns = "".join(row.run for _ in range(10) if (row := scheduler.pop(0.0)) is not None)
    assert turns in ("ababababab", "bababababa")


async def test_a_small_tenant_does_not_wait_for_one_that_floods_the_queue(tmp_path: Path) -> None:
    """Counted in rollouts of the flooding tenant that ended while a small one waited, not in seconds."""
    async with (
        scripted(Reply(finish(), latency_s=0.02)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], run_slots=4, init_slots=2, ready_slots=2) as site,
    ):
        tokens = [(await site.post("/v1/tokens", {"access": "trainer"})).body["token"] for _ in range(2)]
        flood, small = tokens
        assert (await site.post("/v1/rollouts", many(400), token=flood)).status == 202
        waits: list[int] = []
        for _ in range(10):
            before = await ended_of(site, flood)
            (one,) = (await site.post("/v1/rollouts", many(1), token=small)).body["rollouts"]
            assert (await site.ended(one["id"]))["outcome"] == "completed"
            waits.append(await ended_of(site, flood) - before)
        assert max(waits) < 60, waits  # without turns between owners: 400, all that were queued before
        for row in (await site.get("/v1/rollouts?state=queued&limit=1000", token=flood)).body["rollouts"]:
            await site.delete(f"/v1/rollouts/{row['id']}", token=flood)


async def ended_of(site: Site, token: str) -> int:
    return len((await site.get("/v1/rollouts?state=ended&limit=1000", token=token)).body["rollouts"])


# --- ceilings for tasks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sandbox": {"disk_bytes": 1 << 60}}, "sandbox.disk_bytes"),
        ({"sandbox": {"files": 10_000_001}}, "sandbox.files"),
        ({"sandbox": {"memory_bytes": 1 << 50}}, "sandbox.memory_bytes"),
        ({"sandbox": {"cpus": 4096}}, "sandbox.cpus"),
        ({"sandbox": {"processes": 1 << 30}}, "sandbox.processes"),
        ({"limits": {"run_s": 29 * 86_400}}, "limits.run_s"),
        ({"limits": {"eval_s": 29 * 86_400}}, "limits.eval_s"),
    ],
)
async def test_a_task_above_the_ceilings_is_refused(fields: dict[str, Any], says: str, tmp_path: Path):
    async with open_site(tmp_path) as site:
        refused = await site.post("/v1/rollouts", {"task": {**task(), **fields}})
        assert (refused.status, refused.code) == (422, "task_invalid") and says in refused.body["detail"]
        assert (await site.post("/v1/sessions?wait_s=0", {"limits": fields.get("limits", {})})).status in (201, 422)


async def test_a_token_creates_a_limited_number_of_runs(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_runs=2) as site:
        await site.hold()
        for name in ("one", "two", "one"):
            assert (await site.post("/v1/runs", {"id": name}, token=TRAINER)).status in (200, 201)
        refused = await site.post("/v1/runs", {"id": "three"}, token=TRAINER)
        assert (refused.status, refused.code) == (429, "quota_exceeded") and "max_runs" in refused.body["detail"]
        body = {"source": {"tasks": [task()]}, "on_update": "fail"}
        assert (await site.post("/v1/evals", body, token=TRAINER)).code == "quota_exceeded"
        assert (await site.post("/v1/runs", {"id": "three"}, token=OTHER)).status == 201
        for name in ("four", "five", "six"):
            assert (await site.post("/v1/runs", {"id": name})).status == 201, "admins are not limited"
        await site.delete_run("one", TRAINER)
        assert (await site.post("/v1/runs", {"id": "seven"}, token=TRAINER)).status == 201


async def test_a_token_has_a_limited_number_of_active_draws(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_draws=2) as site:
        await site.hold()

        async def create(name: str, token: str | None = TRAINER) -> int:
            source = {"tasks": [task()]}
            run = "" if token is None else token[:4].lower()
            await site.post("/v1/runs", {"id": f"run{run}"}, token=token)
            answer = await site.post("/v1/draws", {"id": name, "run": f"run{run}", "source": source}, token=token)
            assert answer.status == 201 or "max_draws" in answer.body["detail"], answer.body
            return answer.status

        assert [await create(name) for name in ("a", "b", "a", "c")] == [201, 201, 201, 429]
        assert await create("d", OTHER) == 201
        assert [await create(name, None) for name in ("e", "f", "g")] == [201] * 3, "admins are not limited"
        await site.delete("/v1/draws/a", token=TRAINER)
        assert await create("c") == 201
        refused = await site.post("/v1/draws/a/rewind", {"batch": 0, "version": 0}, token=TRAINER)
        assert (refused.status, refused.code) == (429, "quota_exceeded"), refused.body


async def test_the_operator_sets_the_ceilings(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_task_cpus=2, max_task_s=60) as site:
        assert (await site.post("/v1/rollouts", {"task": task(sandbox={"cpus": 2.5})})).code == "task_invalid"
        assert (await site.post("/v1/sessions?wait_s=0", {"limits": {"run_s": 61}})).code == "task_invalid"
        assert (await site.post("/v1/rollouts", {"task": task(sandbox={"cpus": 2})})).status == 202


async def test_the_ceilings_lower_the_deadlines_of_tasks_that_set_none(tmp_path: Path) -> None:
    plain = {**task(), "limits": {"eval_s": 30}}
    async with open_site(tmp_path, max_task_s=60) as site:
        await site.hold()
        (one,) = (await site.post("/v1/rollouts", {"task": plain})).body["rollouts"]
        assert [one["task"]["limits"][name] for name in ("init_s", "run_s", "eval_s")] == [60, 60, 30]
        for path, body in (
            ("/v1/runs", {"id": "r", "defaults": {"limits": {"run_s": 40}}}),
            ("/v1/groups", {"run": "r", "task": plain, "size": 1}),
            ("/v1/draws", {"run": "r", "source": {"tasks": [plain]}}),
            ("/v1/evals", {"source": {"tasks": [plain]}}),
            ("/v1/sessions?wait_s=0", {}),
        ):
            assert (await site.post(path, body)).status in (201, 202), path
        (two,) = (await site.post("/v1/rollouts", {"run": "r", "task": plain})).body["rollouts"]
        assert (two["task"]["limits"]["init_s"], two["task"]["limits"]["run_s"]) == (60, 40)
