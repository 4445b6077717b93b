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
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.agents.session import SessionAgent
from rollyard.catalog import Catalog
from rollyard.core import RollyardError
from rollyard.engines.base import EngineSpec
from rollyard.engines.routing.router import Router, RouterSettings
from rollyard.envs.registry import Environments
from rollyard.fleet.head import FleetHead
from rollyard.fleet.nodes import FleetSettings
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NoTracer, Tracer, open_tracer
from rollyard.pipeline import LocalExecutor, Pipeline, Renderers, StageResources
from rollyard.sampling.sampler import Sampler
from rollyard.service.app_state import AppState
from rollyard.service.engine_address import check_reachable
from rollyard.service.history import History
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
from rollyard.service.prometheus import snapshot
from rollyard.service.schemas.body import check_body
from rollyard.service.schemas.engine import EngineBody
from rollyard.service.security.bounds import end_all
from rollyard.service.security.keys import load_keys
from rollyard.service.security.logins import Logins
from rollyard.service.security.quotas import CreationQuotas
from rollyard.service.security.tokens import Tokens, load_tokens
from rollyard.service.settings import EngineSettings, Settings, SettingsError
from rollyard.service.stored_engines import StoredEngines
from rollyard.service.tasks import checked_task
from rollyard.store import open_store
from rollyard.store.base import Store, StoreUnusable
from rollyard.tokens.files import delete_drafts

log = logging.getLogger("rollyard.service")

ENGINES_S = 3.0  # engines get this long to respond before the service is ready; slower ones are added later

STORED_EVERY_S = 5.0  # interval at which the stored bytes of tokens with such a quota are measured


@asynccontextmanager
async def open_app(
    settings: Settings, *, environments: Environments | None = None, agents: Agents | None = None
) -> AsyncGenerator[AppState, None]:
    """A whole service except its socket. The registries can be passed, for environments that are not installed."""
    raise_descriptor_limit()
    open_data_dir(settings.data_dir)
    tokens = load_tokens(settings)
    keys = load_keys(settings.data_dir)
    agents = agents or Agents(installs=AgentInstalls(settings.data_dir / AGENTS))
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
        delete_drafts(settings.data_dir / TOKENIZERS)
        renderers = Renderers(cache=settings.data_dir / TOKENIZERS)
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
        catalog = await stack.enter_async_context(
            Catalog(settings.data_dir, store, is_busy=lambda: bool(pipeline.live))
        )
        pipeline.on_end.append(catalog.wake)
        pipeline.on_deleted.append(lambda run: catalog.forget_run(run.id))
        history = await stack.enter_async_context(History(pipeline, router))
        app_state = AppState(
            settings=settings,
            tokens=tokens,
            logins=Logins(tokens, lifetime_s=settings.login_s, records=await store.logins()),
            store=store,
            router=router,
            engines=StoredEngines(router, store, metrics),
            resources=resources,
            pipeline=pipeline,
            sampler=sampler,
            catalog=catalog,
            history=history,
            quotas=CreationQuotas(pipeline, sampler, max_runs=settings.max_runs, max_draws=settings.max_draws),
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

    async def update() -> None:
        limits = {one.id: most for one in tokens.created if (most := one.quota.stored_bytes) is not None}
        runs = {run.id: run.owner for run in pipeline.runs if run.owner in limits}
        used = Counter[str]()
        for run_id, size in (await store.stored_bytes(list(runs))).items() if runs else ():
            used[runs[run_id]] += size
        pipeline.overfull = {owner for owner, size in used.items() if size >= limits[owner]}

    async def watch() -> None:
        while True:
            try:
                await update()
            except StoreUnusable:
                return
            await asyncio.sleep(STORED_EVERY_S)

    watching = asyncio.create_task(watch(), name="stored quotas")
    try:
        yield
    finally:
        await end_all(watching)


def make_pipeline(
    store: Store, resources: StageResources, settings: Settings, *, metrics: Metrics, tracer: Tracer
) -> Pipeline:
    """A pipeline that runs rollouts here, or leases them to nodes."""
    sizes = pipeline_settings(settings)
    if settings.fleet is None:
        return Pipeline(store, resources, sizes, LocalExecutor, metrics=metrics, tracer=tracer)
    fleet = FleetSettings(lease_s=settings.node_lease_s, hold_s=settings.node_hold_s)
    head = partial(FleetHead, settings=fleet)
    return Pipeline(store, resources, sizes, head, metrics=metrics, tracer=tracer)


def _sessions(agents: Agents) -> SessionAgent:
    agent = agents.get(SessionAgent.name)
    if not isinstance(agent, SessionAgent):
        raise SettingsError(f"an installed package uses the agent name {SessionAgent.name!r}, which is reserved")
    return agent


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
        return
    for text in status.info.notes:
        log.info("an engine lacks a feature", extra={"engine": spec.id, "detail": text})


def all_engines(settings: Settings, remembered: Iterable[EngineSpec]) -> list[EngineSpec]:
    """The stored and the configured engines. For an id that is in both, the configured one."""
    specs = {spec.id: spec for spec in remembered}
    specs |= {spec.id: spec for spec in map(engine_spec, settings.engines)}
    return list(specs.values())
