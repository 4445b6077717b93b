"""Composition of a fleet's node: stage resources of this machine, a pipeline over a ledger, and the head connection.

A node is configured only with the address of its head; the head's settings decide how rollouts run
(`node_settings.py`). The data folder is the node's own, and is cleaned up at start, as a service's is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.engines.routing.follower_router import FollowerRouter
from rollyard.engines.routing.router import RouterSettings
from rollyard.envs.registry import Environments
from rollyard.fleet.head_connection import Head, HeadConnection, HeadUnreachable
from rollyard.fleet.ledger import NodeLedger
from rollyard.fleet.node import FIRST_RETRY_S, LAST_RETRY_S, Node, as_store
from rollyard.fleet.tokenizer_files import TokenizerFetcher
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NoTracer, open_tracer
from rollyard.pipeline import ArtifactFolder, LocalExecutor, Pipeline, Renderers
from rollyard.service.machine import (
    AGENTS,
    TOKENIZERS,
    all_environments,
    open_data_dir,
    open_stage_resources,
    pipeline_settings,
    raise_descriptor_limit,
    vet,
)
from rollyard.service.node_settings import node_settings
from rollyard.tokens.files import delete_drafts

log = logging.getLogger("rollyard.fleet")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The local options of a node. Sizes that are None are taken from the head. `head` returns URL and token and is
    called before every request: a head that was restarted may be elsewhere."""

    name: str
    head_url: str
    token: str
    data_dir: Path
    init_slots: int | None = None
    run_slots: int | None = None
    eval_slots: int | None = None
    ready_slots: int | None = None
    head: Head | None = None
    plain_http: bool = False  # is accepted beyond loopback too

    @property
    def sizes(self) -> dict[str, int]:
        named = {name: getattr(self, name) for name in ("init_slots", "run_slots", "eval_slots", "ready_slots")}
        return {name: size for name, size in named.items() if size is not None}


async def run_node(
    options: NodeOptions,
    stop: asyncio.Event,
    *,
    environments: Environments | None = None,
    agents: Agents | None = None,
    on_joined: Callable[[], None] = lambda: None,
    hurry: asyncio.Event | None = None,
) -> None:
    """Runs until `stop` is set, then drains; `hurry` ends the drain. Raises `NodeRefused` if the head refuses the node,
    and `SettingsError` if the head's settings cannot be used on this machine."""
    raise_descriptor_limit()
    head = options.head or (lambda: (options.head_url, options.token))
    may_be_clear = options.plain_http
    async with HeadConnection(head, may_be_clear=may_be_clear) as link:
        taken_over = await _ask_settings(link, stop)
    if taken_over is None:
        return
    settings = node_settings(taken_over, options.data_dir, options.sizes)
    open_data_dir(settings.data_dir)
    _scrub()
    async with AsyncExitStack() as stack:
        environments = await stack.enter_async_context(environments or all_environments(settings))
        agents = agents or Agents(installs=AgentInstalls(settings.data_dir / AGENTS))
        tracer = open_tracer(settings.otlp_endpoint) if settings.otlp_endpoint else NoTracer()
        stack.push_async_callback(tracer.close)
        link = await stack.enter_async_context(HeadConnection(head, may_be_clear=may_be_clear))
        tokenizers = TokenizerFetcher(link, settings.data_dir / TOKENIZERS)
        delete_drafts(settings.data_dir / TOKENIZERS)
        renderers = Renderers(tokenizers, cache=settings.data_dir / TOKENIZERS)
        router = await stack.enter_async_context(
            FollowerRouter(
                RouterSettings(engine_wait_s=settings.engine_wait_s, watch_s=settings.health_s),
                vet=lambda engine: vet(engine, renderers),
            )
        )
        resources, _ = await stack.enter_async_context(
            open_stage_resources(settings, router, environments, agents, renderers)
        )
        artifacts = ArtifactFolder(settings.data_dir / "artifacts")
        await artifacts.clear()  # of a killed process: the head has leased its rollouts to other nodes
        ledger = NodeLedger(artifacts, on_news=lambda: node.news())
        sizes = replace(pipeline_settings(settings), node=options.name)
        pipeline = Pipeline(as_store(ledger), resources, sizes, LocalExecutor, metrics=Metrics(), tracer=tracer)
        node = Node(options.name, link, pipeline, ledger, router)
        pipeline.on_room.append(node.room)
        node.on_joined = on_joined
        await stack.enter_async_context(pipeline)
        await node.main(stop, hurry)


async def _ask_settings(link: HeadConnection, stop: asyncio.Event) -> dict[str, Any] | None:
    """Retries until the head responds. Returns None if `stop` is set first."""
    retry_s = FIRST_RETRY_S
    while not stop.is_set():
        try:
            return await link.settings()
        except HeadUnreachable as error:
            log.info("the head is unreachable", extra={"why": str(error)})
        try:
            await asyncio.wait_for(stop.wait(), retry_s)
        except TimeoutError:
            retry_s = min(2 * retry_s, LAST_RETRY_S)
    return None


def _scrub() -> None:
    """Removes a batch system's variables, which must not reach sandboxes: a leaked one can tear down the job."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI_", "PMIX_"))]:
        del os.environ[name]
