"""A store with ended rollouts, and a catalog of it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rollyard.catalog import Catalog, Filter, ResultPage, Search
from rollyard.core import Ending, Outcome, Run, Score, State
from rollyard.core.rollout import Summary, Timings
from rollyard.store import open_store
from rollyard.store.base import Store
from rollyard.testing.store_conformance import advance, submission, trajectory

WITHIN_S = 60.0


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Store, None]:
    async with await open_store(str(folder / "rollyard.db")) as store:
        for run in ("run", "other"):
            await store.put_run(Run(run), {})
        yield store


@asynccontextmanager
async def catalog_of(folder: Path, store: Store) -> AsyncGenerator[Catalog, None]:
    async with Catalog(folder, store, is_busy=lambda: False) as catalog:
        yield catalog


async def end(
    store: Store,
    key: str,
    text: str = "hello",
    *,
    run: str = "run",
    ending: Ending | None = None,
    versions: tuple[int, int] = (-1, -1),
) -> None:
    """Submits a rollout and ends it, with one message."""
    await store.submit([submission(key, run)])
    at = await advance(store, key, State.RUN)
    summary = Summary(turns=2, sampled_tokens=30, oldest_version=versions[0], newest_version=versions[1])
    timings = Timings(queued_s=1, run_s=8, model_s=4, tool_s=2, eval_s=1)
    ended = ending or Ending(Outcome.COMPLETED, Score(1.0), is_trainable=True, summary=summary, timings=timings)
    await store.end(key, at, ended, replace(trajectory(key), messages=({"role": "assistant", "content": text},)))


async def caught_up(catalog: Catalog) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await catalog.behind():
            catalog.wake()
            await asyncio.sleep(0.01)


async def eventually(catalog: Catalog, *keys: str, search: str | None = None) -> ResultPage:
    """Waits until a page has exactly these rollouts."""
    page = ResultPage()
    async with asyncio.timeout(WITHIN_S):
        while True:
            catalog.wake()
            page = await catalog.page(Filter(), None if search is None else Search.of(search))
            if [row.key for row in page.rows] == list(keys):
                return page
            await asyncio.sleep(0.02)
