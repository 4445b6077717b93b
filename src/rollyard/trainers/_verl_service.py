"""The connection of verl's process to the service: a client in its own thread, two runs, verl's engines, the weights.

Invariant: the policy is paused while verl updates the weights. It is paused when the last group that verl waits for has
ended, before verl gets that group, since verl writes weights next. It is resumed, with the version's number, when verl
submits prompts again. (verl does not announce an update. If no rollout is left, this pause is early enough; if rollouts
are left, `verl_sampler.py` pauses the policy.)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rollyard.client import AsyncClient
from rollyard.client.groups import Group
from rollyard.trainers._verl_prompts import PromptGroup, plain
from rollyard.trainers._verl_settings import Settings, defaults_of

T = TypeVar("T")

POLL_S = 60.0  # for one request for a group
HOLDER = "verl"  # of its pauses, which more than one process of a trainer makes


class VerlService:
    """A client in a thread. `config` is verl's whole configuration; `llm_client` has its rollout servers."""

    def __init__(self, config: Any, settings: Settings, llm_client: Any) -> None:
        self._settings = settings
        self._rollout = config.actor_rollout_ref.rollout
        self._model = config.actor_rollout_ref.model
        self._llm_client = llm_client
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._opened: AsyncClient | None = None
        self._is_prepared = False
        self._version: int | None = None  # being sampled; None: paused, or not resumed by this process
        self._open = 0  # groups that verl waits for
        self._weights = asyncio.Lock()

    # --- its thread -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread. Raises if the service cannot be reached."""
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(opened)), name="rollyard-verl", daemon=True
        )
        self._thread.start()
        opened.result()

    def stop(self) -> None:
        """Ends the thread. verl does not call it: the thread ends with its process."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
            self._thread = self._loop = None

    async def _live(self, opened: Future[None]) -> None:
        settings = self._settings
        try:
            async with AsyncClient(settings.url, settings.token, retry_s=settings.retry_s) as client:
                await client.status()
                self._opened, self._loop = client, asyncio.get_running_loop()
                opened.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs the coroutine in the thread."""
        if self._loop is None:
            work.close()
            raise RuntimeError("the manager was not started: use create()")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the call running there
            future.cancel()
            raise

    # --- groups ---------------------------------------------------------------------------------------

    async def begin(self, asks: Sequence[PromptGroup]) -> None:
        """Submits all groups, to be sampled from verl's current weights. If one is refused, cancels all and raises its
        error."""
        if not asks:
            return
        async with self._weights:
            await self._prepare()
            await self._resume(asks[0].version)
            self._open += len(asks)
        results = await asyncio.gather(*(self._start_group(ask) for ask in asks), return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        if refused:
            await asyncio.gather(
                *(self._client.cancel_group(ask.group, run=ask.run) for ask in asks), return_exceptions=True
            )
            await self._close(len(asks))
            raise refused[0]

    async def _start_group(self, ask: PromptGroup) -> Group:
        # One member is enough: the manager decides whether verl can use a short group.
        options: dict[str, Any] = {"size": ask.size, "spares": self._settings.spares, "min_members": 1}
        return await self._client.group(ask.task, id=ask.group, run=ask.run, **options)

    @asynccontextmanager
    async def ended(self, ask: PromptGroup) -> AsyncIterator[Group]:
        """Yields the ended group with its traces. verl may get it only after the context."""
        try:
            while not (await self._client.get_group(ask.group, wait_s=POLL_S, run=ask.run)).is_ended:
                pass
            yield await self._client.get_group(ask.group, traces=True, run=ask.run)
        finally:
            await self._close(1)

    async def _close(self, count: int) -> None:
        async with self._weights:
            self._open -= count
            if self._open == 0:
                await self._pause()

    async def _pause(self) -> None:
        await self._policy.pause(mode="abort", lease_s=self._settings.lease_s)
        self._version = None

    async def _resume(self, version: int) -> None:
        is_running = (await self._policy.status())["state"] == "running"  # `verl_sampler.py` also pauses it
        if is_running and version == self._version:
            return
        if is_running:  # the first time: no sampling while the number of the weights changes
            await self._pause()
        await self._policy.resume(version)
        self._version = version

    # --- runs and engines -----------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Creates the runs and adds the engines. Called with the first prompts: before, verl's servers are asleep."""
        if self._is_prepared:
            return
        settings = self._settings
        for is_validation in (False, True):
            await self._client.create_run(
                settings.run + (".val" if is_validation else ""),
                mode="eval" if is_validation else "train",
                policy=settings.policy,
                defaults=plain(defaults_of(self._rollout, settings, is_validation=is_validation)),
            )
        await self._add_engines()
        self._is_prepared = True

    async def _add_engines(self) -> None:
        settings = self._settings
        urls = settings.engines
        if urls is None:
            urls = tuple(f"http://{server}" for server in await asyncio.to_thread(_servers, self._llm_client))
        if not urls:
            return
        mine = f"{settings.policy}.verl"
        there = {str(each.get("id")): str(each.get("url")).rstrip("/") for each in await self._client.engines()}
        expected = {f"{mine}{i}": url.rstrip("/") for i, url in enumerate(urls)}
        for id, url in there.items():
            if id.startswith(mine) and expected.get(id) != url:
                await self._client.remove_engine(id)  # of an earlier trainer
        for id, url in expected.items():
            if there.get(id) != url:
                await self._client.add_engine(
                    url,
                    id=id,
                    kind=str(self._rollout.name),
                    policy=settings.policy,
                    tokenizer=settings.tokenizer or str(self._model.path),
                    renderer=settings.renderer,
                )

    @property
    def _policy(self) -> Any:
        return self._client.policy(self._settings.policy, holder=HOLDER)

    @property
    def _client(self) -> AsyncClient:
        assert self._opened is not None
        return self._opened


def _servers(llm_client: Any) -> list[str]:
    """Returns the addresses of verl's rollout servers, which its load balancer uses as their names."""
    import ray  # type: ignore[import-not-found]

    balancer = getattr(llm_client, "_load_balancer", None)
    if balancer is None:
        raise ValueError("verl gave no rollout servers: set their URLs in rollyard.engines")
    return [str(server) for server in ray.get(balancer.get_all_servers.remote())]
