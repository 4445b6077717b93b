"""A gateway of real parts in this process: a scripted engine over HTTP, a router, one session, served on loopback."""

import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rollyard.core import AgentSpec, Deadline, Json, Limits, Run, Sampling, Task, Trajectory
from rollyard.engines import EngineSpec, Kind, Router, RouterSettings
from rollyard.gateway import GatewayApp, GatewaySession, open_gateway
from rollyard.pipeline import Renderers
from rollyard.sandbox.doorway import Doorway, DoorwayLimits
from rollyard.testing import scripted_engine
from rollyard.testing.script import FolderTokenizer
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import verify

LIMITS = Limits(run_s=60.0, model_s=20.0, max_turns=50)


@dataclass
class Site:
    """The parts that a test uses. `url` is without /v1."""

    url: str
    session: GatewaySession
    engine: ScriptedEngine
    router: Router
    renderers: Renderers
    clock: Deadline
    beats: list[float] = field(default_factory=list)

    def verified(self) -> Trajectory:
        """Returns the trajectory so far, verified."""
        trajectory = Trajectory("ro-1", 1, traces=self.session.traces(), turns=self.session.turns)
        verify(trajectory)
        return trajectory

    @property
    def forks(self) -> Mapping[str, Json]:
        forks = self.session.info()["forks"]
        assert isinstance(forks, dict)
        return forks


def refuse(site: Site, name: str, *, after_calls: int = 0) -> None:
    """Makes the engine refuse the parameter, like one that does not support it, after so many calls."""
    known, calls = site.engine._check, 0

    def check(body: Any, prompt: Any) -> None:
        nonlocal calls
        known(body, prompt)
        calls += 1
        if name in body["sampling_params"] and calls > after_calls:
            raise scripted_engine._Refusal(f"{name} is not supported", 400)

    site.engine._check = check  # type: ignore[method-assign]


@cache
def engine_tokenizer(folder: Path) -> FolderTokenizer:
    """Loads a tokenizer once: a real one takes half a second."""
    return FolderTokenizer(folder)


@asynccontextmanager
async def gateway(
    script: Any = None,
    *,
    tokenizer: Path | None = None,
    renderer: str = "",
    limits: Limits = LIMITS,
    sampling: Sampling | None = None,
    options: Mapping[str, Json] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    router_settings: RouterSettings | None = None,
    watches: bool = False,
    send_buffer: int | None = None,
    renderers: Renderers | None = None,
) -> AsyncGenerator[Site, None]:
    """`script` determines the engine's replies (see rollyard.testing.script); `tokenizer` is a folder, or None for the
    small one. `renderers`: renderers that are loaded already, for a test that needs many gateways."""
    folder = tokenizer or tokenizer_dir()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            ScriptedEngine(script, tokenizer=engine_tokenizer(folder), **(engine_options or {}))
        )
        router = await stack.enter_async_context(Router(router_settings or RouterSettings(engine_wait_s=5.0)))
        await router.add(EngineSpec("e0", engine.url, Kind.VLLM, tokenizer=str(folder), renderer=renderer))
        task = Task("shell", agent=AgentSpec(options=options or {}), limits=limits)
        if sampling is not None:
            task = replace(task, sampling=sampling)
        clock = Deadline(limits.run_s)
        engine_session = await stack.enter_async_context(router.session("default", "ro-1"))
        renderers = renderers or Renderers()
        beats: list[float] = []
        session = await open_gateway(
            engine_session,
            renderers.of,
            task=task,
            run=Run("r1"),
            rollout_id="ro-1",
            clock=clock,
            beat=lambda: beats.append(clock.used_s),
        )
        stack.push_async_callback(session.close)
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # accepted connections inherit it
        doorway = Doorway(listener, limits=DoorwayLimits(connections=256))
        stack.callback(doorway.close)
        await doorway.serve(GatewayApp(session, watches=watches))
        port = listener.getsockname()[1]
        yield Site(f"http://127.0.0.1:{port}", session, engine, router, renderers, clock, beats)
