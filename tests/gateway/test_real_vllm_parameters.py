"""Granted parameters on the real vLLM: a call by grammar, the likeliest tokens."""

from typing import Any

import orjson
import pytest

from rollyard.core import AgentSpec, Deadline, Limits, Run, Sampling, Task
from rollyard.engines import EngineSpec, Kind, Router
from rollyard.gateway import open_gateway
from rollyard.gateway.app import CHAT
from rollyard.pipeline import Renderers
from tests.real_vllm import model_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("ls", "cat")
]


async def test_a_forced_call_and_the_likeliest_tokens(vllm_url: str, vllm_folder: Any):
    task = Task(
        "shell",
        agent=AgentSpec(options={"structured_output": True}),
        sampling=Sampling(max_tokens=64),
        limits=Limits(run_s=200),
    )
    async with Router() as router:
        spec = EngineSpec("e", vllm_url, Kind.VLLM, tokenizer=str(model_of(vllm_folder)))
        await router.add(spec)
        async with router.session("default", "s") as engine_session:
            session = await open_gateway(
                engine_session, Renderers().of, task=task, run=Run("r"), rollout_id="s", clock=Deadline(200)
            )
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "logprobs": True}
            for extra in ({"tool_choice": "required"}, {"top_logprobs": 3}):
                request, key, weight, _ = await session.read(CHAT, orjson.dumps({**body, **extra}))
                listener = await session.open(CHAT, request, key, weight=weight)
                reply = await listener.reply()
                listener.delivered()
                assert reply.logprobs is not None
                written = "".join(it.token for it in reply.logprobs)
                if "tool_choice" in extra:
                    assert not any("refuses" in warning for warning in reply.warnings), reply.warnings
                    assert written.startswith(
                        ('<tool_call>\n{"name": "ls", "arguments": {', '<tool_call>\n{"name": "cat", "arguments": {')
                    ), written
                else:
                    assert not reply.warnings and all(len(it.top) == 3 for it in reply.logprobs)
            await session.close()
            assert [trace.is_trainable for trace in session.traces()] == [False, True]
