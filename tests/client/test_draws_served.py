"""Draws, groups and evaluations through the client, against the real service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollyard.client import AsyncClient, Batch, Client, DrawEnded
from rollyard.client.batching import advantages, collate
from rollyard.core.failure import IdConflict, NotFound
from tests.client.served import Proxy, RunningService, served, task

pytestmark = pytest.mark.slow

COIN = "case $(date +%N) in *[02468]) true;; *) false;; esac"
"""A check that one member of a group passes and another does not."""


def tasks(count: int, check: str = "true") -> list[dict[str, Any]]:
    return [task(f"Write done, {number}.", check) for number in range(count)]


def ids(batch: Batch) -> list[str]:
    return [group.id for group in batch.groups]


async def test_batches_of_a_draw_contain_each_group_once(client: AsyncClient):
    await client.create_run("r")
    draw = await client.draw("r", tasks(5), group_size=2, keep="all", epochs=1)
    first, second = await draw.batch(want=3, limit=2), await draw.batch(want=3)
    assert (len(first.groups), first.reason, first.is_last) == (3, None, False)
    assert (len(second.groups), second.reason, second.is_last) == (2, "exhausted", True)
    groups = [*first.groups, *second.groups]
    assert sorted(str(group.task["data"]["instruction"]) for group in groups) == [
        f"Write done, {number}." for number in range(5)
    ]
    with pytest.raises(DrawEnded) as caught:
        await draw.batch(want=3)
    assert (caught.value.reason, caught.value.figures["delivered"]) == ("exhausted", 5)
    for group in groups:
        assert [(r.id, r.index, r.record.group) for r in group.rollouts] == [
            (f"{group.id}-0", 0, group.id),
            (f"{group.id}-1", 1, group.id),
        ]
        for rollout in group.rollouts:
            (drawn,), (downloaded,) = rollout.traces, await client.traces(rollout.id)
            for name in ("token_ids", "mask", "logprobs", "versions"):
                assert np.array_equal(getattr(drawn, name), getattr(downloaded, name))
            assert (drawn.spans, drawn.sampling) == (downloaded.spans, downloaded.sampling)
            assert rollout.record.task == (await client.get(rollout.id)).task
    assert (await draw.status())["state"] == "ended"
    assert draw.id in {each["id"] for each in await client.draws()}


async def test_delivered_groups_have_different_rewards(client: AsyncClient):
    await client.create_run("r")
    draw = await client.draw("r", tasks(8, COIN), group_size=4)
    batch = await draw.batch(want=3)
    assert all(len(set(group.rewards)) == 2 for group in batch.groups)
    arrays = collate(batch.groups)
    sampled = [(r.record.summary or {})["sampled_tokens"] for group in batch.groups for r in group.rollouts]
    assert arrays["loss_mask"].sum() == sum(sampled)
    assert arrays["trace_weight"].sum() == len(sampled) == 12
    for place, group in enumerate(batch.groups):
        rows = arrays["group"] == place
        assert arrays["advantages"][rows].sum() == pytest.approx(0, abs=1e-5)
        assert arrays["rewards"][rows].tolist() == group.rewards.tolist()
        assert group.stats is not None
        assert [*advantages([group], epsilon=0).values()] == pytest.approx(
            [(reward - group.stats["mean"]) / group.stats["spread"] for reward in group.rewards]
        )
    assert (await draw.close())["reason"] == "closed"


async def test_dropped_connections_change_nothing(service: RunningService):
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token) as client:
        await client.create_run("r")
        proxy.break_all()
        proxy.cut_replies = 1
        draw = await client.draw("r", tasks(6), group_size=2, keep="all", epochs=1)
        proxy.break_all()
        proxy.cut_replies = 2
        group_ids = ids(await draw.batch(want=4, limit=2))
        async for group in draw.stream(want=2, limit=1):
            group_ids.append(group.id)
            proxy.break_all()
            proxy.cut_replies = 1
        assert len(group_ids) == len(set(group_ids)) == 6
    async with AsyncClient(service.url, service.token) as direct:
        assert len(await direct.draws()) == 1
        assert ids(await (await direct.get_draw(draw.id)).batch(number=1)) == group_ids[:4]


async def test_a_batch_survives_a_restart_of_the_service(tmp_path: Path, unused_tcp_port: int):
    async with served(tmp_path, port=unused_tcp_port) as service:
        client = await AsyncClient(service.url, service.token).__aenter__()
        await client.create_run("r")
        draw = await client.draw("r", tasks(4), group_size=2, keep="all", epochs=1)
        group_ids = [group.id async for group in draw.stream(want=1)]
        await client.resize_pools(init=0)
        waiting = asyncio.create_task(draw.batch(want=3))
        await asyncio.sleep(0)
    async with served(tmp_path, port=unused_tcp_port):
        batch = await asyncio.wait_for(waiting, 50)
        group_ids += ids(batch)
        assert len(group_ids) == len(set(group_ids)) == 4
        assert (batch.number, ids(await draw.batch(number=2))) == (2, group_ids[1:])
        await client.__aexit__(None, None, None)


async def test_a_reconnected_client_continues_after_the_acknowledged_batch(service: RunningService):
    some_tasks = tasks(6)
    async with AsyncClient(service.url, service.token) as client:
        await client.create_run("r")
        draw = await client.draw("r", some_tasks, id="mine", group_size=2, keep="all", epochs=1)
        first, second = await draw.batch(want=2), await draw.batch(want=2)
        assert await draw.ack(first) >= 0
    async with AsyncClient(service.url, service.token) as client:
        with pytest.raises(IdConflict):
            await client.draw("r", some_tasks, id="mine", group_size=3)
        draw = await client.draw("r", some_tasks, id="mine", group_size=2, keep="all", epochs=1)
        assert ids(await draw.batch(want=1)) == ids(second), "not acknowledged, so it is delivered again"
        third = await draw.batch(want=2)
        assert third.number == 3
        undone = await draw.rewind(first, version=0)
        assert (undone["batch"], undone["acked"]) == (1, 1)
        again, last = await draw.batch(want=2), await draw.batch(want=2)
        assert (again.number, last.number) == (2, 3)
        # all are complete now: the oldest are first, whichever was complete first before
        assert sorted(ids(again) + ids(last)) == sorted(ids(second) + ids(third)), "none is newer than version 0"


async def test_tasks_can_be_pushed_while_drawing(client: AsyncClient):
    await client.create_run("r")
    draw = await client.draw("r", source={"push": True}, group_size=2, keep="all")
    assert await draw.push(tasks(1), ids=["a"]) == 1
    assert await draw.push(tasks(1), ids=["a"]) == 1, "the same id is the same task"
    assert len((await draw.batch(want=1)).groups) == 1
    with pytest.raises(TimeoutError, match="batch 2"):
        await draw.batch(want=1, timeout_s=0.05)
    await draw.push(tasks(2)[1:], close=True)
    batch = await draw.batch(want=1)
    assert (batch.number, len(batch.groups)) == (2, 1)
    with pytest.raises(DrawEnded):
        await draw.batch(want=1)


async def test_a_single_group(client: AsyncClient):
    opened = await client.group(task(), id="g", size=3)
    assert (opened.id, opened.state, opened.rollouts) == ("g", "open", ())
    group = await client.get_group("g", wait_s=30)
    assert (group.state, group.is_ended, group.rewards.tolist()) == ("complete", True, [1.0] * 3)
    assert [(r.id, r.trainable, r.traces) for r in group.rollouts] == [(f"g-{k}", True, ()) for k in range(3)]
    with pytest.raises(ValueError, match="has no traces here"):
        collate([group])
    whole = await client.get_group("g", traces=True)
    assert collate([whole])["trace_weight"].tolist() == [1.0] * 3
    assert whole.rollouts[0].record.timings is not None
    with pytest.raises(NotFound):
        await client.get_group("nobody")


async def test_a_group_is_cancelled(client: AsyncClient):
    await client.group(task("NEVER"), id="slow", size=2)
    assert await client.cancel_group("slow") in ("open", "cancelled")
    assert (await client.get_group("slow", wait_s=30)).state == "cancelled"


async def test_an_evaluation_returns_its_result(client: AsyncClient):
    progress: list[int] = []
    evaluation = await client.evaluate(
        [*tasks(2, "true"), *tasks(2, "false")],
        id="ev",
        k=2,
        defaults={"limits": {"max_turns": 9}},
        on_progress=lambda each: progress.append(each.done),
    )
    assert (evaluation.id, evaluation.state, evaluation.done, evaluation.total) == ("ev", "done", 8, 8)
    assert evaluation.result is not None and "0.5" in str(evaluation.result)
    assert progress == sorted(set(progress)) and progress[-1] == 8
    assert await client.get_eval("ev") == evaluation
    with pytest.raises(TimeoutError, match="has 0 of 1"):
        await client.evaluate([task("NEVER")], id="slow", timeout_s=0.05)
    await client.cancel_eval("slow")
    assert (await client.get_eval("slow", wait_s=30)).state == "cancelled"


async def test_the_sync_client_can_draw(service: RunningService):
    def work() -> None:
        with Client(service.url, service.token) as client:
            client.create_run("r")
            draw = client.draw("r", tasks(3), group_size=2, keep="all", epochs=1)
            group_ids = ids(draw.batch(want=2)) + [group.id for group in draw.stream(want=2)]
            assert len(set(group_ids)) == 3
            assert draw.last_batch is not None and draw.last_batch.is_last
            assert draw.ack(1) >= 0
            with pytest.raises(DrawEnded):
                draw.batch(want=1)
            group = client.group(task(), size=2)
            assert client.get_group(group.id, wait_s=30, traces=True).rewards.tolist() == [1.0, 1.0]

    await asyncio.to_thread(work)
