"""Real TRL trainers, in their own environment, on rollouts of a real service.

A scripted engine invents its logprobs, and the ratio is not 1: in that case the tests compare the inputs of the loss,
and the loss that is computed from them."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest

from rollyard.client import AsyncClient, Group, Trace
from rollyard.client.batching import advantages
from rollyard.testing.script import Turn
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.client.served import RunningService, call, served, task
from tests.trainers.environment import Script, trainer_python

pytestmark = [pytest.mark.trainers, pytest.mark.slow, pytest.mark.timeout(300)]

TASKS = [task(f"Write done, number {n}.") for n in range(6)]
KILLED_LEASE_S = 10.0
"""As in trl_probe.py."""

PROBE = Path(__file__).parent / "trl_probe.py"


def every_second_one(turn: Turn) -> str:
    """Rollouts with an odd index solve their task, in two turns; the others only pretend to."""
    if turn.number:
        return call("finish")
    is_doing = turn.session_id.rpartition("-")[2] in {"1", "3"}
    return call("shell", command="echo hello > done" if is_doing else "echo nothing")


class Probe:
    """The process that has imported TRL."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def run(
        self,
        mode: str,
        service: RunningService,
        folder: Path,
        tasks: Sequence[Any] = TASKS,
        model: Path | None = None,
        expected: int = 0,
    ) -> dict[str, Any]:
        """Runs a mode in a fork of the process, and returns what it recorded."""
        file = folder / "tasks.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in tasks))
        asked = {"mode": mode, "folder": str(folder), "model": str(model or tokenizer_dir()), "tasks": str(file)}
        await asyncio.to_thread(self._script.execute, json.dumps({**asked, "environ": service.environ()}), expected)
        return json.loads((folder / "seen.json").read_text()) if expected == 0 else {}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Generator[Probe, None, None]:
    script = Script(trainer_python("trl"), PROBE, tmp_path_factory.mktemp("probe") / "log")
    try:
        yield Probe(script)
    finally:
        script.end()


def terms_of(trace: Trace, advantage: float) -> tuple[tuple[int, ...], tuple[float, ...], float]:
    """The terms of a loss: only the sampled tokens, with the logprobs that they were sampled with."""
    assert trace.logprobs is not None
    is_sampled = trace.mask == 1
    ids, logprobs = trace.token_ids[is_sampled].tolist(), trace.logprobs[is_sampled].tolist()
    return tuple(ids), tuple(round(value, 4) for value in logprobs), round(advantage, 4)


def check_steps(steps: list[dict[str, Any]], groups: list[Group]) -> None:
    """Asserts that training used exactly the sampled tokens of these groups, with the expected loss."""
    signals = advantages(groups)
    expected = Counter(terms_of(t, signals[r.id]) for g in groups for r in g.rollouts for t in r.traces)
    trained: Counter[Any] = Counter()
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["loss"] == pytest.approx(step["plain_loss"], abs=1e-4)
        for ids, logprobs, signal in step["terms"]:
            assert len(set(signal)) == 1
            trained[tuple(ids), tuple(round(value, 4) for value in logprobs), round(signal[0], 4)] += 1
    assert trained == expected


def newest_of(group: Group) -> int:
    return max(int(trace.versions.max()) for rollout in group.rollouts for trace in rollout.traces)


async def test_async_grpo_learns_from_exactly_the_sampled_tokens(probe: Probe, tmp_path: Path):
    async with served(tmp_path) as service:
        service.engine.script = every_second_one
        recorded = await probe.run("async", service, tmp_path)
        async with AsyncClient(service.url, service.token) as client:
            (facts,) = await client.draws()
            draw = await client.get_draw(facts["id"])
            groups = [
                group for n in range(1, len(recorded["steps"]) + 1) for group in (await draw.batch(number=n)).groups
            ]
    assert facts["state"] == "ended", "a draw without an id is closed when training ends"
    check_steps(recorded["steps"], groups)
    assert {round(signal) for signal in advantages(groups).values()} == {-1, 1}, "rewards differ within a group"
    for trace in (t for g in groups for r in g.rollouts for t in r.traces):
        changes = np.flatnonzero(np.diff(trace.mask))
        assert len(changes) >= 3, "two turns: the tool output between them is masked"

    assert recorded["calls"][:3] == ["pause", 1, "start"], "weights are sent before the first rollout"
    assert recorded["calls"][3:] == [word for n in range(2, len(recorded["steps"]) + 2) for word in ("pause", n)]
    versions = [newest_of(group) for group in groups]
    assert versions[0] == 1 and versions[-1] > 1, versions
    assert versions == sorted(versions)


@pytest.mark.vllm
async def test_tokens_of_a_real_engine_have_ratio_one(probe: Probe, vllm_url: str, vllm_model: Path, tmp_path: Path):
    """The trainer has the engine's weights, so it must compute the engine's logprobs."""
    model = vllm_model
    short = {"max_tokens": 12}
    sums = [
        {"environment": "math", "data": {"question": f"{n} + 5?", "answer": "1"}, "sampling": short} for n in (2, 3)
    ]
    async with served(tmp_path, engines=[{"url": vllm_url, "id": "e0", "tokenizer": str(model)}]) as service:
        recorded = await probe.run("real", service, tmp_path, sums, model)
        async with AsyncClient(service.url, service.token) as client:
            (facts,) = await client.draws()
            groups = (await (await client.get_draw(facts["id"])).batch(number=1)).groups
    check_steps(recorded["steps"], [*groups])
    assert recorded["steps"][0]["ratio"] == pytest.approx(1.0, abs=1e-3)


async def test_training_continues_from_a_checkpoint_with_the_batches_after_it(probe: Probe, tmp_path: Path):
    async with served(tmp_path) as service:
        service.engine.script = every_second_one
        recorded = await probe.run("again", service, tmp_path)
        state = recorded["state"]
        async with AsyncClient(service.url, service.token) as client:
            draw = await client.get_draw("trl-draw")
            facts = await draw.status()
            numbers = range(state["batch"] + 1, state["batch"] + 1 + len(recorded["again"]["steps"]))
            groups = [group for n in numbers for group in (await draw.batch(number=n)).groups]
            policy = await client.policy().status()
    assert (len(recorded["first"]["steps"]), len(recorded["again"]["steps"])) == (3, 2)
    assert recorded["first"]["calls"][-1] == 4, "it died after it had sent weights that no checkpoint has"
    assert (state["batch"], state["version"]) == (1, 3), "what two steps have certainly trained on"
    samples = [len(step["terms"]) for step in recorded["again"]["steps"]]
    assert sum(samples) == sum(len(group.rollouts) for group in groups) > 0
    for step in recorded["again"]["steps"]:
        assert step["loss"] == pytest.approx(step["plain_loss"], abs=1e-4)
    assert facts["acked"] > state["batch"], "the last checkpoint acknowledged more, whose traces are deleted"
    assert not any(rollout.traces for group in groups[:1] for rollout in group.rollouts)
    assert policy["version"] == 3 + 1 + 2, "the checkpoint's weights, then two steps"


async def test_a_trainer_killed_while_it_writes_weights_continues_from_any_checkpoint(probe: Probe, tmp_path: Path):
    async with served(tmp_path) as service:
        service.engine.script = every_second_one
        await probe.run("killed", service, tmp_path, expected=-SIGKILL)
        async with AsyncClient(service.url, service.token) as client:
            policy = await client.policy().status()
            assert (policy["state"], policy["version"]) == ("paused", 3), policy
            assert policy["lease_s"] == KILLED_LEASE_S
            acked = (await (await client.get_draw("trl-draw")).status())["acked"]
            state = json.loads((tmp_path / "out" / "checkpoint-1" / "rollyard.json").read_text())
            assert acked > state["batch"] == 0, "a later checkpoint has acknowledged more than this one"
            recorded = await probe.run("resumed", service, tmp_path)
            draw = await client.get_draw("trl-draw")
            batches = [await draw.batch(number=n + 1) for n in range(len(recorded["steps"]))]
            policy = await client.policy().status()
    assert (policy["state"], policy["version"]) == ("running", state["version"] + 1 + 3)
    assert len(recorded["steps"]) == 3
    samples = sum(len(step["terms"]) for step in recorded["steps"])
    assert samples == sum(len(group.rollouts) for batch in batches for group in batch.groups) == 3 * 2 * 4
    first = batches[0].groups
    assert {newest_of(group) for group in first if group.rollouts[0].traces} <= {state["version"] + 1}


async def test_grpo_gets_a_rollout_for_each_prompt_in_order(probe: Probe, tmp_path: Path):
    async with served(tmp_path) as service:
        service.engine.script = every_second_one
        recorded = await probe.run("sync", service, tmp_path)
        async with AsyncClient(service.url, service.token) as client:
            for batch in recorded["batches"]:
                for place, id in enumerate(batch["rollyard_rollout"]):
                    record, (trace,) = await client.get(id), await client.traces(id)
                    number = batch["prompts"][place].removeprefix("task ")
                    assert record.task["data"]["instruction"] == f"Write done, number {number}."
                    row = {name: batch[name][place] for name in ("prompt_ids", "completion_ids", "env_mask")}
                    assert row["prompt_ids"] + row["completion_ids"] == trace.token_ids.tolist()
                    assert [0] * len(row["prompt_ids"]) + row["env_mask"] == trace.mask.tolist()
                    assert batch["rollyard_reward"][place] == record.reward
    assert recorded["pushed"] == [0, 1], "weights are sent before each step's rollouts"
    for batch in recorded["batches"]:
        rows = {tuple(ids): mask for ids, mask in zip(batch["completion_ids"], batch["env_mask"], strict=True)}
        for taken in batch["loss"]:
            assert math.isfinite(taken["loss"])
            for ids, is_there, mask in zip(
                taken["completion_ids"], taken["completion_mask"], taken["tool_mask"], strict=True
            ):
                size = sum(is_there)
                assert mask[:size] == rows[tuple(ids[:size])]
            assert {round(value, 1) for value in taken["advantages"]} == {-0.9, 0.9}
