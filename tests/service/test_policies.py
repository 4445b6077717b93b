"""Weight updates over HTTP: access, state across a restart, and a trainer that dies during one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollyard.client import AsyncClient, Client
from rollyard.core.failure import PolicyConflict, PolicyStuck
from rollyard.testing.script import Reply
from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted

pytestmark = pytest.mark.slow


async def until(site: Site, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(90):
        while not is_so(policy_status := (await site.get("/v1/policies/default")).body):
            await asyncio.sleep(0.01)
    return policy_status


async def test_a_complete_weight_update(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), stall_after=9)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        assert (await site.get("/v1/policies")).body["policies"][0]["name"] == "default"
        assert (await site.post("/v1/policies/default/resume", {"version": 3}, token=TRAINER)).status == 200
        await site.submit("r1")
        await engine.busy()
        paused = await site.post("/v1/policies/default/pause", {"lease_s": 60}, token=TRAINER)
        assert paused.status == 200, paused.body
        assert paused.body == {
            "name": "default",
            "owner": paused.body["holder"],
            "version": 3,
            "state": "paused",
            "mode": "abort",
            "lease_s": 60,
            "lease_left_s": pytest.approx(60, abs=20),
            "holder": paused.body["holder"],
            "engines": [{"id": "e1", "version": 3, "state": "up", "paused": True, "error": None}],
        }
        engine.script = scripted().script
        assert b'rollyard_policy_paused{policy="default"} 1.0' in (await site.get("/metrics")).body
        status = (await site.get("/v1/status")).body
        assert status["policies"][0]["state"] == "paused" and status["engines"][0]["paused"]
        renewed = await site.post("/v1/policies/default/renew", {"lease_s": 90}, token=TRAINER)
        assert renewed.body["lease_s"] == 90
        resumed = await site.post("/v1/policies/default/resume", {"version": 4}, token=TRAINER)
        assert (resumed.body["state"], resumed.body["version"], resumed.body["holder"]) == ("running", 4, None)
        record = await site.ended("r1")
        assert record["outcome"] == "completed", record
        (trace,) = (await site.get("/v1/rollouts/r1/traces")).body["traces"]
        sampled = [version for version, mask in zip(trace["versions"], trace["mask"], strict=True) if mask]
        assert sampled == [3] * 9 + [4] * (len(sampled) - 9) and len(sampled) > 9
        metrics = (await site.get("/metrics")).body
        assert b'rollyard_policy_version{policy="default"} 4.0' in metrics
        assert b'rollyard_policy_paused{policy="default"} 0.0' in metrics


async def test_unknown_policies_and_pauses_of_other_holders_are_refused(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        for verb, body in (("pause", {}), ("resume", {"version": 1}), ("renew", {})):
            answer = await site.post(f"/v1/policies/nobody/{verb}", body)
            assert (answer.status, answer.code) == (404, "not_found")
        assert (await site.get("/v1/policies/nobody")).status == 404
        assert (await site.post("/v1/policies/default/pause", {}, token=TRAINER)).status == 200
        for verb, body in (("pause", {}), ("resume", {"version": 1}), ("renew", {})):
            answer = await site.post(f"/v1/policies/default/{verb}", body, token=OTHER)
            assert (answer.status, answer.code) == (403, "forbidden"), "the first trainer owns it"
        for verb, body in (("pause", {}), ("resume", {"version": 1}), ("renew", {})):
            answer = await site.post(f"/v1/policies/default/{verb}", body)
            assert (answer.status, answer.code) == (409, "policy_conflict"), "even for an admin"
            assert "--take-over" in answer.body["remedy"]
        resumed = await site.post("/v1/policies/default/resume", {"version": 1, "take_over": True})
        assert resumed.body["state"] == "running", "naming a version must always be possible"
        answer = await site.post("/v1/policies/default/renew", {}, token=TRAINER)
        assert (answer.status, answer.code) == (409, "policy_conflict")


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("resume", {}),
        ("resume", {"version": -1}),
        ("resume", {"version": "7"}),
        ("resume", {"version": 1.5}),
        ("resume", {"version": True}),
        ("resume", {"version": 2**31}),
        ("resume", {"version": 1, "engines": []}),
        ("pause", {"mode": "gently"}),
        ("pause", {"lease_s": 0}),
        ("pause", {"holder": "me/you"}),
        ("pause", {"holder": ""}),
        ("resume", {"version": 1, "holder": "x" * 129}),
        ("renew", {"holder": "a b"}),
        ("pause", {"after": -1}),
        ("renew", {"lease_s": -1}),
    ],
)
async def test_invalid_weight_updates_are_refused(tmp_path: Path, verb: str, body: dict[str, Any]) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        answer = await site.post(f"/v1/policies/default/{verb}", body)
        assert (answer.status, answer.code) == (422, "invalid_request")


async def test_a_pause_returns_after_its_wait(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), stall_after=9)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.submit("r1")
        await engine.busy()
        pausing = await site.post("/v1/policies/default/pause", {"mode": "drain", "wait_s": 0})
        assert pausing.body["state"] == "pausing"
        paused = await site.post("/v1/policies/default/pause", {"mode": "abort"})
        assert paused.body["state"] == "paused"


async def test_a_restarted_service_is_still_paused_and_keeps_the_version(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            await site.post("/v1/policies/default/resume", {"version": 5})
            await site.post("/v1/policies/default/pause", {"mode": "keep", "lease_s": 60}, token=TRAINER)
        assert engine.control.is_paused
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            policy_status = await until(site, lambda policy: bool(policy["engines"]))
            assert (policy_status["state"], policy_status["version"], policy_status["mode"]) == ("abandoned", 5, "keep")
            assert [(e["id"], e["state"], e["version"], e["paused"]) for e in policy_status["engines"]] == [
                ("e1", "quarantined", 5, True)
            ]
            await site.submit("r1")
            renewed = await site.post("/v1/policies/default/renew", {"lease_s": 60}, token=TRAINER)
            assert renewed.body["state"] == "paused"
            resumed = await site.post("/v1/policies/default/resume", {"version": 6}, token=TRAINER)
            assert resumed.body["engines"][0] | {"error": None} == {
                "id": "e1",
                "version": 6,
                "state": "up",
                "paused": False,
                "error": None,
            }
            assert (await site.ended("r1"))["outcome"] == "completed"
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            policy_status = await until(site, lambda policy: bool(policy["engines"]))
            assert (policy_status["state"], policy_status["version"], policy_status["engines"][0]["version"]) == (
                "running",
                6,
                6,
            )


async def test_all_engines_failing_is_an_error_and_the_policy_stays_paused(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.post("/v1/policies/default/pause", {})
        engine.control.fail("version", 1, 500)
        answer = await site.post("/v1/policies/default/resume", {"version": 1})
        assert (answer.status, answer.code) == (502, "policy_stuck") and "e1" in answer.body["engines"]
        policy_status = (await site.get("/v1/policies/default")).body
        assert (
            policy_status["state"] == "paused" and "it did not take its version" in policy_status["engines"][0]["error"]
        )


# --- the client


async def test_the_client_pauses_around_a_block_and_renews_its_lease(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
        AsyncClient(site.url, site.token) as client,
    ):
        policy = client.policy("default")
        async with policy.update(version=1, lease_s=2.0) as paused:
            assert paused["state"] == "paused" and engine.control.is_paused
            await asyncio.sleep(2.5)  # longer than a lease
            assert (await policy.status())["state"] == "paused"
        status = await policy.status()
        assert (status["state"], status["version"]) == ("running", 1) and not engine.control.is_paused
        assert [policy_status["name"] for policy_status in await client.policies()] == ["default"]


async def test_a_block_that_raises_does_not_resume_and_explains_how_to_continue(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
        AsyncClient(site.url, site.token) as client,
    ):
        policy = client.policy("default")
        with pytest.raises(ValueError, match="no weights today") as raised:
            async with policy.update(version=1):
                raise ValueError("no weights today")
        assert "rollyard policies resume default VERSION" in raised.value.__notes__[0]
        assert (await policy.status())["state"] == "paused" and engine.control.is_paused
        second = (await site.post("/v1/tokens", {"access": "admin"})).body["token"]
        async with AsyncClient(site.url, second) as other:
            with pytest.raises(PolicyConflict):
                async with other.policy("default").update(version=2, outlast_s=0):
                    raise AssertionError("it is held by another")
        engine.control.fail("resume", 1, 500)
        with pytest.raises(PolicyStuck):
            await policy.resume(1)
        assert (await policy.resume(1))["state"] == "running"


async def test_two_trainers_with_one_token_do_not_mix_their_weights(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
        AsyncClient(site.url, TRAINER) as one,
        AsyncClient(site.url, TRAINER) as two,
    ):
        mine, yours = one.policy("default"), two.policy("default")
        async with mine.update(version=1) as paused:
            assert paused["holder"] == f"{paused['owner']}/{one._holder.id}"
            with pytest.raises(PolicyConflict, match=f"held by .*{one._holder.id} for another"):
                await yours.pause()
            with pytest.raises(PolicyConflict, match="held by"):
                await yours.resume(1)
            with pytest.raises(PolicyConflict, match="held by"):
                await yours.renew()
            assert (await yours.status())["state"] == "paused"
        async with yours.update(version=2):
            pass
        with pytest.raises(PolicyConflict, match=r"at version 2, not at 1: another"):
            async with mine.update(version=2):
                raise AssertionError("another client's weights are loaded")
        assert (await mine.status())["state"] == "running", "a refused pause has no effect"


async def test_a_pause_taken_over_by_another_is_not_resumed_by_the_first(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
        AsyncClient(site.url, TRAINER) as one,
        AsyncClient(site.url, TRAINER) as two,
    ):
        mine, yours = one.policy("default"), two.policy("default")
        with pytest.raises(PolicyConflict, match="at version 7, not at 0"):
            async with mine.update(version=1):
                await yours.resume(7, take_over=True)
        await mine.pause(lease_s=0.2)
        await until(site, lambda policy: policy["state"] == "abandoned")
        await yours.pause()
        with pytest.raises(PolicyConflict, match="held by"):
            await mine.resume(2)
        assert (await yours.resume(8))["version"] == 8


async def test_a_trainer_waits_for_the_lease_of_a_dead_trainer_only(tmp_path: Path) -> None:
    async with (
        scripted() as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
        AsyncClient(site.url, TRAINER) as dead,
        AsyncClient(site.url, TRAINER) as alive,
        AsyncClient(site.url, TRAINER) as next_one,
    ):
        await dead.policy("default").pause(lease_s=1.0)
        async with next_one.policy("default").update(version=1):
            pass
        async with alive.policy("default").update(version=2):
            waiting = asyncio.create_task(next_one.policy("default").pause(outlast_s=60))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 1.5)
        with pytest.raises(PolicyConflict, match="held by"):
            await waiting


async def test_the_sync_client_updates_weights_too(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:

        def train() -> tuple[str, bool, int]:
            with Client(site.url, site.token) as client:
                policy = client.policy()
                with policy.update(version=2, mode="drain", engines=["e1"]) as paused:
                    is_paused = engine.control.is_paused
                policy.pause(timeout_s=10)
                policy.renew(60)
                policy.resume(3)
                return str(paused["state"]), is_paused, int(policy.status()["version"])

        assert await asyncio.to_thread(train) == ("paused", True, 3)


TRAIN = """
import sys, time
from rollyard.client import Client
with Client(sys.argv[1], sys.argv[2]) as client, client.policy("default").update(version=1, lease_s=0.5):
    print("writing", flush=True)
    time.sleep(600)
"""


async def test_a_killed_trainer_leaves_engines_quarantined_and_deadlines_stopped(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), stall_after=9)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.submit("r1")
        await engine.busy()
        trainer = subprocess.Popen([sys.executable, "-c", TRAIN, site.url, TRAINER], stdout=subprocess.PIPE)
        try:
            assert trainer.stdout is not None
            assert (await asyncio.to_thread(trainer.stdout.readline)).strip() == b"writing"
            engine.script = scripted().script
            os.kill(trainer.pid, signal.SIGKILL)
        finally:
            trainer.kill()
            trainer.wait()
            trainer.stdout.close()  # type: ignore[union-attr]
        policy_status = await until(site, lambda policy: policy["state"] == "abandoned")
        assert (
            policy_status["engines"][0]["state"] == "quarantined"
            and "abandoned" in policy_status["engines"][0]["error"]
        )
        clock = site.served.app_state.pipeline.live["r1"].clock
        used_s = clock.used_s
        await asyncio.sleep(0.3)
        assert not clock.is_running and clock.used_s == used_s, "its deadline does not run"
        assert (await site.get("/v1/rollouts/r1")).body["state"] == "run" and engine.control.is_paused
        resumed = await site.post("/v1/policies/default/resume", {"version": 1})
        assert resumed.body["state"] == "running"
        assert (await site.ended("r1"))["outcome"] == "completed"


async def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "update-weights.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "update-weights.md", "exec"), names)
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        written: list[tuple[str, bool]] = []

        async def write(engine_id: str) -> None:
            written.append((engine_id, engine.control.is_paused))

        status = await names["update"](site.url, site.token, 9, write)
        assert (status["state"], status["version"], written) == ("running", 9, [("e1", True)])
