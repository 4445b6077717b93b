"""Helpers for the tests of this package: a ChatML prompt, specs, and settings with short waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollyard.core import Deadline, Sampling
from rollyard.engines import EngineSpec, Generation, Kind, Role, Router, RouterSettings, make_engine
from rollyard.engines.base import Engine, Session
from rollyard.engines.clients.http import HttpPool
from rollyard.testing.script import ByteTokenizer
from rollyard.testing.scripted_engine import ScriptedEngine

TOKENIZER = ByteTokenizer()
END_ID = 257
PROMPT = TOKENIZER.encode("<|im_start|>user\nsay something<|im_end|>\n<|im_start|>assistant\n")

QUICK = RouterSettings(watch_s=0.02, backoff_s=0.001, engine_wait_s=20.0, abort_grace_s=10.0, probe_s=20.0)


def spec_of(server: ScriptedEngine, name: str = "e1", **fields: Any) -> EngineSpec:
    kind = Kind.SGLANG if server.dialect == "sglang" else Kind.VLLM
    return EngineSpec(name, server.url, **{"kind": kind, **fields})


async def probed(server: ScriptedEngine, http: HttpPool, **fields: Any) -> Engine:
    engine = make_engine(spec_of(server, **fields), http)
    await engine.probe()
    return engine


def judge_of(server: ScriptedEngine, name: str = "judge") -> EngineSpec:
    return EngineSpec(name, server.url, Kind.OPENAI, role=Role.JUDGE)


@asynccontextmanager
async def routed(*servers: ScriptedEngine, settings: RouterSettings = QUICK) -> AsyncGenerator[Router, None]:
    """A router over these servers, named e1, e2, …"""
    async with Router(settings) as router:
        for number, server in enumerate(servers, 1):
            await router.add(spec_of(server, f"e{number}"))
        yield router


async def complete(session: Session, clock: Deadline | None = None, **fields: Any) -> Generation:
    values: dict[str, Any] = {
        "sampling": Sampling(),
        "max_tokens": 100,
        "seed": 1,
        "stop_token_ids": (END_ID,),
        "clock": clock or Deadline(),
        "model_s": 30.0,
        **fields,
    }
    return await session.generate(PROMPT, **values)


def text_of(generation: Generation) -> str:
    return TOKENIZER.decode(generation.token_ids).removesuffix("<|im_end|>")


@asynccontextmanager
async def answering(raw: bytes | None) -> AsyncGenerator[str, None]:
    """A server that answers everything with these bytes, or (None) accepts and never answers."""
    silent = asyncio.Event()

    async def handle(_: web.BaseRequest) -> web.StreamResponse:
        if raw is None:
            await silent.wait()
        return web.Response(body=raw or b"", content_type="application/json")

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        silent.set()
        await runner.cleanup()
