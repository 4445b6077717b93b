"""Rollouts over HTTP from submit to traces, and every way to wait for them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa
import pytest

from rollyard.service import sse
from rollyard.testing.script import Reply
from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, shell, task

ARROW = {"Accept": "application/vnd.apache.arrow.stream"}


async def test_a_rollout_from_submit_to_traces(tmp_path: Path) -> None:
    async with (
        scripted(shell("echo 42 > answer.txt"), finish()) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        submitted_task = task(data={"instruction": "write 42", "checks": ["grep -qx 42 answer.txt"]})
        answer = await site.post("/v1/rollouts", {"id": "r1", "task": submitted_task, "group": "g", "index": 3})
        assert answer.status == 202
        (queued,) = answer.body["rollouts"]
        assert (queued["id"], queued["run"], queued["state"], queued["cursor"]) == ("r1", "default", "queued", None)
        record = await site.ended("r1")
        assert (record["outcome"], record["reward"], record["trainable"]) == ("completed", 1.0, True), record
        assert (record["group"], record["index"], record["attempt"], record["cursor"]) == ("g", 3, 1, "e:1")
        assert record["summary"]["turns"] == 2
        assert record["timings"]["run_s"] > 0
        assert record["task"]["data"] == submitted_task["data"]
        assert record["failure"] is None
        assert "trajectory" not in record

        whole = (await site.get("/v1/rollouts/r1?include=trajectory")).body
        assert whole["trajectory"]["turns"] == 2
        assert [message["role"] for message in whole["trajectory"]["messages"]][-1] in ("assistant", "tool")
        (trace,) = (await site.get("/v1/rollouts/r1/traces")).body["traces"]
        assert trace == whole["trajectory"]["traces"][0]
        length = len(trace["token_ids"])
        assert length == len(trace["mask"]) == len(trace["logprobs"]) == len(trace["versions"])
        assert sum(trace["mask"]) == record["summary"]["sampled_tokens"]

        reply = await site.get("/v1/rollouts/r1/traces", headers=ARROW)
        assert reply.headers["content-type"] == ARROW["Accept"]
        (row,) = pa.ipc.open_stream(reply.body).read_all().to_pylist()
        assert row["token_ids"] == trace["token_ids"]
        assert row["logprobs"] == np.array(trace["logprobs"], np.float32).tolist()
        reply = await site.get("/v1/rollouts/r1", headers=ARROW)
        assert json.loads(pa.ipc.open_stream(reply.body).schema.metadata[b"record"]) == record

        rescored = await site.post("/v1/rollouts/r1/rescore")
        assert rescored.status == 200, rescored.body
        assert [score["reward"] for score in rescored.body["scores"]] == [1.0]
        assert rescored.body["reward"] == 1.0

        acknowledged = await site.post("/v1/runs/default/ack", {"cursor": record["cursor"]})
        assert acknowledged.body == {"acknowledged": 1}
        deleted = await site.get("/v1/rollouts/r1/traces")
        assert (deleted.status, deleted.code) == (410, "gone")
        assert (await site.get("/v1/rollouts/r1?include=trajectory")).body["trajectory"] is None
        deleted = await site.post("/v1/rollouts/r1/rescore")
        assert (deleted.status, deleted.code) == (410, "gone")


async def test_a_runs_defaults_and_priority_reach_its_rollouts(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        run = {"id": "r", "defaults": {"environment": "shell", "limits": {"max_turns": 7}}, "priority": 5, "seed": 3}
        created = await site.post("/v1/runs", run, token=TRAINER)
        assert (created.status, created.body["seed"], created.body["policy"]) == (201, 3, "default")
        assert "owner" not in created.body
        body = {"run": "r", "task": {"data": task()["data"], "limits": {"run_s": 9}}}
        (record,) = (await site.post("/v1/rollouts", body)).body["rollouts"]
        assert record["priority"] == 5
        assert record["id"].startswith("ro_")
        limits = record["task"]["limits"]
        assert (record["task"]["environment"], limits["max_turns"], limits["run_s"]) == ("shell", 7, 9.0)
        listed = (await site.get("/v1/runs")).body["runs"]
        assert [entry["id"] for entry in listed] == ["r"]
        await site.delete_run("r")
        assert (await site.get(f"/v1/rollouts/{record['id']}")).status == 404


async def test_pages_continue_from_each_other(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        ids = [f"r{n}" for n in range(5)]
        await site.submit(*ids)
        listed_ids, after = [], ""
        while True:
            page = (await site.get(f"/v1/rollouts?state=queued&limit=2{after}")).body
            listed_ids += [record["id"] for record in page["rollouts"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert listed_ids == ids

        assert (await site.get("/v1/rollouts?state=ended")).body == {"rollouts": [], "next": "e:0", "unfinished": True}
        for rollout_id in ("r3", "r1", "r4"):
            await site.delete(f"/v1/rollouts/{rollout_id}")
        page = (await site.get("/v1/rollouts?state=ended&limit=2")).body
        assert ([record["id"] for record in page["rollouts"]], page["next"]) == (["r3", "r1"], "e:2")
        page = (await site.get("/v1/rollouts?state=ended&after=e:2")).body
        assert ([record["id"] for record in page["rollouts"]], page["next"]) == (["r4"], "e:3")
        empty = (await site.get("/v1/rollouts?state=ended&after=e:3")).body
        assert empty == {"rollouts": [], "next": "e:3", "unfinished": True}


async def test_a_cancel_is_acknowledged_in_every_state(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.submit("r1")
        answer = await site.delete("/v1/rollouts/r1")
        assert (answer.status, answer.body) == (202, {"id": "r1", "state": "ended"})
        assert (await site.delete("/v1/rollouts/r1")).status == 202
        record = (await site.get("/v1/rollouts/r1")).body
        assert (record["outcome"], record["failure"]["code"], record["reward"]) == ("cancelled", "cancelled", None)
        early = await site.delete("/v1/rollouts/early")
        assert early.body == {"id": "early", "state": "cancelled_before_submit"}
        (record,) = await site.submit("early")
        assert (record["state"], record["outcome"]) == ("ended", "cancelled")


async def test_a_long_poll_returns_when_the_rollout_ends(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.submit("r1", "r2")
        one = asyncio.create_task(site.get("/v1/rollouts/r1?wait_s=30"))
        first = asyncio.create_task(site.get("/v1/rollouts?state=ended&run=default&wait_s=30"))
        await waiting(site, 2)
        assert not one.done()
        await site.delete("/v1/rollouts/r1")
        assert (await one).body["outcome"] == "cancelled"
        page = (await first).body
        assert ([record["id"] for record in page["rollouts"]], page["next"]) == (["r1"], "e:1")
        later = asyncio.create_task(site.get("/v1/rollouts?state=ended&after=e:1&wait_s=30"))
        await waiting(site, 1)
        await site.delete("/v1/rollouts/r2")
        assert [record["id"] for record in (await later).body["rollouts"]] == ["r2"]


async def test_a_long_poll_returns_after_max_wait_s(tmp_path: Path) -> None:
    async with open_site(tmp_path, max_wait_s=0.05) as site:
        await site.hold()
        await site.submit("r1")
        assert (await site.get("/v1/rollouts/r1?wait_s=1e9")).body["state"] == "queued"
        assert (await site.get("/v1/rollouts?state=ended&wait_s=1e9")).body == {
            "rollouts": [],
            "next": "e:0",
            "unfinished": True,
        }


def waits() -> int:
    """Number of tasks of this process that belong to a waiting call."""
    names = ("_first_ended", "Pipeline.wait", "disconnected", "EventStream._pump")
    return sum(
        any(name in getattr(task.get_coro(), "__qualname__", "") for name in names) for task in asyncio.all_tasks()
    )


async def waiting(site: Site, calls: int) -> None:
    """Waits until this many calls wait in the service: each has a task for its work and one for its client."""
    async with asyncio.timeout(90):
        while waits() != 2 * calls:
            await site.get("/healthz")  # a round trip through the same loop


@pytest.mark.parametrize(
    "path",
    ["/v1/rollouts/r1?wait_s=60", "/v1/rollouts?state=ended&wait_s=60", "/v1/events"],
    ids=["one", "list", "sse"],
)
async def test_a_client_that_disconnects_leaves_no_tasks_behind(tmp_path: Path, path: str) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.submit("r1")
        before = len(asyncio.all_tasks())
        async with aiohttp.ClientSession() as other:
            calls = [asyncio.create_task(_read(other, site, path)) for _ in range(3)]
            await waiting(site, 3)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await waiting(site, 0)
        async with asyncio.timeout(90):
            while len(asyncio.all_tasks()) > before:
                await site.get("/healthz")
        assert not site.served.app_state.pipeline.event_log._ends


async def _read(http: aiohttp.ClientSession, site: Site, path: str) -> None:
    async with http.get(site.url + path, headers={"Authorization": f"Bearer {site.token}"}) as reply:
        await reply.read()


async def frames(reply: aiohttp.ClientResponse, count: int) -> list[dict[str, Any]]:
    """The next `count` events of a stream."""
    events: list[dict[str, Any]] = []
    entry: dict[str, Any] = {}
    async with asyncio.timeout(90):
        async for line in reply.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name in ("id", "event"):
                entry[name] = value
            elif name == "data":
                events.append({**entry, **json.loads(value)})
                entry = {}
                if len(events) == count:
                    return events
    raise AssertionError("the stream ended early")


async def test_events_report_each_change_and_can_be_resumed(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.post("/v1/runs", {"id": "other"})
        headers = {"Authorization": f"Bearer {site.token}"}
        async with site.http.get(f"{site.url}/v1/events?run=default", headers=headers) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            await site.post("/v1/rollouts", {"run": "other", "id": "x", "task": task()})
            await site.submit("r1")
            await site.delete("/v1/rollouts/r1")
            queued, ended = await frames(reply, 2)
        assert (queued["event"], queued["rollout"], queued["run"], queued["state"]) == (
            "state",
            "r1",
            "default",
            "queued",
        )
        assert (ended["state"], ended["outcome"], ended["code"], ended["attempt"]) == (
            "ended",
            "cancelled",
            "cancelled",
            1,
        )
        assert ended["at"] >= queued["at"]
        async with site.http.get(f"{site.url}/v1/events?after={queued['id']}", headers=headers) as reply:
            assert (await frames(reply, 1))[0]["id"] == ended["id"]
        resumed = {**headers, "Last-Event-ID": queued["id"]}
        async with site.http.get(f"{site.url}/v1/events", headers=resumed) as reply:
            assert (await frames(reply, 1))[0]["id"] == ended["id"]
        async with site.http.get(f"{site.url}/v1/events?after=0-1&run=other", headers=headers) as reply:
            assert (await frames(reply, 1))[0]["event"] == "gap"


async def test_a_stream_of_events_ends_with_its_token(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        rotated, revoked = [(await site.post("/v1/tokens", {"access": "reader"})).body for _ in range(2)]
        for number, token in enumerate((rotated, revoked)):
            headers = {"Authorization": f"Bearer {token['token']}"}
            async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/events", headers=headers) as reply:
                await site.submit(f"before-{number}")
                assert (await frames(reply, 1))[0]["rollout"] == f"before-{number}"
                if token is rotated:
                    assert (await site.post(f"/v1/tokens/{token['id']}/rotate", {})).status == 200
                else:
                    assert (await site.delete(f"/v1/tokens/{token['id']}")).status == 204
                await site.submit(f"after-{number}")
                assert b"data:" not in await reply.content.read()


async def test_a_tenants_events_include_runs_that_it_creates_later_and_no_others(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        headers = {"Authorization": f"Bearer {TRAINER}"}
        async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/events", headers=headers) as reply:
            for run, token in (("one", TRAINER), ("theirs", OTHER), ("two", TRAINER)):
                assert (await site.post("/v1/runs", {"id": run}, token=token)).status == 201
                assert (await site.post("/v1/rollouts", {"run": run, "task": task()}, token=token)).status == 202
            assert [event["run"] for event in await frames(reply, 2)] == ["one", "two"]
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            waits = group.create_task(site.get("/v1/rollouts?state=ended&wait_s=60", token=TRAINER))
            await waiting(site, 1)
            for token in (OTHER, TRAINER):
                (one,) = (await site.get("/v1/rollouts?limit=1", token=token)).body["rollouts"]
                assert (await site.delete(f"/v1/rollouts/{one['id']}", token=token)).status == 202
        assert [one["run"] for one in waits.result().body["rollouts"]] == ["one"]


async def test_an_idle_stream_is_kept_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    async with open_site(tmp_path) as site:
        headers = {"Authorization": f"Bearer {site.token}"}
        async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/events", headers=headers) as reply:
            async for line in reply.content:
                if line == b": still here\n":
                    break


async def test_an_idle_stream_ends_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    async with open_site(tmp_path) as site:
        token = (await site.post("/v1/tokens", {"access": "reader"})).body
        headers = {"Authorization": f"Bearer {token['token']}"}
        async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/events", headers=headers) as reply:
            assert (await site.delete(f"/v1/tokens/{token['id']}")).status == 204
            assert b"data:" not in await reply.content.read()


async def test_a_cancel_in_run_ends_it(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.submit("r1")
        await engine.busy()
        assert (await site.delete("/v1/rollouts/r1")).body["state"] in ("run", "ended")
        assert (await site.ended("r1"))["outcome"] == "cancelled"
        await engine.idle()
        async with asyncio.timeout(60):
            while (await site.get("/v1/status")).body["pools"]["live"]["active"]:
                await asyncio.sleep(0.02)


async def test_traces_of_an_unfinished_rollout_are_404(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        await site.submit("r1")
        answer = await site.get("/v1/rollouts/r1/traces")
        assert (answer.status, answer.code) == (404, "not_found")
        assert "its traces are available when it has ended" in answer.body["detail"]
        early = await site.post("/v1/rollouts/r1/rescore")
        assert (early.status, early.code) == (422, "invalid_request")
        await site.delete("/v1/rollouts/r1")
        assert (await site.get("/v1/rollouts/r1/traces")).body == {"traces": []}


async def test_many_rollouts_are_returned_in_order_all_or_none(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.hold()
        ids = [f"r{n}" for n in range(250)]
        assert [record["id"] for record in await site.submit(*ids)] == ids
        again = await site.post(
            "/v1/rollouts", {"rollouts": [{"id": "new", "task": task()}, {"id": "r1", "task": task("other")}]}
        )
        assert (again.status, again.code) == (409, "id_conflict")
        assert (await site.get("/v1/rollouts/new")).status == 404
