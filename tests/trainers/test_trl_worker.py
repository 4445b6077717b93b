"""The worker as TRL uses it, on a real service. A namespace replaces TRL's `RolloutSample`."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from rollyard.client import AsyncClient
from rollyard.core import RollyardError
from rollyard.testing.script import Reply, Turn
from rollyard.trainers import _trl_samples, trl
from rollyard.trainers.trl import RollyardRolloutWorker
from tests.client.served import RunningService, call, served, task

pytestmark = pytest.mark.slow

T = TypeVar("T")
TASKS = [task(f"Write done, number {n}.") for n in range(4)]


def every_second_one(turn: Turn) -> str:
    """Rollouts with an odd index solve their task, in two turns; the others only pretend to."""
    if turn.number:
        return call("finish")
    is_doing = turn.session_id.rpartition("-")[2] in {"1", "3"}
    return call("shell", command="echo hello > done" if is_doing else "echo nothing")


@pytest.fixture(autouse=True)
def without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trl_samples, "sample_type", lambda: SimpleNamespace)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncGenerator[RunningService, None]:
    async with served(tmp_path) as running:
        running.engine.script = every_second_one
        async with AsyncClient(running.url, running.token) as client:
            await client.create_run("trl")
        yield running


@pytest.fixture
async def client(service: RunningService) -> AsyncGenerator[AsyncClient, None]:
    async with AsyncClient(service.url, service.token) as opened:
        yield opened


@pytest.fixture
async def make(service: RunningService) -> AsyncGenerator[Callable[..., RollyardRolloutWorker], None]:
    workers: list[RollyardRolloutWorker] = []

    def worker(**fields: Any) -> RollyardRolloutWorker:
        known = {"run": "trl", "tasks": TASKS, "group_size": 2, "want": 1, **fields}
        workers.append(RollyardRolloutWorker(service.url, service.token, **known))
        return workers[-1]

    yield worker
    for one in workers:
        await asyncio.to_thread(one.stop)


def sent(worker: RollyardRolloutWorker, version: int) -> None:
    """Sends weights as TRL does."""
    weights = worker.weights()
    weights.pause()
    weights.send_weights(iter([("name", "tensor")]))
    weights.resume()
    worker.update_model_version(version)


def start_worker(worker: RollyardRolloutWorker) -> None:
    """Starts the worker as TRL does."""
    sent(worker, 1)
    worker.start()


def taken(worker: RollyardRolloutWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=30) for _ in range(count)]


def driving(worker: RollyardRolloutWorker) -> Future[None]:
    assert worker._driving is not None
    return worker._driving


async def off(function: Callable[..., T], *args: Any) -> T:
    """Calls a function in a thread, as TRL does: the service runs in this one."""
    return await asyncio.to_thread(function, *args)


async def test_samples_come_in_complete_groups_with_their_advantages(make: Callable[..., RollyardRolloutWorker]):
    worker = make()
    await off(start_worker, worker)
    samples = await off(taken, worker, 6)
    assert [sample.group_id for sample in samples] == [0, 0, 1, 1, 2, 2]
    assert [round(sample.advantage) for sample in samples] == [-1, 1] * 3
    assert all(0 < sample.completion_mask.sum() < len(sample.input_ids) for sample in samples)
    metrics = await off(lambda: worker.metrics_queue.get(timeout=30))
    assert metrics["rollyard/reward_before"] == 0.5
    assert metrics["rollyard/filtered_total"] == 0


async def test_no_batch_is_requested_while_the_previous_one_waits(
    make: Callable[..., RollyardRolloutWorker], client: AsyncClient
):
    worker = make()
    await off(start_worker, worker)
    await off(lambda: worker.metrics_queue.get(timeout=30))  # the first batch is closed
    await off(worker.check_health, 30.0)
    assert worker.rollout_buffer.qsize() == 2
    assert [draw["batch"] for draw in await client.draws()] == [1]
    await off(taken, worker, 2)
    await off(lambda: worker.metrics_queue.get(timeout=30))
    assert [draw["batch"] for draw in await client.draws()] == [2]


async def test_versions_are_those_of_the_tokens_and_count_from_the_policys_version(
    make: Callable[..., RollyardRolloutWorker], client: AsyncClient
):
    await client.policy("default").resume(40)
    worker = make(max_staleness=0)
    await off(start_worker, worker)
    assert {sample.model_version for sample in await off(taken, worker, 2)} == {1}
    assert (await client.policy("default").status())["version"] == 41
    await off(sent, worker, 2)
    assert {sample.model_version for sample in await off(taken, worker, 6)} >= {2}


async def test_weights_sent_without_a_pause_are_refused(make: Callable[..., RollyardRolloutWorker]):
    worker = make()
    await off(start_worker, worker)
    with pytest.raises(RuntimeError, match=r"weight_transfer=worker\.weights"):
        await off(worker.update_model_version, 2)


async def test_nothing_is_sampled_between_pause_and_resume(
    make: Callable[..., RollyardRolloutWorker], client: AsyncClient
):
    worker = make()
    await off(worker.pause)
    assert (await client.policy("default").status())["state"] == "paused"
    await off(worker.update_model_version, 1)
    assert (await client.policy("default").status())["state"] == "running"


async def test_check_health_raises_at_the_end_of_the_draw(make: Callable[..., RollyardRolloutWorker]):
    worker = make(epochs=1)
    await off(start_worker, worker)
    await off(taken, worker, 2 * len(TASKS))
    assert "exhausted" in str(await off(driving(worker).exception, 30))
    with pytest.raises(RuntimeError, match=r"no more rollouts come: .*exhausted"):
        await off(worker.check_health, 300.0)


async def test_check_health_raises_when_the_service_has_not_answered_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trl, "HEALTH_S", 0.5)
    async with served(tmp_path) as service:
        service.engine.script = every_second_one
        async with AsyncClient(service.url, service.token) as client:
            await client.create_run("trl")
        worker = RollyardRolloutWorker(service.url, service.token, run="trl", tasks=TASKS, group_size=2, want=1)
        await off(start_worker, worker)
    try:
        await off(worker.check_health, 3600.0)  # it does not answer, but not for too long yet
        with pytest.raises(RuntimeError, match="has not answered for"):
            await off(worker.check_health, 0.1)
    finally:
        await off(worker.stop)


async def test_a_member_that_infrastructure_failed_is_replaced_by_a_spare(
    make: Callable[..., RollyardRolloutWorker], service: RunningService, client: AsyncClient
):
    def failing(turn: Turn) -> Reply | str:
        is_failed = turn.session_id.endswith("-0")
        return Reply("x", fault="no_token_ids") if is_failed else every_second_one(turn)

    service.engine.script = failing
    worker = make(tasks=TASKS[:1], epochs=1)
    await off(start_worker, worker)
    samples = await off(taken, worker, 2)
    assert [sample.metrics["reward"] for sample in samples] == [1.0, 0.0]
    assert [round(sample.advantage) for sample in samples] == [1, -1]
    assert "exhausted" in str(await off(driving(worker).exception, 30))
    assert worker.rollout_buffer.empty()
    (draw,) = await client.draws()
    assert draw["figures"]["infra_rollouts"] == 1


async def test_start_raises_what_prevents_it(make: Callable[..., RollyardRolloutWorker]):
    with pytest.raises(RollyardError, match="missing"):
        await off(make(run="missing").start)
    with pytest.raises(RollyardError):
        await off(make(keep="sometimes").start)


async def test_a_draw_is_closed_at_the_end_unless_it_has_an_id(
    make: Callable[..., RollyardRolloutWorker], client: AsyncClient
):
    for worker in (make(), make(id="mine")):
        await off(start_worker, worker)
        await off(taken, worker, 2)
        await off(worker.stop)
        await off(worker.stop)
    states = {draw["id"]: draw["state"] for draw in await client.draws()}
    assert states.pop("mine") == "active"
    assert set(states.values()) == {"ended"}


async def test_a_checkpoint_acknowledges_trained_batches_and_can_be_resumed(
    make: Callable[..., RollyardRolloutWorker], client: AsyncClient, tmp_path: Path
):
    worker = make(id="mine", max_staleness=0)
    await off(start_worker, worker)
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for version in (2, 3, 4):  # one step each; the last sample that was taken a step ago may not be trained on yet
        await off(taken, worker, 2)
        await off(lambda: worker.metrics_queue.get(timeout=30))
        await off(sent, worker, version)
        worker._stepped()
    await off(worker._saved, folder)
    assert json.loads((folder / "rollyard.json").read_text()) == {"draw": "mine", "batch": 1, "version": 4}
    assert [draw["acked"] for draw in await client.draws()] == [1]
    await off(taken, worker, 2)
    await off(worker.stop)

    again = make(id="mine", max_staleness=0, resume=folder)
    await off(start_worker, again)
    assert (await client.policy("default").status())["version"] == 5
    await off(lambda: again.metrics_queue.get(timeout=30))  # its first batch is closed, and waits
    (facts,) = await client.draws()
    assert facts["batch"] == 2, "it continues after the batch of the checkpoint"
    assert len(await off(taken, again, 2)) == 2


def test_resume_needs_the_id_of_the_draw(tmp_path: Path):
    with pytest.raises(ValueError, match="give the id of its draw"):
        RollyardRolloutWorker(run="trl", tasks=TASKS, want=1, resume=tmp_path)
