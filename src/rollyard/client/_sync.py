"""The client without `await`, for scripts and trainers that have no event loop.

It runs an `AsyncClient` on a private event loop in its own thread, so it also works inside the running loop of a
notebook or a trainer. Callbacks (`on_end`, `on_event`) are called in that thread, one at a time.

    with rollyard.Client() as yard:
        record = yard.wait(yard.submit([task])[0].id)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from rollyard.client._async import AsyncClient, Objects, Records, TaskLike, Traces
from rollyard.client._policies import Policy
from rollyard.client._sampling_sync import Sampling
from rollyard.client._sessions import Session
from rollyard.client.records import Event, JsonObject, Page, Record, Trajectory
from rollyard.core import Json

T = TypeVar("T")


class Client(Sampling):
    """The synchronous client. `AsyncClient` documents each method."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, retry_s: float = 60.0
    ) -> None:
        self._client = AsyncClient(url, token, timeout_s=timeout_s, retry_s=retry_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing: asyncio.Task[None] | None = None  # of an iterator that was garbage-collected

    @property
    def url(self) -> str:
        return self._client.url

    def __enter__(self) -> Client:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollyard-client", daemon=True)
        self._thread.start()
        self._run(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is None or self._thread is None:
            return
        try:
            self._run(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None

    async def _end(self) -> None:
        await self._client.__aexit__(None, None, None)
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _run(self, work: Coroutine[object, object, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("the client is not open: use it in `with`")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here must not leave the call running in the thread
            future.cancel()
            raise

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> tuple[T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def close() -> None:
            await items.aclose()  # type: ignore[attr-defined]  # both iterators of AsyncClient are generators

        try:
            while (item := self._run(following())) is not None:
                yield item[0]
        finally:
            if threading.current_thread() is self._thread:  # called by the garbage collector: waiting would deadlock
                self._closing = asyncio.get_running_loop().create_task(close())
            elif self._loop is not None:
                self._run(close())

    # --- runs -----------------------------------------------------------------------------------------

    def create_run(
        self,
        id: str | None = None,
        *,
        mode: str | None = None,
        policy: str | None = None,
        defaults: Mapping[str, Json] | None = None,
        seed: int | None = None,
        priority: int | None = None,
        max_live: int | None = None,
        max_queued: int | None = None,
        trainable_on_deadline: bool | None = None,
        mask_truncated: bool | None = None,
        overlong_penalty: Mapping[str, Json] | None = None,
    ) -> JsonObject:
        return self._run(
            self._client.create_run(
                id,
                mode=mode,
                policy=policy,
                defaults=defaults,
                seed=seed,
                priority=priority,
                max_live=max_live,
                max_queued=max_queued,
                trainable_on_deadline=trainable_on_deadline,
                mask_truncated=mask_truncated,
                overlong_penalty=overlong_penalty,
            )
        )

    def get_run(self, id: str) -> JsonObject:
        return self._run(self._client.get_run(id))

    def list_runs(self) -> Objects:
        return self._run(self._client.list_runs())

    def delete_run(self, id: str) -> None:
        return self._run(self._client.delete_run(id))

    def acknowledge(self, run: str, cursor: str) -> int:
        return self._run(self._client.acknowledge(run, cursor))

    # --- rollouts -------------------------------------------------------------------------------------

    def submit(
        self,
        tasks: Sequence[TaskLike],
        *,
        run: str = "default",
        ids: Sequence[str] | None = None,
        group_size: int | None = None,
        priority: int | None = None,
    ) -> Records:
        return self._run(self._client.submit(tasks, run=run, ids=ids, group_size=group_size, priority=priority))

    def get(self, id: str, *, wait_s: float = 0.0, run: str | None = None) -> Record:
        return self._run(self._client.get(id, wait_s=wait_s, run=run))

    def wait(self, id: str, *, timeout_s: float | None = None, run: str | None = None) -> Record:
        return self._run(self._client.wait(id, timeout_s=timeout_s, run=run))

    def wait_all(
        self,
        ids: Iterable[str],
        *,
        on_end: Callable[[Record], object] | None = None,
        on_event: Callable[[Event], object] | None = None,
        timeout_s: float | None = None,
        run: str | None = None,
    ) -> Records:
        return self._run(self._client.wait_all(ids, on_end=on_end, on_event=on_event, timeout_s=timeout_s, run=run))

    def list(
        self,
        *,
        state: str | None = None,
        run: str | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int | None = None,
        wait_s: float = 0.0,
    ) -> Page:
        return self._run(
            self._client.list(state=state, run=run, group=group, after=after, limit=limit, wait_s=wait_s)
        )

    def ended(self, run: str | None = None, *, after: str | None = None) -> Iterator[Record]:
        return self._iterate(self._client.ended(run, after=after))

    def cancel(self, id: str, *, run: str | None = None) -> str:
        return self._run(self._client.cancel(id, run=run))

    def rescore(self, id: str, *, run: str | None = None) -> Record:
        return self._run(self._client.rescore(id, run=run))

    # --- agents that run elsewhere --------------------------------------------------------------------

    def session(
        self,
        id: str | None = None,
        *,
        run: str = "default",
        sampling: Mapping[str, Json] | None = None,
        limits: Mapping[str, Json] | None = None,
        reasoning_history: str | None = None,
        strict: bool | None = None,
        structured_output: bool | None = None,
        metadata: Mapping[str, Json] | None = None,
        priority: int | None = None,
        group: str | None = None,
        index: int | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        session = self._client.session(
            id,
            run=run,
            sampling=sampling,
            limits=limits,
            reasoning_history=reasoning_history,
            strict=strict,
            structured_output=structured_output,
            metadata=metadata,
            priority=priority,
            group=group,
            index=index,
            timeout_s=timeout_s,
        )
        return Session(self._run, session)

    # --- results --------------------------------------------------------------------------------------

    def traces(self, id: str, *, run: str | None = None) -> Traces:
        return self._run(self._client.traces(id, run=run))

    def traces_arrow(self, id: str, *, run: str | None = None) -> bytes:
        return self._run(self._client.traces_arrow(id, run=run))

    def trajectory(self, id: str, *, run: str | None = None) -> Trajectory:
        return self._run(self._client.trajectory(id, run=run))

    # --- engines --------------------------------------------------------------------------------------

    def add_engine(
        self,
        url: str,
        *,
        id: str | None = None,
        kind: str | None = None,
        policy: str | None = None,
        model: str | None = None,
        role: str | None = None,
        tokenizer: str | None = None,
        renderer: str | None = None,
        capacity: int | None = None,
        admission: str | None = None,
        api_key: str | None = None,
        trust_tokenizer: bool | None = None,
    ) -> JsonObject:
        return self._run(
            self._client.add_engine(
                url,
                id=id,
                kind=kind,
                policy=policy,
                model=model,
                role=role,
                tokenizer=tokenizer,
                renderer=renderer,
                capacity=capacity,
                admission=admission,
                api_key=api_key,
                trust_tokenizer=trust_tokenizer,
            )
        )

    def engines(self) -> Objects:
        return self._run(self._client.engines())

    def remove_engine(self, id: str) -> None:
        return self._run(self._client.remove_engine(id))

    def clear_engines(self) -> None:
        return self._run(self._client.clear_engines())

    # --- weights --------------------------------------------------------------------------------------

    def policy(self, name: str = "default", *, holder: str | None = None) -> Policy:
        return Policy(self._run, self._client.policy(name, holder=holder))

    def policies(self) -> Objects:
        return self._run(self._client.policies())

    # --- tokens and nodes -----------------------------------------------------------------------------

    def create_token(
        self,
        access: str,
        *,
        name: str | None = None,
        runs: Sequence[str] | None = None,
        policies: Sequence[str] | None = None,
        expires_s: float | None = None,
        quota: Mapping[str, Json] | None = None,
    ) -> JsonObject:
        return self._run(
            self._client.create_token(
                access, name=name, runs=runs, policies=policies, expires_s=expires_s, quota=quota
            )
        )

    def list_tokens(self) -> Objects:
        return self._run(self._client.list_tokens())

    def rotate_token(self, id: str, *, expires_s: float | None = None) -> JsonObject:
        return self._run(self._client.rotate_token(id, expires_s=expires_s))

    def change_quota(self, id: str, quota: Mapping[str, Json]) -> JsonObject:
        return self._run(self._client.change_quota(id, quota))

    def revoke_token(self, id: str) -> None:
        return self._run(self._client.revoke_token(id))

    def audit(self, *, limit: int = 100, before: int | None = None) -> Objects:
        return self._run(self._client.audit(limit=limit, before=before))

    def nodes(self) -> Objects:
        return self._run(self._client.nodes())

    def drain_node(self, name: str) -> JsonObject:
        return self._run(self._client.drain_node(name))

    def resume_node(self, name: str) -> JsonObject:
        return self._run(self._client.resume_node(name))

    # --- the service itself ---------------------------------------------------------------------------

    def status(self) -> JsonObject:
        return self._run(self._client.status())

    def resize_pools(
        self,
        *,
        init: int | None = None,
        run: int | None = None,
        eval: int | None = None,
        ready: int | None = None,
        live: int | None = None,
    ) -> JsonObject:
        return self._run(self._client.resize_pools(init=init, run=run, eval=eval, ready=ready, live=live))

    def events(self, *, after: str | None = None, run: str | None = None) -> Iterator[Event]:
        return self._iterate(self._client.events(after=after, run=run))
