"""GRPOTrainer's `rollout_func` on a real service, with a stub of the trainer."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard.client import AsyncClient
from rollyard.testing.script import Reply, Turn
from rollyard.trainers.trl import RolloutsMissing, RollyardRolloutFunc
from tests.client.served import RunningService, call, served, task

pytestmark = pytest.mark.slow

TASKS = {name: task(f"Write done, {name}.") for name in ("first", "second")}


def mixed(turn: Turn) -> Reply | str:
    """Only member 1 solves the task. Infrastructure fails member 0 of a FIRST task, and all members of EVERYBODY."""
    member = turn.session_id.rpartition("-")[2]
    if "EVERYBODY" in turn.text or ("FIRST" in turn.text and member == "0"):
        return Reply("x", fault="no_token_ids")
    if turn.number:
        return call("finish")
    return call("shell", command="echo hello > done" if member == "1" else "true")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncGenerator[RunningService, None]:
    async with served(tmp_path, max_attempts=1) as running:
        running.engine.script = mixed
        async with AsyncClient(running.url, running.token) as client:
            await client.create_run("trl")
        yield running


def trainer(step: int = 0) -> Any:
    processes = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    return SimpleNamespace(state=SimpleNamespace(global_step=step), accelerator=processes)


def rollouts(service: RunningService, **fields: Any) -> RollyardRolloutFunc:
    return RollyardRolloutFunc(lambda prompt: TASKS.get(prompt) or task(prompt), service.url, service.token, **fields)


async def test_each_prompt_gets_its_rollouts_in_order(service: RunningService):
    columns = await asyncio.to_thread(rollouts(service, run="trl"), ["first"] * 2 + ["second"] * 3, trainer())
    assert columns["rollyard_reward"] == [0.0, 1.0, 0.0, 1.0, 0.0]
    async with AsyncClient(service.url, service.token) as client:
        records = [await client.get(id) for id in columns["rollyard_rollout"]]
    assert [record.task["data"]["instruction"] for record in records] == ["Write done, first."] * 2 + [
        "Write done, second."
    ] * 3
    for mask, ids, logprobs in zip(columns["env_mask"], columns["completion_ids"], columns["logprobs"], strict=True):
        assert len(mask) == len(ids) == len(logprobs)
        assert mask[0] == 1 and 0 in mask, "the tool output is inside the completion"


async def test_a_member_that_infrastructure_failed_is_replaced_by_a_spare(service: RunningService):
    columns = await asyncio.to_thread(rollouts(service, run="trl"), ["FIRST"] * 2, trainer())
    assert [id.rpartition("-")[2] for id in columns["rollyard_rollout"]] == ["1", "2"]
    assert columns["rollyard_reward"] == [1.0, 0.0]


async def test_a_group_that_stays_short_is_an_error(service: RunningService):
    with pytest.raises(RolloutsMissing, match="1 of 2 prompts have no complete group after 2 tries"):
        await asyncio.to_thread(rollouts(service, run="trl", tries=2), ["first"] * 2 + ["EVERYBODY"] * 2, trainer())
    async with AsyncClient(service.url, service.token) as client:
        page = await client.list(state="ended", limit=100)
    texts = [record.task["data"]["instruction"] for record in page.rollouts]
    assert texts.count("Write done, first.") == 2, "a complete group is not tried again"
    assert len({record.group for record in page.rollouts}) == 3


async def test_weights_are_sent_once_per_step_while_nothing_is_sampled(service: RunningService):
    sent: list[int] = []

    def push(trainer: Any) -> None:
        sent.append(trainer.state.global_step)

    call_it = rollouts(service, run="trl", push_weights=push)
    async with AsyncClient(service.url, service.token) as client:
        for step in (0, 0, 1):
            columns = await asyncio.to_thread(call_it, ["first"] * 2, trainer(step))
            newest = {
                int(trace.versions.max()) for id in columns["rollyard_rollout"] for trace in await client.traces(id)
            }
            assert newest == {step + 1}
    assert sent == [0, 1]
