"""A draw through the client: no group twice and no group missing, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from rollyard.client import AsyncClient, AsyncDraw, Batch, Client, DrawEnded, ServiceUnreachable, UnexpectedReply
from rollyard.client.batching import collate
from rollyard.client.groups import read_arrow_page, read_group, read_json_page
from tests.client.scripted_draws import ScriptedDraws, arrow_page, group_object, trace_row


@pytest.fixture
async def service() -> AsyncGenerator[ScriptedDraws, None]:
    async with ScriptedDraws() as running:
        yield running


@pytest.fixture
async def draw(service: ScriptedDraws) -> AsyncGenerator[AsyncDraw, None]:
    async with AsyncClient(service.url, "t") as client:
        yield await client.get_draw("d")


def ids(batch: Batch) -> list[str]:
    return [group.id for group in batch.groups]


def names(first: int, last: int) -> list[str]:
    return [f"g{place}" for place in range(first, last + 1)]


def pages(service: ScriptedDraws) -> list[str]:
    return [call for call in service.calls if "/groups" in call]


async def test_a_batch_contains_its_groups_with_numpy_columns(draw: AsyncDraw):
    batch = await draw.batch(want=3)
    assert (batch.number, batch.want, batch.version, batch.reason, batch.is_last) == (1, 3, 3, None, False)
    assert batch.figures == {"admitted": 3, "reward_before": 0.5}
    assert ids(batch) == names(1, 3)
    group = batch.groups[0]
    assert (group.staleness, group.admitted_version, group.oldest_version, group.newest_version) == (1, 2, 2, 3)
    assert (group.epoch, group.item, group.task, group.stats) == (
        0,
        1,
        {"environment": "math"},
        {"members": 2, "mean": 0.5},
    )
    assert [(r.id, r.index, r.reward, r.trainable) for r in group.rollouts] == [
        ("g1-0", 0, 1.0, True),
        ("g1-2", 2, 0.0, True),
    ], "only members, by index"
    assert group.rewards.tolist() == [1.0, 0.0]
    assert [(t.rollout_id, t.index) for r in group.rollouts for t in r.traces] == [
        ("g1-0", 0),
        ("g1-0", 1),
        ("g1-2", 0),
        ("g1-2", 1),
    ]
    trace = group.rollouts[0].traces[0]
    assert trace.mask.tolist() == [0, 1, 1] and trace.sampling.temperature == 0.7
    assert not trace.token_ids.flags.owndata and not trace.token_ids.flags.writeable
    arrays = collate(batch.groups)
    assert arrays["input_ids"].shape == (12, 3) and arrays["trace_weight"].sum() == 6


async def test_batches_follow_each_other(draw: AsyncDraw):
    assert [ids(await draw.batch(want=2)) for _ in range(3)] == [names(1, 2), names(3, 4), names(5, 6)]


async def test_pages_are_bounded(draw: AsyncDraw, service: ScriptedDraws):
    assert ids(await draw.batch(want=7, limit=3)) == names(1, 7)
    assert len(pages(service)) == 3
    assert all("limit=3" in call for call in pages(service))


async def test_an_interrupted_or_refused_call_is_repeated_from_the_same_cursor(draw: AsyncDraw, service: ScriptedDraws):
    service.cut_replies = 2
    assert ids(await draw.batch(want=4, limit=2)) == names(1, 4)
    service.refusals = 2
    second = asyncio.create_task(draw.batch(want=4, limit=2))
    await service.asked("/groups", 3)
    service.cut_replies = 1
    assert ids(await second) == names(5, 8)
    assert len(service.batches) == 2, "a batch that was opened twice is one batch"


async def test_a_batch_survives_a_restart_of_the_service(draw: AsyncDraw, service: ScriptedDraws):
    service.ready = 2
    waiting = asyncio.create_task(draw.batch(want=4))
    await service.asked("after=d:2", 1)
    await service.stop()
    await service.start()
    await service.release(2)
    batch = await asyncio.wait_for(waiting, 40)
    assert ids(batch) == names(1, 4)
    assert len([call for call in pages(service) if "after=d:0" in call]) == 1, "received groups are not read again"


async def test_a_service_that_stays_down_raises_and_nothing_is_lost(service: ScriptedDraws):
    service.ready = 2
    async with AsyncClient(service.url, "t", retry_s=0) as hasty:
        draw = await hasty.get_draw("d")
        waiting = asyncio.create_task(draw.batch(want=4))
        await service.asked("after=d:2", 1)
        await service.stop()
        with pytest.raises(ServiceUnreachable):
            await waiting
        await service.start()
        await service.release(2)
        assert ids(await draw.batch(want=4)) == names(1, 4)


async def test_a_timeout_loses_nothing(draw: AsyncDraw, service: ScriptedDraws):
    service.ready = 3
    with pytest.raises(TimeoutError, match="batch 1 of draw d has 3 of 4 groups"):
        await draw.batch(want=4, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        await draw.batch(want=4, timeout_s=0)
    await service.release(1)
    assert ids(await draw.batch(want=4)) == names(1, 4)
    assert len(service.batches) == 1
    assert len([call for call in pages(service) if "after=d:0" in call]) == 1, "received groups are not read again"
    service.ready = 100
    assert ids(await draw.batch(want=1)) == ["g5"]


async def test_a_cancelled_call_loses_nothing(draw: AsyncDraw, service: ScriptedDraws):
    service.ready = 3
    waiting = asyncio.create_task(draw.batch(want=4))
    await service.asked("after=d:3", 1)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await service.release(1)
    assert ids(await draw.batch(want=4)) == names(1, 4)


async def test_a_stream_yields_groups_as_they_become_ready(draw: AsyncDraw, service: ScriptedDraws):
    service.ready = 0
    stream = draw.stream(want=2)
    first = asyncio.ensure_future(anext(stream))  # type: ignore[arg-type]
    await service.asked("/groups", 1)
    await service.release(1)
    assert (await first).id == "g1"
    assert draw.last_batch is None
    await service.release(1)
    assert [group.id async for group in stream] == ["g2"]
    assert draw.last_batch is not None
    assert (draw.last_batch.number, draw.last_batch.groups, draw.last_batch.delivered) == (1, (), 2)


async def test_no_page_is_requested_before_the_previous_one_is_consumed(draw: AsyncDraw, service: ScriptedDraws):
    groups_read = 0
    async for _ in draw.stream(want=6, limit=2):
        groups_read += 1
        assert len(pages(service)) == (groups_read + 1) // 2
    assert groups_read == 6 and len(pages(service)) == 3


async def leave_after(draw: AsyncDraw, count: int) -> list[str]:
    group_ids: list[str] = []
    stream = draw.stream(want=5, limit=3)
    async for group in stream:
        group_ids.append(group.id)
        if len(group_ids) == count:
            break
    await stream.aclose()  # type: ignore[attr-defined]
    return group_ids


async def test_a_stream_that_was_left_continues_after_the_last_group(draw: AsyncDraw, service: ScriptedDraws):
    assert await leave_after(draw, 2) == names(1, 2)
    service.cut_replies = 1
    assert await leave_after(draw, 1) == names(3, 3)
    assert await leave_after(draw, 2) == names(4, 5), "the last group was taken: the batch is complete"
    assert await leave_after(draw, 1) == ["g6"], "this is the next batch"
    assert ids(await draw.batch(want=5)) == names(6, 10), "a batch always has all of its groups"


async def test_a_restarted_client_continues_after_the_acknowledged_batch(service: ScriptedDraws):
    service.ready = 4
    async with AsyncClient(service.url, "t") as client:
        draw = await client.get_draw("d")
        await draw.ack(await draw.batch(want=3))
        with pytest.raises(TimeoutError):
            await draw.batch(want=3, timeout_s=0)
    service.ready = 100  # the open batch is full before the client reconnects
    for _ in range(2):
        async with AsyncClient(service.url, "t") as client:
            draw = await client.draw("r", [{"environment": "math"}], id="d")
            again = await draw.batch(want=1)
            assert (again.number, ids(again)) == (2, names(4, 6)), "unchanged, whatever `want` is"
            assert ids(await draw.batch(want=2)) == names(7, 8)
    assert len(service.batches) == 3


async def test_a_batch_can_be_read_again_by_number_and_then_those_after_it(draw: AsyncDraw, service: ScriptedDraws):
    first, second, third = [await draw.batch(want=2) for _ in range(3)]
    assert ids(await draw.batch(number=1)) == ids(first), "an existing batch needs no want"
    assert ids(await draw.batch(want=2)) == ids(second)
    assert ids(await draw.batch(want=2)) == ids(third)
    assert ids(await draw.batch(want=2)) == names(7, 8)
    assert [group.id async for group in draw.stream(number=2)] == ids(second)
    assert len(service.batches) == 4


async def test_an_ended_draw_raises_the_reason_when_nothing_is_left(service: ScriptedDraws):
    service.total = 3
    async with AsyncClient(service.url, "t") as client:
        draw = await client.get_draw("d")
        assert ids(await draw.batch(want=2)) == names(1, 2)
        batch = await draw.batch(want=2)
        assert (ids(batch), batch.reason, batch.is_last) == (["g3"], "exhausted", True)
        for _ in range(2):
            with pytest.raises(DrawEnded, match="draw d has ended") as caught:
                await draw.batch(want=2)
            assert caught.value.reason == "exhausted"
            assert caught.value.figures == {"admitted": 3, "delivered": 3}
        with pytest.raises(DrawEnded):
            async for _ in draw.stream(want=2):
                raise AssertionError("nothing is left")


async def test_a_rewind_continues_with_the_batch_after_the_checkpoint(draw: AsyncDraw, service: ScriptedDraws):
    first = await draw.batch(want=2)
    assert await draw.ack(first) == 7
    await draw.batch(want=2)
    service.ready = 5
    with pytest.raises(TimeoutError):
        await draw.batch(want=2, timeout_s=0)
    service.ready = 100
    service.cut_replies = 1
    assert (await draw.rewind(first, version=1))["acked"] == 1
    batch = await draw.batch(want=2)
    assert (batch.number, ids(batch)) == (2, names(3, 4))
    assert [body for path, body in service.bodies if path.endswith("rewind")] == [{"batch": 1, "version": 1}] * 2


async def test_pushed_tasks_are_sent_again_only_if_they_have_ids(draw: AsyncDraw, service: ScriptedDraws):
    task = {"environment": "math"}
    service.cut_replies = 1
    assert await draw.push([task, task], ids=["a", "b"], close=True) == 9
    assert service.bodies[-1][1] == {"tasks": [task, task], "ids": ["a", "b"], "close": True}
    service.cut_replies = 1
    with pytest.raises(ServiceUnreachable, match="did not answer"):
        await draw.push([task])
    assert len(service.bodies) == 3
    with pytest.raises(ValueError, match="one id for each"):
        await draw.push([task], ids=[])


async def test_a_draw_is_created_once_though_the_response_was_lost(service: ScriptedDraws):
    async with AsyncClient(service.url, "t") as client:
        service.cut_replies = 1
        draw = await client.draw("r", [{"environment": "math"}], group_size=4, keep={"spread": 0.1})
        (_, first), (_, second) = service.bodies
        assert first == second and first["id"]
        assert first == {
            "id": first["id"],
            "run": "r",
            "source": {"tasks": [{"environment": "math"}]},
            "group_size": 4,
            "keep": {"spread": 0.1},
        }
        assert (draw.id, draw.run) == ("d", "r")
        with pytest.raises(ValueError, match="either tasks or a source"):
            await client.draw("r")
        assert [each["id"] for each in await client.draws()] == ["d"]
        assert (await draw.close())["id"] == "d"


async def test_the_sync_draw_has_the_same_results(service: ScriptedDraws):
    def work() -> None:
        with Client(service.url, "t") as client:
            draw = client.draw("r", [{"environment": "math"}], id="d")
            assert (draw.id, draw.run, draw.last_batch) == ("d", "r", None)
            assert ids(draw.batch(want=2)) == names(1, 2)
            assert [group.id for group in draw.stream(want=2)] == names(3, 4)
            assert draw.last_batch is not None and draw.last_batch.number == 2
            assert draw.ack(2) == 7
            assert draw.rewind(1, version=0)["batch"] == 1
            assert draw.push([{"environment": "math"}]) == 9
            assert draw.status()["state"] == "active"
            assert client.get_draw("d").close()["id"] == "d"

    await asyncio.to_thread(work)


async def test_a_garbage_collected_sync_stream_does_not_block_the_client(service: ScriptedDraws):
    """Left half-way in a reference cycle, it is collected by the garbage collector, possibly in the client's thread."""

    def work() -> list[str]:
        with Client(service.url, "t") as client:
            draw = client.draw("r", [{"environment": "math"}], id="d")
            stream = draw.stream(want=3, limit=1)
            group_ids, cycle = [next(stream).id], [stream]
            cycle.append(cycle)  # type: ignore[arg-type]
            del stream, cycle
            loop = client._loop._loop
            assert loop is not None
            loop.call_soon_threadsafe(gc.collect)
            collected = threading.Event()
            loop.call_soon_threadsafe(collected.set)
            if not collected.wait(10):
                client._loop._loop = None  # it would never stop: abandon it and fail
                raise AssertionError("the client's thread is deadlocked")
            return group_ids + [group.id for group in draw.stream(want=3)]

    assert await asyncio.to_thread(work) == names(1, 3)


async def test_evaluate_waits_and_reports_progress(service: ScriptedDraws):
    states = [("running", 0), ("running", 3), ("running", 3), ("running", 8), ("done", 8)]
    service.evaluations = [{"state": state, "done": done} for state, done in states]
    service.evaluations[-1]["result"] = {"pass_at": {"1": {"mean": 0.5}}}
    progress: list[int] = []
    async with AsyncClient(service.url, "t") as client:
        service.cut_replies = 1
        evaluation = await client.evaluate(
            [{"environment": "math"}], k=4, seed=1, on_progress=lambda e: progress.append(e.done)
        )
        assert (evaluation.state, evaluation.is_ended, evaluation.version, evaluation.total) == ("done", True, 3, 8)
        assert evaluation.result == {"pass_at": {"1": {"mean": 0.5}}}
        assert progress == [3, 8]
        (_, first), (_, second) = service.bodies
        assert first == second == {"id": first["id"], "source": {"tasks": [{"environment": "math"}]}, "k": 4, "seed": 1}


async def test_a_failed_evaluation_is_returned_and_a_running_one_is_a_timeout(service: ScriptedDraws):
    def work() -> None:
        with Client(service.url, "t") as client:
            with pytest.raises(TimeoutError, match="evaluation ev has 0 of 8"):
                client.evaluate(source={"environment": "gym"}, timeout_s=0)
            assert client.cancel_eval("ev") == "running"
            service.evaluations = [{"state": "failed", "reason": "2 of 8 are missing", "done": 8}]
            assert client.get_eval("ev").reason == "2 of 8 are missing"
            assert client.evaluate(source={"environment": "gym"}).state == "failed"

    await asyncio.to_thread(work)


def lose_a_member(page: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    page["groups"][0]["rollouts"].pop()


def lose_a_trace(page: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    rows.pop()


def another_batch(page: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    page["batch"]["number"] = 9


def stand_still(page: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    page["next"] = "d:0"


def lose_the_groups(page: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    del page["groups"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_member, "lacks its member"),
        (lose_a_trace, "1 of 2 traces"),
        (another_batch, "a page of batch 1"),
        (stand_still, "does not continue"),
        (lose_the_groups, "page of groups"),
    ],
)
async def test_an_invalid_page_never_becomes_a_smaller_batch(
    draw: AsyncDraw, service: ScriptedDraws, spoil: Any, message: str
):
    service.spoil = spoil
    with pytest.raises(UnexpectedReply, match=message):
        await draw.batch(want=2)
    service.spoil = None
    assert ids(await draw.batch(want=2)) == names(1, 2)


def test_a_page_is_the_same_in_json_and_arrow():
    groups = [group_object(place, 1) for place in (1, 2)]
    rows = [trace_row(record["id"], k, 2) for group in groups for record in group["rollouts"] for k in range(2)]
    rows[0]["logprobs"] = None
    head = {"next": "d:2", "batch": {"number": 1, "state": "open"}}
    arrow = read_arrow_page(arrow_page({"groups": groups, **head}, rows))
    whole = [
        {
            **group,
            "rollouts": [
                {**record, "traces": [row for row in rows if row["rollout_id"] == record["id"]]}
                for record in group["rollouts"]
            ],
        }
        for group in groups
    ]
    plain = read_json_page({"groups": whole, **head})
    assert arrow.next == plain.next == "d:2"
    assert arrow.batch is not None and plain.batch is not None and arrow.batch.number == plain.batch.number
    for arrow_group, plain_group in zip(arrow.groups, plain.groups, strict=True):
        assert (arrow_group.id, arrow_group.cursor, arrow_group.stats) == (
            plain_group.id,
            plain_group.cursor,
            plain_group.stats,
        )
        for one, other in zip(arrow_group.rollouts, plain_group.rollouts, strict=True):
            assert (one.id, one.index, one.reward) == (other.id, other.index, other.reward)
            for left, right in zip(one.traces, other.traces, strict=True):
                assert (left.spans, left.sampling, left.index) == (right.spans, right.sampling, right.index)
                for name in ("token_ids", "mask", "logprobs", "versions"):
                    column, twin = getattr(left, name), getattr(right, name)
                    if name == "logprobs" and (one.id, left.index) == (rows[0]["rollout_id"], 0):
                        assert column is twin is None, "never zeros"
                    else:
                        assert (column.tolist(), column.dtype) == (twin.tolist(), twin.dtype)


def test_a_group_without_records_has_a_summary_of_its_members():
    body = group_object(1, 1)
    del body["rollouts"]
    group = read_group(body)
    assert [(r.id, r.reward, r.record.group, r.traces) for r in group.rollouts] == [
        ("g1-0", 1.0, "g1", ()),
        ("g1-2", 1.0, "g1", ()),
    ]
