"""The composition root: opens everything that a service needs, in order, and closes it in reverse.

The store is first (it holds the lock: a second service on the same data stops here). Then come the engines and the
stage resources, whose runtimes end what an earlier process left. The pipeline is last; it resumes the stored work, or
leases it to nodes.

Invariants. An engine that is unreachable at start is added as down and watched; no entry in the list of engines can
prevent the service from starting. If a part fails to open, the parts before it are closed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.agents.session import SessionAgent
from rollyard.core import RollyardError
from rollyard.core.failure import EngineFailure, TokenizerMismatch
from rollyard.engines.base import Engine, EngineSpec, Kind, Role
from rollyard.engines.routing.router import Router, RouterSettings
from rollyard.envs.registry import Environments
from rollyard.fleet.head import HeadPipeline
from rollyard.fleet.nodes import FleetSettings
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NoTracer, Tracer, open_tracer
from rollyard.pipeline import ArtifactFolder, Pipeline, PipelineSettings, Renderers, StageResources
from rollyard.sampling.sampler import Sampler
from rollyard.sandbox import Runtime
from rollyard.sandbox.egress import SystemResolver
from rollyard.sandbox.images import ImageStore
from rollyard.sandbox.layers import LayerCache
from rollyard.sandbox.python import PythonBuilds
from rollyard.service.app_state import AppState
from rollyard.service.bounds import end_all
from rollyard.service.engine_address import check_reachable
from rollyard.service.keys import load_keys
from rollyard.service.models import EngineBody, check_body
from rollyard.service.prometheus import snapshot
from rollyard.service.runtimes import make_runtime
from rollyard.service.settings import EngineSettings, Settings, SettingsError
from rollyard.service.tasks import checked_task
from rollyard.service.tokens import Tokens, load_tokens
from rollyard.store import open_store
from rollyard.store.base import Store, StoreUnusable
from rollyard.tools.mcp import OutsideServer

log = logging.getLogger("rollyard.service")

IMAGES = "images"  # below data_dir: the store that `rollyard images` fills
AGENTS = "agents"  # below data_dir: the operator's presets, and the programs that `rollyard agents install` installed

MOST_DESCRIPTORS = 1 << 20  # some hosts allow a billion, and some programs close them one by one

ENGINES_S = 3.0  # engines get this long to respond before the service is ready; slower ones are added later

STORED_EVERY_S = 5.0  # interval at which the stored bytes of tokens with such a quota are measured

PROBE_S = 30.0  # for a runtime's probe at start; a slower host is reported, and the start continues


@asynccontextmanager
async def open_app(
    settings: Settings, *, environments: Environments | None = None, agents: Agents | None = None
) -> AsyncGenerator[AppState, None]:
    """A whole service except its socket. The registries can be passed, for environments that are not installed."""
    raise_descriptor_limit()
    open_data_dir(settings.data_dir)
    tokens = load_tokens(settings)
    keys = load_keys(settings.data_dir)
    agents = agents or Agents(shelf=AgentInstalls(settings.data_dir / AGENTS))
    async with AsyncExitStack() as stack:
        environments = await stack.enter_async_context(environments or all_environments(settings))
        metrics = Metrics()
        tracer = open_tracer(settings.otlp_endpoint) if settings.otlp_endpoint else NoTracer()
        stack.push_async_callback(tracer.close)
        store = await stack.enter_async_context(
            await open_store(
                settings.store_place,
                max_attempts=settings.max_attempts,
                can_reevaluate=lambda name: name in environments.names,
                on_commit=metrics.store_commit,
                keeps_leases=settings.fleet is not None,
            )
        )
        for record in await store.tokens():
            tokens.put(record)
        renderers = Renderers()
        router = await stack.enter_async_context(
            Router(
                RouterSettings(engine_wait_s=settings.engine_wait_s, watch_s=settings.health_s),
                vet=lambda engine: vet(engine, renderers),
            )
        )
        router.policies.restore(await store.policies())
        router.policies.save = store.put_policy
        specs = all_engines(settings, await store.engines())
        refused = await stack.enter_async_context(_engines(router, specs, settings))
        resources, probes = await stack.enter_async_context(
            open_stage_resources(settings, router, environments, agents, renderers)
        )
        pipeline = make_pipeline(store, resources, settings, metrics=metrics, tracer=tracer)
        pipeline.quota_of = tokens.quota_of
        await stack.enter_async_context(pipeline)
        await stack.enter_async_context(_stored_quotas(store, pipeline, tokens))
        sampler = await stack.enter_async_context(
            Sampler(
                pipeline,
                make_task=lambda raw, run: checked_task(resources, raw, run),
                folders=settings.task_folder_paths,
            )
        )
        app_state = AppState(
            settings=settings,
            tokens=tokens,
            store=store,
            router=router,
            resources=resources,
            pipeline=pipeline,
            sampler=sampler,
            keys=keys,
            sessions=_sessions(agents),
            runtimes=probes,
            refused_engines=refused,
            owners=dict(await store.owners()),
        )
        metrics.watch(lambda: snapshot(pipeline, router))
        try:
            yield app_state
        finally:
            app_state.closing.set()


@asynccontextmanager
async def _stored_quotas(store: Store, pipeline: Pipeline, tokens: Tokens) -> AsyncGenerator[None, None]:
    """Maintains the pipeline's set of owners that have reached their quota of stored bytes."""

    async def look() -> None:
        limits = {one.id: most for one in tokens.created if (most := one.quota.stored_bytes) is not None}
        runs = {run.id: run.owner for run in pipeline.runs if run.owner in limits}
        used = Counter[str]()
        for run_id, size in (await store.stored_bytes(list(runs))).items() if runs else ():
            used[runs[run_id]] += size
        pipeline.overfull = {owner for owner, size in used.items() if size >= limits[owner]}

    async def watch() -> None:
        while True:
            try:
                await look()
            except StoreUnusable:
                return
            await asyncio.sleep(STORED_EVERY_S)

    watching = asyncio.create_task(watch(), name="stored quotas")
    try:
        yield
    finally:
        await end_all(watching)


@asynccontextmanager
async def open_stage_resources(
    settings: Settings, router: Router, environments: Environments, agents: Agents, renderers: Renderers
) -> AsyncGenerator[tuple[StageResources, dict[str, Mapping[str, str]]], None]:
    """The resources of the stages on this machine, a head's or a node's, and the result of each runtime's probe."""
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


def make_pipeline(
    store: Store, resources: StageResources, settings: Settings, *, metrics: Metrics, tracer: Tracer
) -> Pipeline:
    """A pipeline that runs rollouts here, or leases them to nodes."""
    sizes = pipeline_settings(settings)
    if settings.fleet is None:
        return Pipeline(store, resources, sizes, metrics=metrics, tracer=tracer)
    fleet = FleetSettings(lease_s=settings.node_lease_s, hold_s=settings.node_hold_s)
    return HeadPipeline(store, resources, sizes, fleet, metrics=metrics, tracer=tracer)


def raise_descriptor_limit() -> None:
    """Raises the soft limit: a sandbox needs about five descriptors, so the usual 1024 suffice for 200 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_data_dir(path: Path) -> None:
    """Creates the folder, accessible to this user only: it holds prompts, tokens and keys."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"data_dir {path} cannot be used: {error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingsError(f"data_dir {path} cannot be written to")


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


def _sessions(agents: Agents) -> SessionAgent:
    agent = agents.get(SessionAgent.name)
    if not isinstance(agent, SessionAgent):
        raise SettingsError(f"an installed package uses the agent name {SessionAgent.name!r}, which is reserved")
    return agent


async def _probe(name: str, runtime: Runtime) -> Mapping[str, str]:
    try:
        async with asyncio.timeout(PROBE_S):
            found = await runtime.probe()
    except TimeoutError:
        found = {"probe": f"not finished within {PROBE_S:g} s"}
    for feature, state in found.items():
        if state != "ok":
            log.warning("a runtime lacks a feature", extra={"runtime": name, "feature": feature, "state": state})
    return found


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
    """The installed environments, with the operator's settings applied."""
    if not settings.gym_servers:
        return Environments()
    from rollyard.envs.gym import GymEnvironment

    return Environments({"gym": GymEnvironment(settings.gym_servers)})


def mcp_servers(settings: Settings) -> dict[str, OutsideServer]:
    return {
        name: OutsideServer(it.url, {header: value.get_secret_value() for header, value in it.headers.items()})
        for name, it in settings.mcp_servers.items()
    }


def engine_spec(engine: EngineSettings) -> EngineSpec:
    raw = engine.model_dump(exclude={"api_key"})
    raw["api_key"] = engine.api_key.get_secret_value()
    raw["id"] = engine.id or None
    return check_body(raw, EngineBody).to_spec()


@asynccontextmanager
async def _engines(
    router: Router, specs: Iterable[EngineSpec], settings: Settings
) -> AsyncGenerator[dict[str, str], None]:
    """Adds all engines concurrently and waits up to `ENGINES_S`: one that does not respond must not delay the start.

    Yields the engines that were refused, and why.
    """
    refused: dict[str, str] = {}
    adding = [
        asyncio.create_task(_add_engine(router, spec, settings, refused), name=f"add {spec.id}") for spec in specs
    ]
    try:
        if adding:
            await asyncio.wait(adding, timeout=ENGINES_S)
        yield refused
    finally:
        await end_all(*adding)


async def _add_engine(router: Router, spec: EngineSpec, settings: Settings, refused: dict[str, str]) -> None:
    try:
        check_reachable(spec, settings)
        status = await router.add(spec, must_answer=False)
    except RollyardError as error:
        refused[spec.id] = error.detail
        log.error("an engine was refused", extra={"engine": spec.id, "code": error.code, "detail": error.detail})
        return
    if status.info is None:
        log.warning("an engine is down", extra={"engine": spec.id, "detail": status.stats.last_error})


def all_engines(settings: Settings, remembered: Iterable[EngineSpec]) -> list[EngineSpec]:
    """The stored and the configured engines. For an id that is in both, the configured one."""
    specs = {spec.id: spec for spec in remembered}
    specs |= {spec.id: spec for spec in map(engine_spec, settings.engines)}
    return list(specs.values())
