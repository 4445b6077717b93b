"""A whole pipeline of real parts in this process: SQLite, bubblewrap, a scripted engine over HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollyard.agents.registry import Agents
from rollyard.core import Json, Limits, Rollout, Run, State, Task, new_id
from rollyard.core.egress import EgressCeiling
from rollyard.engines import EngineSpec, Kind, Router, RouterSettings
from rollyard.envs.registry import Environments
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NoTracer, Tracer
from rollyard.pipeline import ArtifactFolder, LocalExecutor, Pipeline, PipelineSettings, Renderers, StageResources
from rollyard.sandbox.egress import Resolve, SystemResolver
from rollyard.sandbox.layers import LayerCache
from rollyard.sandbox.python import PythonBuilds
from rollyard.sandbox.runtimes.apptainer import ApptainerRuntime
from rollyard.sandbox.runtimes.bubblewrap import BubblewrapRuntime
from rollyard.store import SqliteStore, Submission
from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tools.mcp.sources import OutsideServer

SETTINGS = PipelineSettings(
    init_slots=4, run_slots=8, eval_slots=4, ready_slots=4, tick_s=0.05, drain_s=10.0, max_attempts=3
)


def says(*turns: Reply | str) -> Rules:
    """A script for `shell_task`; any other request (the probe of an engine) is answered "ok"."""
    return Rules(rules=(("do it", tuple(Reply(turn) if isinstance(turn, str) else turn for turn in turns)),))


def shell(command: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "shell", "arguments": {"command": command}}) + "\n</tool_call>"


def finish(answer: str | None = None) -> str:
    arguments = {} if answer is None else {"answer": answer}
    return "<tool_call>\n" + json.dumps({"name": "finish", "arguments": arguments}) + "\n</tool_call>"


def shell_task(instruction: str = "do it", checks: Sequence[Json] = ("test -f done",), **data: Json) -> Task:
    return Task(
        "shell",
        {"instruction": instruction, "checks": list(checks), **data},
        limits=Limits(init_s=20, run_s=20, eval_s=20, tool_s=10, model_s=10, max_turns=8),
    )


@dataclass
class Site:
    """What a test drives and inspects."""

    pipeline: Pipeline
    store: SqliteStore
    router: Router
    engines: list[ScriptedEngine]
    runtime: BubblewrapRuntime | ApptainerRuntime
    run: Run
    notes: dict[str, Any] = field(default_factory=dict)

    async def submit(self, task: Task, rollout_id: str | None = None, **fields: Any) -> str:
        rollout = Rollout(rollout_id or new_id("ro"), fields.pop("run", self.run.id), task, **fields)
        (stored,) = await self.pipeline.submit([Submission(rollout, {"id": rollout.id})])
        return stored.id

    async def rolled(self, task: Task, within_s: float = 90.0, **fields: Any) -> Rollout:
        """Submits a task and waits for its end."""
        return await self.ended(await self.submit(task, **fields), within_s)

    async def ended(self, rollout_id: str, within_s: float = 90.0) -> Rollout:
        """Returns the rollout when its end is stored and its attempt, which releases what it held only then, is
        done."""
        rollout = await self.pipeline.wait(rollout_id, within_s)
        assert rollout.state is State.ENDED, f"still {rollout.state} after {within_s} s"
        async with asyncio.timeout(90):
            while rollout_id in self.pipeline.live:
                await asyncio.sleep(0.001)
        return rollout

    async def until(self, rollout_id: str, state: State, *, attempt: int = 1, within_s: float = 60.0) -> None:
        """Waits for a state of an attempt, by events."""
        async with asyncio.timeout(within_s):
            events = self.pipeline.event_log.events("0-0")
            async for event in events:
                if (event.rollout, event.state, event.attempt) == (rollout_id, state, attempt):
                    return

    async def idle(self, within_s: float = 60.0) -> None:
        """Waits until no attempt is left, and none is being started."""
        async with asyncio.timeout(within_s):
            while self.pipeline.live or self.pipeline.starting:
                await asyncio.sleep(0.01)

    async def idle_run(self, within_s: float = 60.0) -> None:
        """Waits until what ended RUN has left its slot, and its sandbox is gone."""
        async with asyncio.timeout(within_s):
            while self.pipeline.run_pool.active:
                await asyncio.sleep(0.01)

    def nothing_left(self) -> None:
        """No live attempt, no slot, no engine session or call, no sandbox."""
        pipeline = self.pipeline
        assert not pipeline.live
        assert (pipeline.init_pool.active, pipeline.run_pool.active, pipeline.eval_pool.active, pipeline.ready) == (
            0,
            0,
            0,
            0,
        )
        for engine in self.router.list():
            assert (engine.stats.sessions, engine.stats.in_flight) == (0, 0)


@asynccontextmanager
async def open_site(
    folder: Path,
    script: Any,
    *,
    settings: PipelineSettings = SETTINGS,
    run: Run | None = None,
    engines: int = 1,
    environments: Environments | None = None,
    router_settings: RouterSettings | None = None,
    engine_options: Mapping[str, Any] | None = None,
    tracer: Tracer | None = None,
    mcp_servers: Mapping[str, OutsideServer] | None = None,
    layer_bytes: int = 1 << 30,
    kind: type[BubblewrapRuntime] | type[ApptainerRuntime] = BubblewrapRuntime,
    pythons: PythonBuilds | None = None,
    agents: Agents | None = None,
    egress: EgressCeiling | None = None,
    resolve: Resolve | None = None,
) -> AsyncGenerator[Site, None]:
    """Opens everything below `folder`; opening it again is a restart."""
    async with AsyncExitStack() as stack:
        played: list[ScriptedEngine] = []
        for _ in range(engines):
            engine = ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir()), **(engine_options or {}))
            played.append(await stack.enter_async_context(engine))
        store = await stack.enter_async_context(
            await SqliteStore.open(folder / "test.db", max_attempts=settings.max_attempts)
        )
        runtime = await stack.enter_async_context(kind(root=folder / "sandboxes"))
        layers = await stack.enter_async_context(LayerCache(runtime.layer_root, layer_bytes, remove=runtime.remove))
        router = await stack.enter_async_context(Router(router_settings or RouterSettings(engine_wait_s=5.0)))
        for number, engine in enumerate(played):
            await router.add(EngineSpec(f"e{number}", engine.url, Kind.VLLM, tokenizer=str(tokenizer_dir())))
        resources = StageResources(
            runtimes={kind.name: runtime},
            default_runtime=kind.name,
            router=router,
            environments=environments or await stack.enter_async_context(Environments()),
            agents=agents or Agents(),
            renderers=Renderers(),
            artifacts=ArtifactFolder(folder / "artifacts"),
            mcp_servers=mcp_servers or {},
            layers={kind.name: layers},
            pythons=pythons,
            egress=egress or EgressCeiling(),
            resolve_name=resolve or SystemResolver(),
        )
        run = run or Run("run")
        await store.put_run(run, {"id": run.id})
        pipeline = await stack.enter_async_context(
            Pipeline(store, resources, settings, LocalExecutor, metrics=Metrics(), tracer=tracer or NoTracer())
        )
        yield Site(pipeline, store, router, played, runtime, run)


async def new_run(site: Site, run: Run) -> None:
    site.pipeline.register_run(await site.store.put_run(run, {"id": run.id}))


def quick(task: Task, **limits: float) -> Task:
    return replace(task, limits=replace(task.limits, **limits))  # type: ignore[arg-type]
