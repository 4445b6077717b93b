"""The client against the real service: all that a trainer does."""

import asyncio

import pytest

from rollyard.client import AsyncClient, Client, Event, Record, UnexpectedReply
from rollyard.client._bodies import MOST_ITEMS
from rollyard.core import AgentSpec, Task
from rollyard.core.failure import Forbidden, IdConflict, InvalidRequest, MalformedId, NotFound, Unauthorized
from tests.client.served import RunningService, served, task

pytestmark = pytest.mark.slow


async def test_a_submitted_task_returns_traces_as_numpy(client: AsyncClient):
    (submitted,) = await client.submit([task()])
    record = await client.wait(submitted.id, timeout_s=30)
    assert (record.outcome, record.reward, record.trainable) == ("completed", 1.0, True)
    assert record.summary is not None and record.summary["turns"] == 2
    (trace,) = await client.traces(record.id)
    assert trace.logprobs is not None
    assert len(trace.token_ids) == len(trace.mask) == len(trace.logprobs) == len(trace.versions) == len(trace)
    assert [str(c.dtype) for c in (trace.token_ids, trace.mask, trace.logprobs)] == ["int32", "uint8", "float32"]
    assert trace.mask.sum() == record.summary["sampled_tokens"] == sum(span.end - span.start for span in trace.spans)
    assert (trace.logprobs[trace.mask == 0] == 0).all() and (trace.versions[trace.mask == 0] == -1).all()
    assert (trace.rollout_id, trace.siblings, trace.reward, trace.trainable) == (record.id, 1, 1.0, True)
    assert trace.sampling.temperature == 1.0


async def test_the_columns_of_a_trace_are_views_and_not_copies(client: AsyncClient):
    (submitted,) = await client.submit([task()])
    await client.wait(submitted.id, timeout_s=30)
    (trace,) = await client.traces(submitted.id)
    for column in (trace.token_ids, trace.mask, trace.logprobs, trace.versions):
        assert column is not None
        assert not column.flags.owndata and not column.flags.writeable


async def test_a_trajectory_as_json_has_the_same_traces(client: AsyncClient):
    (submitted,) = await client.submit([task()])
    await client.wait(submitted.id, timeout_s=30)
    trajectory = await client.trajectory(submitted.id)
    (from_json,), (from_arrow,) = trajectory.traces, await client.traces(submitted.id)
    for name in ("token_ids", "mask", "logprobs", "versions"):
        assert (getattr(from_json, name) == getattr(from_arrow, name)).all(), name
    assert from_json.spans == from_arrow.spans and from_json.sampling == from_arrow.sampling
    assert trajectory.messages[-1]["role"] in ("assistant", "tool")
    assert trajectory.record.id == submitted.id and trajectory.turns == 2


async def test_a_group_is_n_rollouts_of_one_task(client: AsyncClient):
    records = await client.submit([task(), task("Write done again.")], ids=["a", "b"], group_size=3)
    assert [(r.id, r.group, r.index) for r in records[:4]] == [
        ("a-0", "a", 0),
        ("a-1", "a", 1),
        ("a-2", "a", 2),
        ("b-0", "b", 0),
    ]
    ended = await client.wait_all([record.id for record in records], timeout_s=50)
    assert [record.id for record in ended] == [record.id for record in records]
    assert {record.reward for record in ended} == {1.0}
    page = await client.list(group="a", state="ended")
    assert {record.id for record in page.rollouts} == {"a-0", "a-1", "a-2"}


async def test_the_same_ids_again_are_the_same_rollouts(client: AsyncClient):
    (first,) = await client.submit([task()], ids=["once"])
    await client.wait("once", timeout_s=30)
    (again,) = await client.submit([task()], ids=["once"])
    assert (again.created_at, again.state) == (first.created_at, "ended")
    with pytest.raises(IdConflict, match="once"):
        await client.submit([task("Another.")], ids=["once"])


async def test_a_task_can_be_a_dataclass_of_core(client: AsyncClient):
    math_task = Task("math", {"question": "2+2?", "answer": "4"}, AgentSpec(options={"tools": ["finish"]}))
    (record,) = await client.submit([math_task])
    assert record.task["environment"] == "math"
    assert record.task["agent"]["options"] == {"tools": ["finish"]}


async def test_wait_all_reports_each_end_once_and_the_states_before_it(client: AsyncClient):
    records = await client.submit([task(str(number)) for number in range(20)])
    ends: list[str] = []
    events: list[Event] = []
    ids = [record.id for record in records]
    await client.wait_all(ids, on_end=lambda r: ends.append(r.id), on_event=events.append, timeout_s=50)
    assert sorted(ends) == sorted(ids)
    assert {event.rollout for event in events} <= set(ids)
    assert await client.wait_all(ids[:2], timeout_s=50) == [await client.get(id) for id in ids[:2]]


async def test_wait_all_reports_the_states_since_an_event(client: AsyncClient):
    after = (await client.status())["last_event"]
    await client.submit([task("NEVER")], ids=["one"])  # it does not end before its events have been read
    async for event in client.events(after=after):
        if event.state == "run":
            break  # these events are over when wait_all is called
    events: list[Event] = []
    waiting = asyncio.create_task(client.wait_all(["one"], on_event=events.append, after=after, timeout_s=90))
    async with asyncio.timeout(60):
        while len(events) < 4:
            await asyncio.sleep(0.01)
    await client.cancel("one")
    await waiting
    assert [event.state for event in events][:4] == ["queued", "init", "ready", "run"]


async def test_wait_all_is_prompt_for_ids_behind_slow_ones(client: AsyncClient):
    """More slow rollouts before it than there are long polls: only events can report the quick one."""
    await client.resize_pools(run=40, init=40, ready=40)
    slow = await client.submit([task(f"NEVER {number}") for number in range(20)])
    (quick,) = await client.submit([task()])
    ended = asyncio.Event()
    ids = [record.id for record in (*slow, quick)]
    waiting = asyncio.create_task(client.wait_all(ids, on_end=lambda r: r.id == quick.id and ended.set()))
    await asyncio.wait_for(ended.wait(), 50)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_wait_that_times_out_does_not_affect_the_rollout(client: AsyncClient):
    (record,) = await client.submit([task("NEVER")])
    with pytest.raises(TimeoutError, match="is in"):
        await client.wait(record.id, timeout_s=0.05)
    with pytest.raises(TimeoutError, match="1 of 1"):
        await client.wait_all([record.id], timeout_s=0.05)
    assert not (await client.get(record.id)).is_ended


async def test_wait_all_raises_the_error_itself(client: AsyncClient):
    with pytest.raises(NotFound):
        await client.wait_all(["nowhere"], timeout_s=20)


async def test_ended_follows_the_terminal_order_from_a_cursor(client: AsyncClient):
    await client.create_run("mine")
    ids = [record.id for record in await client.submit([task(str(n)) for n in range(4)], run="mine")]
    records: list[Record] = []
    async with asyncio.timeout(90):
        async for record in client.ended("mine"):
            records.append(record)
            if len(records) == 4:
                break
    assert sorted(record.id for record in records) == sorted(ids)
    cursors = [int(str(record.cursor).removeprefix("e:")) for record in records]
    assert cursors == sorted(cursors)
    async with asyncio.timeout(90):
        async for record in client.ended("mine", after=records[1].cursor):
            assert record.id == records[2].id
            break
    assert await client.acknowledge("mine", str(records[-1].cursor)) == 4


async def test_ended_stops_when_nothing_is_unfinished_and_follow_waits_for_more(client: AsyncClient):
    await client.create_run("mine")
    async with asyncio.timeout(90):
        assert [record.id async for record in client.ended("mine")] == [], "nothing was submitted"
        await client.submit([task("1"), task("2")], run="mine", ids=["a", "b"])
        seen: list[str] = []
        async for record in client.ended("mine"):
            if not seen:
                await client.submit([task("3")], run="mine", ids=["c"])  # by the loop itself
            seen.append(record.id)
        assert sorted(seen) == ["a", "b", "c"]
        last = (await client.list(state="ended", run="mine")).next
        assert [record.id async for record in client.ended("mine", after=last)] == []
        following = client.ended("mine", after=last, follow=True)
        waiting = asyncio.ensure_future(anext(following))
        await client.submit([task("4")], run="mine", ids=["d"])
        assert (await waiting).id == "d"


async def test_a_cancel_is_acknowledged_and_ends_it(client: AsyncClient):
    (record,) = await client.submit([task("NEVER")])
    assert await client.cancel(record.id) in ("queued", "init", "ready", "run", "ended")
    ended = await client.wait(record.id, timeout_s=30)
    assert (ended.outcome, ended.reward) == ("cancelled", None)
    assert await client.cancel("not-yet") == "cancelled_before_submit"
    (tombstone,) = await client.submit([task()], ids=["not-yet"])
    assert tombstone.outcome == "cancelled"


async def test_a_rescore_appends_to_the_scores(client: AsyncClient):
    (record,) = await client.submit([task()])
    await client.wait(record.id, timeout_s=30)
    again = await client.rescore(record.id)
    assert [score["reward"] for score in again.scores] == [1.0]


async def test_a_run_can_mask_truncated_rollouts_and_penalize_length(client: AsyncClient):
    penalty = {"from_tokens": 0, "to_tokens": 1, "most": 0.5}
    run = await client.create_run(
        "r1", mask_truncated=True, overlong_penalty=penalty, defaults={"limits": {"max_turns": 1}}
    )
    assert (run["mask_truncated"], run["overlong_penalty"]) == (True, penalty)
    (record,) = await client.submit([task()], run="r1")
    ended = await client.wait(record.id, timeout_s=30)
    assert (ended.outcome, ended.trainable) == ("truncated", False)
    assert ended.score is not None and ended.score["components"]["overlong_penalty"] == -0.5
    (trace,) = await client.traces(record.id)
    assert not trace.trainable and trace.reason == "its run masks truncated rollouts, and it ended with turn_limit"


async def test_runs_are_created_once_and_their_defaults_apply_to_tasks(client: AsyncClient):
    run = await client.create_run("r1", seed=7, defaults={"limits": {"max_turns": 1}})
    assert run == await client.create_run("r1", seed=7, defaults={"limits": {"max_turns": 1}})
    assert run == await client.get_run("r1")
    with pytest.raises(IdConflict):
        await client.create_run("r1", seed=8)
    (record,) = await client.submit([task()], run="r1")
    ended = await client.wait(record.id, timeout_s=30)
    assert (ended.outcome, ended.failure and ended.failure["code"]) == ("truncated", "turn_limit")
    assert [run["id"] for run in await client.list_runs()] == ["r1"]
    await client.delete_run("r1")
    with pytest.raises(NotFound):
        await client.get_run("r1")


async def test_engines_are_added_listed_and_removed(client: AsyncClient, service: RunningService):
    assert [engine["id"] for engine in await client.engines()] == ["e0"]
    await client.remove_engine("e0")
    added = await client.add_engine(service.engine.url, id="e1", policy="actor", tokenizer=_tokenizer())
    assert (added["id"], added["policy"], added["state"]) == ("e1", "actor", "up")
    await client.clear_engines()
    assert await client.engines() == []


async def test_status_and_pools(client: AsyncClient):
    status = await client.status()
    assert {"shell", "math"} <= set(status["environments"])
    pools = await client.resize_pools(run=3)
    assert pools["run"]["size"] == 3


async def test_events_report_every_state(client: AsyncClient):
    await client.create_run("watched")
    (other,) = await client.submit([task()])
    (record,) = await client.submit([task()], run="watched")
    await client.wait_all([other.id, record.id], timeout_s=40)
    events: list[Event] = []
    async with asyncio.timeout(90):
        async for event in client.events(after="0-0", run="watched"):  # an id of another process: a gap, then all
            events.append(event)
            if event.state == "ended":
                break
    assert events[0].kind == "gap"
    assert {event.rollout for event in events[1:]} == {record.id}
    assert [event.state for event in events[1:]] == ["queued", "init", "ready", "run", "eval", "ended"]
    assert (events[-1].outcome, events[-1].code, events[-1].run) == ("completed", None, "watched")


async def test_a_wrong_token_and_a_wrong_field_raise_specific_errors(client: AsyncClient, service: RunningService):
    async with AsyncClient(service.url, "x" * 32) as stranger:
        with pytest.raises(Unauthorized):
            await stranger.status()
    with pytest.raises(InvalidRequest, match=r"rollouts\[1\]\.task\.limits\.max_turn:") as caught:
        await client.submit([task(), task(limits={"max_turn": 3})])
    assert caught.value.status == 422 and caught.value.data["submitted"] == 0
    with pytest.raises(MalformedId):
        await client.get("../etc")
    with pytest.raises(ValueError, match="one id for each"):
        await client.submit([task()], ids=[])


async def test_many_tasks_are_submitted_in_several_calls_and_in_order(client: AsyncClient):
    await client.resize_pools(init=0)
    tasks = [*[task()] * MOST_ITEMS, task("another")]
    records = await client.submit(tasks, ids=[f"r{number}" for number in range(len(tasks))])
    assert [record.id for record in records] == [f"r{number}" for number in range(len(tasks))]
    with pytest.raises(InvalidRequest) as caught:
        await client.submit([*[task()] * MOST_ITEMS, task(limits={"max_turn": 3})])
    assert caught.value.data["submitted"] == MOST_ITEMS
    checked = await client.check([*[task()] * MOST_ITEMS, task(limits={"max_turn": 3})])
    assert (checked.checked, checked.bad, checked.problems[0].index) == (MOST_ITEMS + 1, 1, MOST_ITEMS)


async def test_a_trainer_may_not_add_engines(tmp_path):
    tokens = {"admin_tokens": ["a" * 32], "trainer_tokens": ["t" * 32]}
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "token").write_text("unused " * 3)
    async with served(tmp_path, **tokens) as service, AsyncClient(service.url, "t" * 32) as trainer:
        with pytest.raises(Forbidden) as caught:
            await trainer.add_engine("http://127.0.0.1:9", id="x")
        assert caught.value.remedy
        await trainer.status()


async def test_another_service_on_that_port_is_detected(service: RunningService):
    async with AsyncClient(service.engine.url, "t") as client:
        with pytest.raises(UnexpectedReply):
            await client.status()


async def test_a_closed_client_raises_an_explanation(service: RunningService):
    client = AsyncClient(service.url, service.token)
    with pytest.raises(RuntimeError, match="async with"):
        await client.status()


async def test_the_sync_client_works_on_its_own_thread(service: RunningService):
    def work() -> tuple[Record, int, list[str]]:
        with Client(service.url, service.token) as client:
            client.create_run("sync")
            (submitted,) = client.submit([task()], run="sync")
            ended_ids: list[str] = []
            (record,) = client.wait_all([submitted.id], on_end=lambda r: ended_ids.append(r.id), timeout_s=30)
            ended_ids += [ended.id for ended in client.ended("sync")]
            with pytest.raises(NotFound):
                client.get("nowhere")
            return record, len(client.traces(record.id)[0]), ended_ids

    record, length, ended_ids = await asyncio.to_thread(work)
    assert record.reward == 1.0 and length > 0 and ended_ids == [record.id, record.id]
    with pytest.raises(RuntimeError, match="use it in `with`"):
        Client(service.url, service.token).status()


def _tokenizer() -> str:
    from rollyard.testing.tokenizer_files import tokenizer_dir

    return str(tokenizer_dir())


async def test_the_details_of_a_rollout(client: AsyncClient):
    (submitted,) = await client.submit([task()])
    await client.wait(submitted.id, timeout_s=30)
    (attempt,) = (await client.timeline(submitted.id))["attempts"]
    assert {"run", "model", "tool", "eval"} <= {one["kind"] for one in attempt["parts"]}
    assert (await client.requests(submitted.id))["requests"] == []
    (artifact,) = await client.artifacts(submitted.id)
    assert len(await client.artifact(submitted.id, artifact["name"])) == artifact["bytes"]
    with pytest.raises(NotFound):
        await client.artifact(submitted.id, "../../etc/passwd")
    assert (await client.trajectory(submitted.id)).info["evidence"][0]["passed"]
