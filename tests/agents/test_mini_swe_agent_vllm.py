"""mini-SWE-agent on the real vLLM: real sampling, real logprobs, several turns, one exact trace.

The model is too small to write a tool call by itself, so the engine is restricted to certain calls
(`structured_outputs`, an option of vLLM that a task sets in `sampling.extra`); it samples which of them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.agents.registry import Agents
from rollyard.core import Json, Outcome, Sampling
from rollyard.engines import EngineSpec, Kind
from rollyard.tokens import verify
from tests.agents.harness_parts import call, greeting_task, installed, pythons
from tests.pipeline.site import open_site, says
from tests.pipeline.test_real_vllm import overheard

NAME = "mini-swe-agent"
TURNS = 3
COMMANDS = ("cat greeting.txt", "ls -l", "sed -i s/wrold/world/ greeting.txt")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def agents() -> Agents:
    return Agents(installs=installed(NAME))


async def test_tokens_sampled_by_vllm_for_the_program_are_one_verified_trace(
    tmp_path: Path, vllm_url: str, vllm_model: Path, agents: Agents
):
    choices: list[Json] = [call("bash", command=command) for command in COMMANDS]
    sampling = Sampling(temperature=0.8, max_tokens=200, extra={"structured_outputs": {"choice": choices}})
    task = replace(greeting_task(NAME, run_s=300, model_s=200, max_turns=TURNS), sampling=sampling)
    async with (
        overheard(vllm_url) as (url, prompts),
        open_site(tmp_path, says("ok"), agents=agents, pythons=pythons()) as site,
    ):
        await site.router.remove("e0")
        await site.router.add(EngineSpec("real", url, Kind.VLLM, tokenizer=str(vllm_model)))
        rollout = await site.rolled(task, within_s=350)
        trajectory = await site.store.trajectory(rollout.id)
        await site.idle()
        site.nothing_left()
    ending = rollout.ending
    assert ending is not None and trajectory is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.code) == (Outcome.TRUNCATED, "turn_limit"), ending
    assert ending.score is not None  # EVAL ran, whatever the model did
    verify(trajectory)
    (trace,) = trajectory.traces
    assert len(trace.spans) == trajectory.turns == TURNS
    assert prompts == [list(trace.token_ids[: span.start]) for span in trace.spans]
    assert (trace.is_trainable, trace.logprobs_kind) == (True, "processed")
    assert all(span.cached_tokens for span in trace.spans[1:]), "from the second turn on the prefix is cached"
