"""The connection of verl's process to the service: a real service, without verl."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollyard.client import AsyncClient, Group
from rollyard.core import RollyardError
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.trainers._verl_prompts import PromptGroup, asks_of_prompts
from rollyard.trainers._verl_service import VerlService
from rollyard.trainers._verl_settings import Settings
from tests.client.served import RunningService, served, task

ROLLOUT = SimpleNamespace(
    name="vllm",
    n=2,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    prompt_length=2000,
    response_length=2000,
    val_kwargs=SimpleNamespace(n=1, temperature=0, top_p=1.0, top_k=-1),
)
MODEL = SimpleNamespace(path=str(tokenizer_dir()))


@asynccontextmanager
async def verl_service(service: RunningService, engine: str | None = None) -> AsyncGenerator[VerlService, None]:
    settings = Settings(url=service.url, token=service.token, engines=(engine or service.engine.url,))
    verl = VerlService(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT, model=MODEL)), settings, None)
    await asyncio.to_thread(verl.start)
    try:
        yield verl
    finally:
        await asyncio.to_thread(verl.stop)


def asks(step: int, *tasks: dict[str, Any], validate: bool = False) -> list[PromptGroup]:
    rows = [
        {"uid": f"{step}.{i}.{validate}", "rollyard_task": one, "global_steps": step, "validate": validate}
        for i, one in enumerate(tasks)
    ]
    return asks_of_prompts(rows, ROLLOUT, Settings())


async def run(verl: VerlService, work: Any) -> Any:
    return await asyncio.wrap_future(verl.submit(work))


async def group_of(verl: VerlService, ask: PromptGroup) -> Group:
    async def wait() -> Group:
        async with verl.ended(ask) as group:
            return group

    return await run(verl, wait())


async def test_the_policy_is_paused_while_verl_waits_for_no_group(tmp_path: Path):
    async with (
        served(tmp_path, engines=[]) as service,
        AsyncClient(service.url, service.token) as client,
        verl_service(service) as verl,
    ):
        policy = client.policy("default")
        one, other = asks(1, task(), task())
        await run(verl, verl.begin([one, other]))
        assert (await policy.status())["state"] == "running"
        first = await group_of(verl, one)
        assert (await policy.status())["state"] == "running", "verl waits for the other one"
        await group_of(verl, other)
        assert (await policy.status())["state"] == "paused"

        (later,) = asks(5, task())
        await run(verl, verl.begin([later]))
        second = await group_of(verl, later)
        assert ((await policy.status())["state"], (await policy.status())["version"]) == ("paused", 4)
        (judged,) = asks(5, task(), validate=True)
        await run(verl, verl.begin([judged]))
        third = await group_of(verl, judged)
    assert [(group.oldest_version, group.newest_version) for group in (first, second, third)] == [
        (0, 0),
        (4, 4),
        (5, 5),
    ]
    assert [len(group.rollouts) for group in (first, second, third)] == [2, 2, 1]
    assert all(rollout.traces and rollout.reward == 1.0 for group in (first, second) for rollout in group.rollouts)
    assert not third.rollouts[0].trainable and third.run == "verl.val"


async def test_a_refused_prompt_cancels_the_others(tmp_path: Path):
    async with (
        served(tmp_path, engines=[]) as service,
        AsyncClient(service.url, service.token) as client,
        verl_service(service) as verl,
    ):
        prompt_groups = asks(1, task("NEVER"), {"environment": "nowhere"})
        with pytest.raises(RollyardError, match="nowhere"):
            await run(verl, verl.begin(prompt_groups))
        assert (await client.get_group(prompt_groups[0].group)).state == "cancelled"
        assert (await client.policy("default").status())["state"] == "paused"


async def test_a_repeated_prompt_is_the_existing_group(tmp_path: Path):
    async with (
        served(tmp_path, engines=[]) as service,
        AsyncClient(service.url, service.token) as client,
        verl_service(service) as verl,
    ):
        (one,) = asks(1, task())
        for _ in range(2):
            await run(verl, verl.begin([one]))
            await group_of(verl, one)
        assert len((await client.list(run="verl")).rollouts) == ROLLOUT.n


async def test_the_engines_of_an_earlier_trainer_are_replaced(tmp_path: Path):
    async with served(tmp_path, engines=[]) as service, AsyncClient(service.url, service.token) as client:
        await client.add_engine(service.engine.url, id="default.verl0", policy="default", tokenizer=MODEL.path)
        await client.add_engine(service.engine.url, id="default.verl1", policy="default", tokenizer=MODEL.path)
        await client.add_engine(service.engine.url, id="mine", policy="other", tokenizer=MODEL.path)
        url = service.engine.url.replace("127.0.0.1", "localhost")
        async with verl_service(service, url) as verl:
            (one,) = asks(1, task())
            await run(verl, verl.begin([one]))
            await group_of(verl, one)
        assert {e["id"]: e["url"] for e in await client.engines()} == {"default.verl0": url, "mine": service.engine.url}


async def test_start_raises_if_the_service_is_unreachable():
    settings = Settings(url="http://127.0.0.1:9", token="t", retry_s=0.1)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT, model=MODEL))
    with pytest.raises(RollyardError, match="cannot connect to"):
        await asyncio.to_thread(VerlService(config, settings, None).start)
