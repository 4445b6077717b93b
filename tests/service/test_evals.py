"""/v1/evals with the real pipeline and a policy of known skill."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import GroupState
from rollyard.sampling import eval_runner, eval_tasks
from rollyard.store.base import Decision
from rollyard.testing.script import Reply, Turn
from tests.service.site import OTHER, TRAINER, Site, engine_table, finish, open_site, scripted, task
from tests.service.skill import CHECK, member_of, skilled

pytestmark = pytest.mark.slow

SKILL = (2, 4, 0)  # correct samples of each task, of four: the first ones


def graded(name: str = "do it", **data: Any) -> dict[str, Any]:
    body = task(name)
    body["data"] |= {"checks": CHECK, **data}
    return body


def tasks(count: int) -> dict[str, Any]:
    return {"tasks": [graded(f"task {number}") for number in range(count)]}


def solves(rollout: str) -> bool:
    group, index = member_of(rollout)
    return index < SKILL[int(group.rpartition(".")[2])]


def by_hand(n: int, skills: tuple[int, ...], k: int) -> float:
    return sum(1 - comb(n - c, k) / comb(n, k) for c in skills) / len(skills)


async def over(site: Site, eval_id: str = "e") -> dict[str, Any]:
    async with asyncio.timeout(90):
        while True:
            answer = await site.get(f"/v1/evals/{eval_id}?wait_s=20")
            assert answer.status == 200, answer.body
            if answer.body["state"] != "running":
                return answer.body


async def begin(site: Site, source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = await site.post("/v1/evals", {"id": "e", "source": source, **fields})
    assert answer.status == 201, answer.body
    return answer.body


async def test_pass_at_k_agrees_with_the_policys_skill(tmp_path: Path) -> None:
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        body = {"id": "e", "source": tasks(3), "k": 4, "seed": 3}
        first = await site.post("/v1/evals", body)
        assert first.status == 201 and (first.body["total"], first.body["state"]) == (12, "running")
        ended = await over(site)
        assert (ended["state"], ended["reason"], ended["version"], ended["done"]) == ("done", None, 0, 12)
        result = ended["result"]["all"]
        assert {k: it["mean"] for k, it in result["pass_at"].items()} == pytest.approx(
            {str(k): by_hand(4, SKILL, k) for k in (1, 2, 3, 4)}, abs=1e-12
        )
        assert all(it["low"] <= it["mean"] <= it["high"] for it in result["pass_at"].values())
        assert (result["tasks"], result["samples"], result["missing"], ended["result"]["missing"]) == (3, 12, 0, {})
        assert ended["result"]["environments"] == {"shell": result}

        run = (await site.get("/v1/runs/e")).body
        assert (run["mode"], run["policy"], run["seed"], run["priority"]) == ("eval", "default", 3, 10)
        record = (await site.get("/v1/rollouts/e.1-0")).body
        assert record["reward"] == 1 and record["trainable"] is False

        again = await site.post("/v1/evals", body)
        assert again.status == 201 and again.body == ended
        other = await site.post("/v1/evals", {**body, "k": 3})
        assert (other.status, other.code) == (409, "id_conflict")
        assert (await site.delete("/v1/evals/e")).body == ended
        assert (await site.get("/v1/evals")).body["evals"] == [ended]


def is_second(groups: Any, submissions: Any) -> bool:
    return groups[0][0].id.endswith(".1")


def is_end(decision: Decision) -> bool:
    return any(group.state is not GroupState.OPEN for group in decision.groups)


@pytest.mark.parametrize(("write", "is_held"), [("put_groups", is_second), ("step", is_end)])
async def test_the_number_of_ended_samples_does_not_fall_while_groups_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, is_held: Callable[..., bool]
) -> None:
    """One group at a time: while the next one is stored, and while the end of the first is."""
    writing, may_write = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(eval_runner, "AHEAD", 4)
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)], run_slots=2) as site:
        store = site.served.app_state.store
        real = getattr(store, write)

        async def held(*arguments: Any) -> Any:
            if is_held(*arguments):
                writing.set()
                await may_write.wait()
            return await real(*arguments)

        monkeypatch.setattr(store, write, held)
        await begin(site, tasks(2), k=4)
        async with asyncio.timeout(90):
            await writing.wait()
        assert (await site.get("/v1/evals/e")).body["done"] == 4
        may_write.set()
        assert (await over(site))["done"] == 8


async def test_more_samples_than_k_and_a_policy_by_name(tmp_path: Path) -> None:
    async with (
        skilled(solves) as engine,
        open_site(tmp_path, engines=[engine_table(engine, policy="actor")]) as site,
    ):
        await begin(site, tasks(2), k=2, samples=4, policy="actor", run="mine")
        ended = await over(site)
        assert ended["run"] == "mine" and ended["policy"] == "actor"
        assert ended["result"]["all"]["pass_at"].keys() == {"1", "2"}
        assert ended["result"]["all"]["pass_at"]["2"]["mean"] == pytest.approx(by_hand(4, SKILL[:2], 2))


async def test_results_by_key_with_a_file_as_source(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [json.dumps(graded(f"task {n}")) for n in range(3)]
    (folder / "t.jsonl").write_text("\n".join(lines))
    async with (
        skilled(solves) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], task_folders=[str(folder)]) as site,
    ):
        source = {"file": str(folder / "t.jsonl")}
        answer = await site.post("/v1/evals", {"id": "e", "source": source, "k": 1, "samples": 4, "by": "instruction"})
        assert answer.status == 201, answer.body
        (folder / "t.jsonl").write_text("")  # it was copied
        by = (await over(site))["result"]["by"]
        assert {name: it["pass_at"]["1"]["mean"] for name, it in by.items()} == {
            "task 0": 0.5,
            "task 1": 1.0,
            "task 2": 0.0,
        }
        outside = await site.post("/v1/evals", {"source": {"file": str(tmp_path / "x.jsonl")}})
        assert outside.code == "forbidden"


async def test_missing_samples_are_not_counted_and_fail_the_evaluation_above_the_threshold(tmp_path: Path) -> None:
    """All samples of task 1 are lost to the engine; task 2 cannot be set up."""

    def scripted_turn(turn: Turn) -> Reply:
        if "<|im_start|>" in turn.text and member_of(turn.session_id)[0].endswith(".1"):
            return Reply(fault=500)
        return Reply(finish())

    source = {"tasks": [task("a"), task("b"), task("c")]}
    source["tasks"][2]["data"]["setup"] = ["exit 3"]
    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            await begin(site, source, k=2)
            failed = await over(site)
            assert (failed["state"], failed["reason"]) == ("failed", "too_many_missing")
            assert "66.7% of the samples have no score" in failed["detail"] and failed["done"] == 6
            result = failed["result"]
            assert result["missing"]["setup_failed"] == 2 and sum(result["missing"].values()) == 4
            assert result["all"]["pass_at"]["2"] == {
                **result["all"]["pass_at"]["2"],
                "mean": 1.0,
                "tasks": 1,
                "missing": 2,
            }
            assert (
                await site.post("/v1/evals", {"id": "f", "source": source, "k": 2, "max_missing": 0.7})
            ).status == 201
            assert (await over(site, "f"))["state"] == "done"


async def test_a_sample_lost_to_infrastructure_is_taken_again(tmp_path: Path) -> None:
    def scripted_turn(turn: Turn) -> Reply:
        if "<|im_start|>" in turn.text and turn.session_id == "e~e.0-1":
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            await begin(site, {"tasks": [task()]}, k=3, max_missing=0)
            ended = await over(site)
            assert ended["state"] == "done" and ended["result"]["all"]["samples"] == 3
            assert (await site.get("/v1/rollouts/e.0-3")).body["reward"] == 1


async def test_an_evaluation_uses_its_share_of_slots_and_leaves_the_rest_to_training(tmp_path: Path) -> None:
    async with (
        skilled(lambda _: True, lambda _: 0.05) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], run_slots=4) as site,
    ):
        pipeline = site.served.app_state.pipeline
        live_counts: list[tuple[int, int]] = []
        script = engine.script

        def watched(turn: Turn) -> Any:
            mine = sum(rollout.startswith("e~e.") for rollout in pipeline.live)
            live_counts.append((mine, len(pipeline.live) - mine))
            return script(turn)

        engine.script = watched
        await site.submit(*(f"t-{number}" for number in range(16)))
        await begin(site, tasks(8), k=2, pool_share=0.5)
        await over(site)
        assert max(mine for mine, _ in live_counts) == 2
        assert all(others for mine, others in live_counts[:16] if mine)
        ended = [one["id"] for one in (await site.get("/v1/rollouts?state=ended&limit=100")).body["rollouts"]]
        mine = [one for one in ended if one.startswith("e.")]
        assert len(mine) == 16 and ended.index(mine[-1]) > 16  # training continued beside it
        assert (await site.call("PATCH", "/v1/pools", json={"run": 8})).status == 200
        await site.post("/v1/evals", {"id": "w", "source": tasks(1), "pool_share": 0.01})
        await over(site, "w")
        run = pipeline.run_of("w")
        assert run is not None and run.max_live == 1


async def test_the_share_of_an_evaluation_follows_the_pool_size(tmp_path: Path) -> None:
    async with (
        skilled(lambda _: True) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], run_slots=4) as site,
    ):
        await site.hold()
        await begin(site, tasks(3), pool_share=0.5)
        run = site.served.app_state.pipeline.run_of("e")
        assert run is not None and run.max_live == 2
        await site.call("PATCH", "/v1/pools", json={"run": 12, "init": 1})
        await over(site)
        run = site.served.app_state.pipeline.run_of("e")
        assert run is not None and run.max_live == 6


@pytest.mark.parametrize(("ahead", "max_queued"), [(6, 1000), (1024, 4)])
async def test_many_tasks_are_started_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, max_queued: int
) -> None:
    """Forty-two rollouts, of which six may be in flight; or the queue has room for four."""
    monkeypatch.setattr(eval_runner, "AHEAD", ahead)
    monkeypatch.setattr(eval_runner, "FULL_S", 0.05)
    async with (
        skilled(lambda rollout: rollout.endswith("-0")) as engine,
        open_site(tmp_path, engines=[engine_table(engine)], max_queued=max_queued, run_slots=2) as site,
    ):
        most = 0
        script = engine.script

        def watched(turn: Turn) -> Any:
            nonlocal most
            groups = site.served.app_state.sampler.groups
            most = max(most, sum(groups.opened(f"e.{number}") is not None for number in range(21)))
            return script(turn)

        engine.script = watched
        await begin(site, tasks(21), k=2, pool_share=1)
        ended = await over(site)
        assert ended["state"] == "done" and ended["result"]["all"]["samples"] == 42
        assert ended["result"]["all"]["pass_at"]["1"]["mean"] == 0.5
        assert most <= (3 if ahead == 6 else 21)
        too_many = await site.post("/v1/evals", {"source": tasks(1), "k": max_queued + 1})
        assert too_many.status == 422 and "samples: the queue holds" in too_many.body["detail"]


async def test_a_change_of_weights_waits_for_an_evaluation(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await begin(site, tasks(1))
        await engine.busy()
        refused = await site.post("/v1/policies/default/pause", {"wait_s": 0.05})
        assert (refused.status, refused.code) == (409, "policy_pinned")
        assert "until e~e has ended" in refused.body["detail"] and "DELETE /v1/evals" in refused.body["remedy"]
        waiting = asyncio.create_task(site.post("/v1/policies/default/pause", {"wait_s": 30}))
        assert (await site.get("/v1/policies/default")).body["state"] == "running"
        await site.delete("/v1/evals/e")
        async with asyncio.timeout(90):
            assert (await waiting).body["state"] == "paused"


async def test_an_evaluation_starts_with_the_weights_of_an_update_in_progress(tmp_path: Path) -> None:
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/policies/default/pause", {})).body["state"] == "paused"
        assert (await begin(site, tasks(2), k=4))["version"] is None
        assert (await site.post("/v1/policies/default/resume", {"version": 3})).status == 200
        ended = await over(site)
        assert (ended["state"], ended["version"]) == ("done", 3)
        assert (await site.get("/v1/rollouts/e.0-0")).body["summary"]["oldest_version"] == 3


@pytest.mark.parametrize("on_update", ["fail", "hold"])
async def test_an_evaluation_fails_if_its_weights_change(tmp_path: Path, on_update: str) -> None:
    """With hold, only a resume without a pause can do that: then the weights have already changed."""

    def scripted_turn(turn: Turn) -> Reply:
        return Reply(finish(), latency_s=60 if turn.session_id.startswith("e~e.1") else 0)

    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        engine.script = scripted_turn
        await begin(site, {"tasks": [task(), task()]}, k=2, on_update=on_update)
        await engine.busy()
        for index in range(2):
            await site.ended(f"e.0-{index}")
        if on_update == "fail":
            assert (await site.post("/v1/policies/default/pause", {})).status == 200
        assert (await site.post("/v1/policies/default/resume", {"version": 1})).status == 200
        failed = await over(site)
        assert (failed["state"], failed["reason"], failed["version"]) == ("failed", "version_changed", 0)
        assert (failed["done"], failed["total"]) == (2, 4)  # cancelled samples do not count as done
        result = failed["result"]
        assert result["missing"] == {"version_changed": 2} and result["all"]["pass_at"]["2"]["tasks"] == 1
        assert (await site.ended("e.1-0"))["outcome"] == "cancelled"


async def test_a_cancelled_evaluation_ends_with_all_its_rollouts(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.post("/v1/evals", {"id": "e", "source": tasks(2), "k": 2}, token=TRAINER)
        await engine.busy()
        assert (await site.delete("/v1/evals/e", token=OTHER)).code == "not_found"
        assert (await site.delete("/v1/evals/e", token=TRAINER)).body["state"] == "cancelled"
        for number in range(4):
            assert (await site.ended(f"e.{number // 2}-{number % 2}"))["outcome"] == "cancelled"
        ended = await over(site)
        assert (ended["state"], ended["result"]) == ("cancelled", None)


@pytest.mark.parametrize("was_written", [True, False])
async def test_an_evaluation_continues_after_a_restart(tmp_path: Path, was_written: bool) -> None:
    """Also if the service was killed between storing groups and recording that it did."""
    async with skilled(solves, lambda rollout: 0.0 if rollout.startswith("e.0") else 60.0) as engine:
        table = engine_table(engine)
        async with open_site(tmp_path, engines=[table], drain_s=0.1) as site:
            await begin(site, tasks(3), k=4)
            await engine.busy()
            for index in range(4):
                await site.ended(f"e.0-{index}")
            async with asyncio.timeout(90):  # its groups are started before that is recorded
                while (done := (await site.get("/v1/evals/e")).body["done"]) < 4:
                    await asyncio.sleep(0.02)
            assert done < 12
            if not was_written:
                store = site.served.app_state.store
                record = await store.get_eval("e~e")
                await store.put_eval(replace(record, data={**record.data, "begun": 0}))
        async with skilled(solves) as quick:
            table = engine_table(quick)
            async with open_site(tmp_path, engines=[table]) as site:
                ended = await over(site)
                assert ended["state"] == "done" and ended["version"] == 0
                assert ended["result"]["all"]["pass_at"]["2"]["mean"] == pytest.approx(by_hand(4, SKILL, 2))
                assert (await site.get("/v1/rollouts/e.0-0")).body["attempt"] == 1
                assert len((await site.get("/v1/rollouts?run=e&limit=100")).body["rollouts"]) == 12
        async with open_site(tmp_path) as site:
            assert (await site.get("/v1/evals/e")).body == ended


async def test_samples_that_never_ran_need_no_memory(tmp_path: Path) -> None:
    """Of an evaluation that was stored when their number was not limited: it ended the service at every start."""
    async with scripted(Reply(finish(), latency_s=60)) as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)], drain_s=0.1) as site:
            await begin(site, tasks(1))
            await engine.busy()
            store = site.served.app_state.store
            record = await store.get_eval("e~e")
            await store.put_eval(replace(record, tasks=1000, samples=4096, data={**record.data, "begun": 1}))
        tracemalloc.start()
        try:
            async with scripted() as quick, open_site(tmp_path, engines=[engine_table(quick)]) as site:
                ended = await over(site)  # its other tasks are not in the store
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (ended["state"], ended["reason"]) == ("failed", "not_found")
    assert sum(ended["result"]["missing"].values()) == ended["total"] - 1 == 4_095_999
    assert peak_bytes < 200_000_000  # 100 bytes for each sample would be more


async def test_an_evaluation_pins_its_weights_again_after_a_restart(tmp_path: Path) -> None:
    async with scripted(Reply(finish(), latency_s=60)) as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)], drain_s=0.1) as site:
            await begin(site, tasks(1))
            await engine.busy()
        async with open_site(tmp_path, engines=[engine_table(engine)], drain_s=0.1) as site:
            assert (await site.post("/v1/policies/default/pause", {"wait_s": 0})).code == "policy_pinned"


async def test_deleting_the_run_of_an_evaluation_deletes_it(tmp_path: Path) -> None:
    async with (
        scripted(Reply(finish(), latency_s=60)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await begin(site, tasks(2), k=2)
        await engine.busy()
        await site.delete_run("e")
        assert (await site.get("/v1/evals/e")).code == "not_found"
        assert (await site.get("/v1/groups/e.0")).code == "not_found"
        assert (await site.post("/v1/policies/default/pause", {})).status == 200


async def test_a_page_of_tasks_reads_a_bounded_number_of_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_tasks, "MOST_ROLLOUTS", 10)  # two tasks with four samples and a spare each
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await begin(site, tasks(3), k=4)
        await over(site)
        first = (await site.get("/v1/evals/e/tasks")).body
        assert [task["passes"] for task in first["tasks"]] == [2, 4] and first["next"] == "t:2"
        second = (await site.get("/v1/evals/e/tasks?after=t:2")).body
        assert [task["index"] for task in second["tasks"]] == [2] and second["next"] is None


async def test_rollouts_that_only_name_a_group_of_an_evaluation_are_not_in_its_tasks(tmp_path: Path) -> None:
    """Their groups are none of it, or their indices are beyond those of its samples."""
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await begin(site, tasks(2), k=4)
        await over(site)
        body = (await site.get("/v1/evals/e/tasks")).body
        assert [task["index"] for task in body["tasks"]] == [0, 1]
        await site.hold()
        for group, index in (("e.999999999999", 0), ("e.01", 0), ("e.2", 3), ("e.1", 7)):
            one = {"id": f"{group}-{index}", "group": group, "index": index, "task": task()}
            answer = await site.post("/v1/rollouts", {"run": "e", "rollouts": [one]})
            assert answer.status == 202, answer.body
        assert (await site.get("/v1/evals/e/tasks")).body == body


async def test_an_evaluation_whose_rollouts_id_is_taken_fails(tmp_path: Path) -> None:
    """It never ended, because the other rollout is not its sample."""
    async with skilled(solves) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.post("/v1/policies/default/pause", {})).body["state"] == "paused"  # it does not start yet
        await begin(site, tasks(2), k=4)
        stranger = {"run": "e", "id": "e.1-2", "task": task()}
        assert (await site.post("/v1/rollouts", stranger)).status == 202
        assert (await site.post("/v1/policies/default/resume", {"version": 3})).status == 200
        ended = await over(site)
        assert (ended["state"], ended["reason"]) == ("failed", "id_conflict") and "e.1-2" in ended["detail"]


async def test_a_clients_rollout_with_the_id_of_a_spare_is_not_a_sample(tmp_path: Path) -> None:
    """The only sample is lost, and the spare for it cannot be started."""

    def scripted_turn(turn: Turn) -> Reply:
        if "<|im_start|>" in turn.text and turn.session_id == "e~e.0-0":
            return Reply(fault=500)
        return Reply(finish())

    async with scripted() as engine:
        engine.script = scripted_turn
        async with open_site(tmp_path, engines=[engine_table(engine)], max_attempts=1, engine_wait_s=60) as site:
            assert (await site.post("/v1/policies/default/pause", {})).body["state"] == "paused"
            await begin(site, {"tasks": [task()]}, k=1)
            stranger = {"id": "e.0-1", "group": "e.0", "index": 1, "task": task("of the client")}
            assert (await site.post("/v1/rollouts", {"run": "e", "rollouts": [stranger]})).status == 202
            assert (await site.post("/v1/policies/default/resume", {"version": 3})).status == 200
            ended = await over(site)
            result = ended["result"]["all"]
            assert (result["samples"], result["missing"], result["reward"]) == (0, 1, None), ended
            assert (await site.ended("e.0-1"))["reward"] == 1
            (found,) = (await site.get("/v1/evals/e/tasks")).body["tasks"]
            assert (found["samples"], found["missing"]) == (0, 1)


async def test_an_invalid_evaluation_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for body, detail in (
            ({"source": tasks(1), "k": 4, "samples": 2}, "pass@4 cannot be computed from 2 samples"),
            ({"source": {"push": True}}, "cannot be pushed"),
            ({"source": {"tasks": []}}, "it has no tasks"),
            ({"source": {"tasks": [task(), {"environment": "shell"}]}}, "source, task 1: "),
            ({"source": tasks(1), "pool_share": 0}, "pool_share"),
            ({"source": tasks(1), "on_update": "wait"}, "on_update"),
            ({"source": tasks(1), "defaults": {"limits": {"max_turns": "x"}}}, "defaults"),
            ({"source": tasks(300), "by": "instruction"}, "more than 256 values"),
            ({"source": tasks(100), "by": "instruction", "k": 512}, "at most 32 values of 'instruction'"),
            ({"source": tasks(245), "samples": 4096}, "with 4,096 of each task, that is 244 tasks"),
        ):
            answer = await site.post("/v1/evals", body)
            assert answer.status == 422 and detail in answer.body["detail"], answer.body
        assert (await site.get("/v1/evals")).body["evals"] == []
        assert (await site.get("/v1/evals/none")).code == "not_found"
        await site.post("/v1/runs", {"id": "taken"})
        assert (await site.post("/v1/evals", {"run": "taken", "source": tasks(1)})).code == "id_conflict"
