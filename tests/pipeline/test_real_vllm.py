"""A multi-turn rollout on the real vLLM: the engine's prompts equal the trace, token for token."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest
from aiohttp import web

from rollyard import Handler
from rollyard.agents.base import AgentContext
from rollyard.core import Outcome, Sampling, Score, Task
from rollyard.engines import EngineSpec, Kind
from rollyard.envs import EnvContext, Environments, Evidence, Start
from rollyard.tokens import verify
from tests.pipeline.site import open_site, says

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

TURNS = 3


class Chatter(Handler):
    """The model is too weak to act: whatever it writes, it gets what a real command printed, three times."""

    name = "chatter"
    tools = ("shell",)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "system", "content": "You are terse. " * 40}, {"role": "user", "content": "Begin."}))

    async def run(self, context: AgentContext, messages: object) -> str:
        new = list(messages)  # type: ignore[call-overload]
        for turn in range(TURNS):
            await context.conversation.turn(new, (), max_tokens=12)
            result = await context.tools["shell"].call({"command": f"echo turn {turn}; ls /"}, timeout_s=10)
            new = [{"role": "user", "content": result.content}]
        return "stop"

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float(evidence.trajectory.turns))


@asynccontextmanager
async def overheard(upstream: str) -> AsyncGenerator[tuple[str, list[list[int]]], None]:
    """A pass-through in front of an engine that records the prompts sent to it."""
    prompts: list[list[int]] = []

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        if request.path.endswith("/generate") and request.headers.get("X-Session-ID"):
            prompts.append(orjson.loads(body)["token_ids"])
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in ("host", "content-length")
        }
        async with session.request(request.method, upstream + request.path_qs, data=body, headers=headers) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        place = web.TCPSite(runner, "127.0.0.1", 0)
        await place.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", prompts
        finally:
            await runner.cleanup()


async def test_every_prompt_equals_the_trace_and_later_turns_find_their_prefix_cached(
    tmp_path: Path, vllm_url: str, vllm_model: Path
):
    environments = Environments({"chatter": Chatter()})
    async with (
        overheard(vllm_url) as (url, prompts),
        open_site(tmp_path, says("ok"), environments=environments) as site,
    ):
        await site.router.remove("e0")
        await site.router.add(EngineSpec("real", url, Kind.VLLM, tokenizer=str(vllm_model)))
        await site.pipeline.resources.renderers.check(site.router.engine("real"))
        task = Task("chatter", sampling=Sampling(temperature=0.8, max_tokens=12))
        rollout = await site.rolled(task, within_s=200)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        verify(trajectory)
        (trace,) = trajectory.traces
        assert trace.logprobs_kind == "processed"
        assert len(trace.spans) == TURNS
        assert prompts == [list(trace.token_ids[: span.start]) for span in trace.spans]
        assert trace.spans[0].cached_tokens is not None
        assert all(span.cached_tokens for span in trace.spans[1:]), "from the second turn on the prefix is cached"
        site.nothing_left()
