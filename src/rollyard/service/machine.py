"""Opens the stages' resources on this machine, for a service and for a node of a fleet.

It does not import the HTTP API: a node has none, and starts faster without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollyard.agents.registry import Agents
from rollyard.core import RollyardError
from rollyard.core.failure import EngineFailure, TokenizerMismatch
from rollyard.engines.base import Engine, Kind, Role
from rollyard.engines.routing.router import Router
from rollyard.envs.registry import Environments, entry_point
from rollyard.pipeline import ArtifactFolder, PipelineSettings, Renderers, StageResources
from rollyard.sandbox import Runtime
from rollyard.sandbox.egress import SystemResolver
from rollyard.sandbox.images import ImageStore
from rollyard.sandbox.layers import LayerCache
from rollyard.sandbox.python import PythonBuilds
from rollyard.service.runtimes import make_runtime
from rollyard.service.settings import Settings, SettingsError
from rollyard.tools.mcp.sources import OutsideServer

log = logging.getLogger("rollyard.service")

IMAGES = "images"  # below data_dir: the store that `rollyard images` fills
TOKENIZERS = "tokenizers"  # below data_dir: tokenizers received from engines, or on a node from its head
AGENTS = "agents"  # below data_dir: the operator's presets, and the programs that `rollyard agents install` installed

DATA_DIR = "give a folder that you can write to with --data-dir or ROLLYARD_DATA_DIR"

MOST_DESCRIPTORS = 1 << 20  # some hosts allow a billion, and some programs close them one by one

PROBE_S = 30.0  # for a runtime's probe at start; a slower host is reported, and the start continues


@asynccontextmanager
async def open_stage_resources(
    settings: Settings, router: Router, environments: Environments, agents: Agents, renderers: Renderers
) -> AsyncGenerator[tuple[StageResources, dict[str, Mapping[str, str]]], None]:
    """The resources of the stages on this machine, a head's or a node's, and the result of each runtime's probe."""
    _load_plugins(environments, agents)
    async with AsyncExitStack() as stack:
        runtimes: dict[str, Runtime] = {}
        for name in settings.runtimes:
            runtimes[name] = await stack.enter_async_context(make_runtime(name, settings))
        layers = {
            name: await stack.enter_async_context(
                LayerCache(runtime.layer_root, settings.layer_bytes, remove=runtime.remove)
            )
            for name, runtime in runtimes.items()
        }
        probes = {name: await _probe(name, runtime) for name, runtime in runtimes.items()}
        resolver = SystemResolver()
        stack.callback(resolver.close)
        resources = StageResources(
            runtimes=runtimes,
            default_runtime=settings.runtime,
            router=router,
            environments=environments,
            agents=agents,
            renderers=renderers,
            artifacts=ArtifactFolder(settings.data_dir / "artifacts"),
            image_folders=settings.image_folders,
            images=ImageStore(settings.data_dir / IMAGES),
            layers=layers,
            pythons=PythonBuilds(settings.data_dir / "python"),
            mcp_servers=mcp_servers(settings),
            ceilings=settings.ceilings,
            egress=settings.egress,
            resolve_name=resolver,
        )
        yield resources, probes


def _load_plugins(environments: Environments, agents: Agents) -> None:
    """Imports the environments and agents of other packages before any call is served: an import takes seconds, and
    one that fails is reported now, not at the first submit."""
    for name, why in environments.load_all().items():
        log.error("an environment cannot be loaded", extra={"environment": name, "detail": why})
    for name, why in agents.load_all().items():
        log.error("an agent cannot be loaded", extra={"agent": name, "detail": why})


def raise_descriptor_limit() -> None:
    """Raises the soft limit: a sandbox needs about five descriptors, so the usual 1024 suffice for 200 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def open_data_dir(path: Path) -> None:
    """Creates the folder, accessible to this user only: it holds prompts, tokens and keys."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"data_dir {path} cannot be used: {error.strerror}", DATA_DIR) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingsError(f"data_dir {path} cannot be written to", DATA_DIR)


def pipeline_settings(settings: Settings) -> PipelineSettings:
    return PipelineSettings(
        init_slots=settings.init_slots,
        run_slots=settings.run_slots,
        eval_slots=settings.eval_slots,
        ready_slots=settings.ready_slots,
        max_live=settings.max_live,
        max_queued=settings.max_queued,
        max_attempts=settings.max_attempts,
        eval_attempts=settings.eval_attempts,
        drain_s=settings.drain_s,
        retain_s=settings.retain_s,
    )


async def _probe(name: str, runtime: Runtime) -> Mapping[str, str]:
    try:
        async with asyncio.timeout(PROBE_S):
            features = await runtime.probe()
    except TimeoutError:
        features = {"probe": f"not finished within {PROBE_S:g} s"}
    for feature, state in features.items():
        if state != "ok":
            log.warning("a runtime lacks a feature", extra={"runtime": name, "feature": feature, "state": state})
    return features


async def vet(engine: Engine, renderers: Renderers) -> bool:
    """Raises `TokenizerMismatch` if the tokens cannot be reproduced exactly. Returns False if that is unverified."""
    if engine.spec.role is not Role.POLICY or engine.spec.kind is Kind.OPENAI:
        return True
    try:
        is_verified = await renderers.check(engine)
    except EngineFailure:
        raise
    except Exception as error:  # a tokenizer's files can make their reader raise anything
        why = error.detail if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}"
        raise TokenizerMismatch(f"engine {engine.spec.id}: its tokenizer cannot be used: {why}") from error
    if not is_verified:
        is_trusted = engine.spec.trust_tokenizer
        log.warning("an engine's tokenizer is not verified", extra={"engine": engine.spec.id, "is_trusted": is_trusted})
    return is_verified


def all_environments(settings: Settings) -> Environments:
    """The installed environments and those of the settings, with the operator's settings applied."""
    try:
        points = [entry_point(name, place) for name, place in settings.environments.items()]
    except FileNotFoundError as error:
        raise SettingsError(f"environments: {error}") from error
    if not settings.gym_servers:
        return Environments(points=points)
    from rollyard.envs.gym import GymEnvironment

    return Environments({"gym": GymEnvironment(settings.gym_servers)}, points=points)


def mcp_servers(settings: Settings) -> dict[str, OutsideServer]:
    return {
        name: OutsideServer(it.url, {header: value.get_secret_value() for header, value in it.headers.items()})
        for name, it in settings.mcp_servers.items()
    }
