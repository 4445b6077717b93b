"""/v1/groups with the real pipeline."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rollyard.store import SqliteStore
from rollyard.testing.script import Reply
from tests.service.site import OTHER, Site, engine_table, finish, open_site, scripted, task
from tests.service.skill import CHECK, member_of, skilled

pytestmark = pytest.mark.slow


def graded(**fields: Any) -> dict[str, Any]:
    body = task(**fields)
    body["data"]["checks"] = CHECK
    return body


async def over(site: Site, group_id: str) -> dict[str, Any]:
    async with asyncio.timeout(90):
        while True:
            answer = await site.get(f"/v1/groups/{group_id}?wait_s=20")
            assert answer.status == 200, answer.body
            if answer.body["state"] != "open":
                return answer.body


async def test_a_group_ends_with_its_members_and_their_statistics(tmp_path: Path) -> None:
    async with (
        skilled(lambda rollout: member_of(rollout)[1] < 2) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        answer = await site.post("/v1/groups", {"id": "g", "task": graded(), "size": 4})
        assert answer.status == 202, answer.body
        assert answer.body["groups"][0]["state"] == "open"
        group = await over(site, "g")
        assert group["state"] == "complete"
        assert [one["reward"] for one in group["members"]] == [1, 1, 0, 0]
        assert group["stats"]["mean"] == 0.5 and group["stats"]["spread"] == 0.5 and group["stats"]["pass_rate"] == 0.5
        assert (group["stats"]["members"], group["stats"]["trainable"], group["stats"]["infra_failures"]) == (4, 4, 0)
        assert [one["is_member"] for one in group["members"]] == [True] * 4
        assert group["oldest_version"] == group["newest_version"] == 0


async def test_a_group_sent_twice_is_one_and_another_body_is_refused(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        body = {"id": "g", "task": task(), "size": 2}
        await site.post("/v1/groups", body)
        await over(site, "g")
        again = await site.post("/v1/groups", body)
        assert again.status == 202 and again.body["groups"][0]["state"] == "complete"
        other = await site.post("/v1/groups", {**body, "size": 3})
        assert (other.status, other.code) == (409, "id_conflict")
        assert len((await site.get("/v1/rollouts?group=g")).body["rollouts"]) == 2


async def test_a_spare_replaces_a_member_lost_to_infrastructure(tmp_path: Path) -> None:
    def script_fails(rollout: str) -> bool:
        return member_of(rollout)[1] == 1

    def scripted_turn(turn: Any) -> Reply:
        if "<|im_start|>" in turn.text and script_fails(turn.session_id):
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            await site.post("/v1/groups", {"id": "g", "task": task(), "size": 3, "spares": 2})
            group = await over(site, "g")
            assert group["state"] == "complete", group
            members = [one["index"] for one in group["members"] if one["is_member"]]
            assert members == [0, 2, 3]
            lost = group["members"][1]
            assert lost["reward"] is None and lost["blame"] == "infra" and not lost["is_member"]
            assert group["stats"]["infra_failures"] == 1 and group["stats"]["members"] == 3


async def test_a_group_short_of_members_fails_or_is_delivered_at_its_actual_size(tmp_path: Path) -> None:
    def scripted_turn(turn: Any) -> Reply:
        if "<|im_start|>" in turn.text and member_of(turn.session_id)[1] >= 2:
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            await site.post("/v1/groups", {"id": "whole", "task": task(), "size": 3, "spares": 0})
            await site.post("/v1/groups", {"id": "part", "task": task(), "size": 3, "spares": 0, "min_members": 2})
            failed, short = await over(site, "whole"), await over(site, "part")
            assert (failed["state"], failed["reason"]) == ("failed", "short_of_members")
            assert short["state"] == "complete" and short["stats"]["members"] == 2
            assert all(one["reward"] is None for one in short["members"] if not one["is_member"])


async def test_a_cancelled_group_ends_with_all_its_rollouts(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.post("/v1/groups", {"id": "g", "task": task(), "size": 3})
        await engine.busy()
        assert (await site.delete("/v1/groups/g")).body["state"] == "cancelled"
        for index in range(3):
            assert (await site.ended(f"g-{index}"))["outcome"] == "cancelled"
        assert (await over(site, "g"))["state"] == "cancelled"


async def test_a_group_survives_a_restart(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=60)) as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            await site.post("/v1/groups", {"id": "g", "task": task(), "size": 3})
            await engine.busy()
        engine.script = lambda _: Reply(finish())
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            group = await over(site, "g")
            assert group["state"] == "complete" and group["stats"]["members"] == 3


async def test_an_invalid_group_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.get("/v1/groups/none")).code == "not_found"
        bad = await site.post("/v1/groups", {"groups": [{"task": task(), "size": 2}, {"task": {}, "size": 2}]})
        assert bad.status == 422 and "groups[1].task" in bad.body["detail"]
        assert (await site.post("/v1/groups", {"task": task(), "size": 2, "min_members": 3})).status == 422
        assert (await site.post("/v1/groups", {"task": task(), "size": 0})).status == 422
        await site.post("/v1/runs", {"id": "mine"})
        refused = await site.post("/v1/groups", {"run": "mine", "task": task(), "size": 1}, token=OTHER)
        assert refused.code == "not_found"


async def test_a_spare_whose_id_is_taken_fails_only_its_group(tmp_path: Path) -> None:
    def scripted_turn(turn: Any) -> Reply:
        if "<|im_start|>" in turn.text and turn.session_id == "g-0":
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            await site.submit("g-2")
            await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2, "spares": 1})
            failed = await over(site, "g")
            assert (failed["state"], failed["reason"]) == ("failed", "id_conflict")
            await site.post("/v1/groups", {"id": "h", "task": task(), "size": 2})
            assert (await over(site, "h"))["state"] == "complete"


async def test_a_group_id_used_twice_in_one_call_stores_nothing(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        one = {"id": "g", "task": task(), "size": 2}
        twice = await site.post("/v1/groups", {"groups": [one, one]})
        assert twice.code == "id_conflict"
        assert site.served.app_state.sampler.groups.opened("g") is None
        await site.post("/v1/groups", {**one, "size": 3})
        group = await over(site, "g")
        assert (group["size"], group["stats"]["members"]) == (3, 3)


async def test_a_group_whose_members_id_is_taken_is_refused(tmp_path: Path) -> None:
    """It was accepted, and never ended: the rollout is not its member."""
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("g-1")
        taken = await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2})
        assert (taken.status, taken.code) == (409, "id_conflict") and "g-1" in taken.body["detail"]
        assert (await site.get("/v1/groups/g")).status == 404


async def test_a_rollout_with_the_id_of_a_spare_that_was_not_started_is_no_member(tmp_path: Path) -> None:
    """It failed the group if its own task could not be done, and was listed with the members."""
    impossible = task()
    impossible["data"]["setup"] = ["exit 3"]
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/policies/default/pause", {})).body["state"] == "paused"
        assert (await site.post("/v1/groups", {"id": "g", "task": task(), "size": 2})).status == 202
        stranger = {"id": "g-2", "group": "g", "index": 2, "task": impossible}
        assert (await site.post("/v1/rollouts", stranger)).status == 202
        assert (await site.ended("g-2"))["failure"]["code"] == "setup_failed"
        assert (await site.post("/v1/policies/default/resume", {"version": 1})).status == 200
        group = await over(site, "g")
        assert (group["state"], [one["rollout"] for one in group["members"]]) == ("complete", ["g-0", "g-1"])


async def test_rollouts_that_only_name_an_ended_group_survive_a_restart(tmp_path: Path) -> None:
    async with scripted() as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            await site.post("/v1/groups", {"id": "g", "task": task(), "size": 1})
            await over(site, "g")
            await site.hold()
            await site.submit("more", group="g", index=0)
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            assert (await site.ended("more"))["outcome"] == "completed"
            assert [one["rollout"] for one in (await site.get("/v1/groups/g")).body["members"]] == ["g-0"]


async def test_a_cancel_while_a_groups_end_is_written_does_not_end_it_twice(tmp_path: Path, monkeypatch: Any) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        store, writing, may_write = site.served.app_state.store, asyncio.Event(), asyncio.Event()
        step = store.step

        async def gated(change: Any) -> Any:
            stored = await step(change)
            writing.set()
            await may_write.wait()
            return stored

        monkeypatch.setattr(store, "step", gated)
        await site.post("/v1/groups", {"id": "g", "task": task(), "size": 1})
        async with asyncio.timeout(90):
            await writing.wait()
        cancelling = asyncio.create_task(site.served.app_state.sampler.groups.cancel("g"))
        await asyncio.sleep(0)  # it has checked whether the group is active
        may_write.set()
        assert (await cancelling).state == "complete"
        assert (await over(site, "g"))["state"] == "complete"


async def test_groups_that_do_not_fit_into_the_queue_need_no_memory(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        body = {"groups": [{"task": task(), "size": 4096}] * 200}
        tracemalloc.start()
        try:
            answer = await site.post("/v1/groups", body)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (answer.status, answer.code) == (429, "queue_full")
        assert peak_bytes < 80_000_000  # 100 bytes for each rollout would be more


async def test_a_group_ends_though_a_concurrent_call_that_also_names_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, states = SqliteStore.put_groups, list[str]()
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        group, taken = {"id": "g", "task": task(), "size": 2}, {"id": "taken", "task": task(), "size": 1}
        assert (await site.post("/v1/groups", taken)).status == 202

        async def after_the_other(self: SqliteStore, groups: Any, submissions: Any) -> Any:
            if len(groups) == 2:
                states.append((await site.post("/v1/groups", group)).body["groups"][0]["state"])
            return await put(self, groups, submissions)

        monkeypatch.setattr(SqliteStore, "put_groups", after_the_other)
        refused = await site.post("/v1/groups", {"groups": [group, {**taken, "size": 3}]})
        assert (refused.status, refused.code, states) == (409, "id_conflict", ["open"])
        assert (await over(site, "g"))["state"] == "complete"
