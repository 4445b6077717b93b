"""The catalog of a service: follows the store in the background, and answers pages.

Invariants. Nothing waits for the catalog except those who look at it: if its file is locked, broken or its disk full,
one line is logged, pages have fewer rows (`behind` says how many are missing), and it continues or is built again when
that is possible. It uses a tenth of a core while rollouts are running. Rows are checked against the store before they
are returned: a deleted rollout is never listed.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from rollyard.catalog import pages, schema
from rollyard.catalog.deleted_runs import DeletedRuns, last_deleted
from rollyard.catalog.entries import Entry
from rollyard.catalog.filters import Filter
from rollyard.catalog.pages import FailureCount, FoundRow, ResultPage
from rollyard.catalog.readers import NotOpen, Readers
from rollyard.catalog.search import Search
from rollyard.catalog.series import By, Series, series
from rollyard.catalog.writer import Writer, is_corrupt
from rollyard.core import Rollout, State
from rollyard.core.failure import NotFound
from rollyard.store.base import Store, StoreUnusable

T = TypeVar("T")

FILE = "catalog.db"

BATCH = 64
"""Rollouts that are added at once: about 50 ms."""

BATCH_BYTES = 8 << 20
"""Trajectories that are in memory at once; a single one may be larger, up to `MOST_BYTES`."""

MOST_BYTES = 64 << 20
"""A larger trajectory is listed, but its text is not indexed."""

SHARE, IDLE_SHARE = 0.1, 0.5
"""Of one core, while rollouts are running and while none is."""

MOST_PAUSE_S = 5.0

CHECK_S = 5.0
"""Interval at which `CHECKED` rows are compared with the store."""

CHECKED = 2000

FORGOTTEN = 200
"""Rows that are deleted in one transaction: about 100 ms with texts of some kilobytes."""

RETRY_S = (1.0, 5.0, 30.0)
"""Pauses after failures in a row; the last one is repeated."""

FILLS = 4
"""Times that a page is read again if rows of it were deleted from the store."""

SERIES_S, SERIES_SHARE, MOST_SERIES = 2.0, 0.05, 64
"""A run's series is kept for SERIES_S, and so long that computing it again uses at most that share of a core."""

_log = logging.getLogger("rollyard.catalog")


class Catalog:
    """An index of the ended rollouts of a store. `async with` starts and ends its background work."""

    def __init__(self, folder: Path, store: Store, *, is_busy: Callable[[], bool] = lambda: True) -> None:
        self._path = folder / FILE
        self._store = store
        self._is_busy = is_busy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollyard-catalog")
        self._readers = Readers(self._path)
        self._writer: Writer | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._policies: dict[str, str] = {}
        self._cursor = 0
        self._checked = 0  # the number up to which rows were compared with the store
        self._check_at = 0.0
        self._gone: set[int] = set()  # rows whose rollouts a page did not find in the store
        self._deleted = DeletedRuns()
        self._must_rebuild = False
        self._problem = ""  # the last one that was logged
        self._series: dict[tuple[str, By, int], tuple[float, Series]] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="catalog")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._writer is not None:
            await self._in_thread(self._writer.close)
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._readers.close)

    def wake(self, _: Rollout | None = None) -> None:
        """To be called when a rollout has ended."""
        self._news.set()

    async def forget_run(self, run: str) -> None:
        """To be called when a run has been deleted: a new run of that name, perhaps of another tenant, must have none
        of its figures. Its rows are left out from now on, and are deleted in the background."""
        self._deleted.mark(run, await self._store.last_ended())
        self._policies.pop(run, None)
        self._series = {key: kept for key, kept in self._series.items() if key[0] != run}
        self._news.set()

    # --- questions ------------------------------------------------------------------------------------

    async def page(
        self,
        wanted: Filter,
        search: Search | None = None,
        *,
        before: int | None = None,
        limit: int = 50,
        caller: str = "",
    ) -> ResultPage:
        """Returns ended rollouts, newest first."""
        behind = await self.behind()
        wanted = replace(wanted, deleted=self._deleted.among(wanted.runs))
        found, after = list[FoundRow](), before
        try:
            for _ in range(FILLS):
                query = partial(pages.page, wanted=wanted, search=search, before=after, limit=limit - len(found))
                rows, after = await self._readers.run(query, caller=caller)
                found += await self._existing(rows)
                if after is None or len(found) >= limit:
                    break
            count = partial(pages.total, wanted=wanted, search=search)
            total, is_exact = await self._readers.run(count, caller=caller)
        except (sqlite3.Error, OSError) as error:
            self._unanswered(error)
            return ResultPage(tuple(found), after if found else None, len(found), is_total_exact=False, behind=behind)
        return ResultPage(tuple(found), after, max(total, len(found)), is_exact, behind)

    async def failures(self, runs: Sequence[str] | None, since: float, *, caller: str = "") -> Sequence[FailureCount]:
        """Returns the failures of rollouts of these runs, or of all, that ended since then, by code and blame."""
        try:
            query = partial(pages.failures, runs=runs, since=since, deleted=self._deleted.among(runs))
            return await self._readers.run(query, caller=caller)
        except (sqlite3.Error, OSError) as error:
            self._unanswered(error)
            return ()

    async def series(self, run: str, by: By, points: int, *, caller: str = "") -> Series:
        """Returns a run's figures over time or weight versions."""
        now = time.monotonic()
        key: tuple[str, By, int] = (run, by, points)
        kept = self._series.get(key)
        if kept is not None and kept[0] > now:
            return kept[1]
        deletions, after = self._deleted.count, self._deleted.last_of(run)
        try:
            query = partial(series, run=run, by=by, points=points, after=after)
            found = await self._readers.run(query, caller=caller)
        except (sqlite3.Error, OSError) as error:
            self._unanswered(error)
            empty = Series(by, share={name: [] for name in ("model", "tool", "waiting", "other")})
            return await self._with_groups(run, empty)
        found = await self._with_groups(run, found)
        ended = time.monotonic()
        if len(self._series) >= MOST_SERIES:
            self._series.clear()
        if self._deleted.count == deletions:  # it was not deleted meanwhile
            self._series[key] = (ended + max(SERIES_S, (ended - now) / SERIES_SHARE), found)
        return found

    async def _with_groups(self, run: str, series: Series) -> Series:
        return replace(series, groups=tuple(await self._store.count_groups(run, series.by, series.width)))

    async def behind(self) -> int:
        """Returns how many ended rollouts are not in the catalog yet; at most so many."""
        return max(0, await self._store.last_ended() - self._cursor)

    async def _existing(self, rows: Sequence[FoundRow]) -> list[FoundRow]:
        kept = await self._store.kept([row.key for row in rows]) if rows else {}
        existing = [row for row in rows if (one := kept.get(row.key)) is not None and one.ended_seq == row.seq]
        if len(existing) < len(rows):
            self._gone |= {row.seq for row in rows} - {row.seq for row in existing}
            self._news.set()
        return existing

    # --- following the store --------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._open()
                while True:
                    if not await self._add_some():
                        await self._check_some()
                        with suppress(TimeoutError):
                            async with asyncio.timeout(CHECK_S):
                                await self._news.wait()
                        self._news.clear()
                    failures, self._problem = 0, ""
            except StoreUnusable:
                return
            except Exception as error:  # it costs the dashboard only
                self._failed(error)
                await self._close()
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    def _unanswered(self, error: Exception) -> None:
        """For the failure of a query. It is no news if it took too long, or if the file is not open yet."""
        if not isinstance(error, NotOpen) and "interrupted" not in str(error):
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Logs a problem once, until something succeeds. A broken file is built again."""
        if is_corrupt(error):
            self._must_rebuild = True
            self._news.set()
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            _log.warning("the catalog cannot be used: the dashboard lacks rollouts", extra={"detail": problem})
        self._problem = problem

    async def _open(self) -> None:
        if self._must_rebuild:
            await self._rebuild()
        try:
            self._writer = await self._in_thread(partial(Writer, self._path))
        except schema.OtherVersion:
            await self._rebuild()
            self._writer = await self._in_thread(partial(Writer, self._path))
        self._cursor = await self._in_thread(lambda: self._open_writer.cursor)
        if not await self._is_of_this_store():
            _log.warning("the catalog is of another store: it is built again")
            await self._close()
            await self._rebuild()
            self._writer = await self._in_thread(partial(Writer, self._path))
            self._cursor = 0
        await self._mark_deleted()
        self._readers.resume()

    async def _mark_deleted(self) -> None:
        """Marks the runs that were deleted and whose rows are in the file: since an earlier process, for example."""
        oldest = await self._in_thread(lambda: self._open_writer.oldest_rows())
        for start in range(0, len(oldest), CHECKED):
            few = oldest[start : start + CHECKED]
            kept = await self._store.kept([key for _, _, key in few])
            for run, seq, key in few:
                if (one := kept.get(key)) is not None and one.ended_seq == seq:
                    continue

                async def rows_after(number: int, run: str = run) -> Sequence[tuple[int, str]]:
                    return await self._in_thread(partial(self._open_writer.ids_of_run, run, number, CHECKED))

                self._deleted.mark(run, await last_deleted(self._store, rows_after))

    async def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(sqlite3.Error):
                await self._in_thread(writer.close)

    async def _rebuild(self) -> None:
        await asyncio.to_thread(self._readers.pause)
        await self._in_thread(partial(schema.delete, self._path))
        self._must_rebuild = False
        self._cursor = self._checked = 0
        self._gone.clear()
        self._series.clear()

    async def _is_of_this_store(self) -> bool:
        if self._cursor > await self._store.last_ended():
            return False
        newest = await self._store.list(state=State.ENDED, limit=1, is_newest_first=True)
        if not newest.rollouts or (seq := newest.rollouts[0].ended_seq or 0) > self._cursor:
            return True
        return await self._in_thread(partial(self._open_writer.id_at, seq)) == newest.rollouts[0].id

    async def _add_some(self) -> bool:
        """Adds the next rollouts. Returns whether there may be more."""
        if self._must_rebuild:
            raise sqlite3.DatabaseError("the file is broken")
        for run, last in self._deleted.take_versions():
            await self._in_thread(partial(self._open_writer.renew_version, run, last))
        started = time.monotonic()
        page = await self._store.list(state=State.ENDED, after=f"e:{self._cursor}", limit=BATCH)
        if not page.rollouts:
            self._cursor = await self._skip_deleted()
            return False
        entries, size = list[Entry](), 0
        for rollout in page.rollouts:
            data = await self._store.encoded_trajectory(rollout.id, MOST_BYTES)
            entries.append(Entry(rollout, await self._policy(rollout.run), data))
            size += len(data or b"")
            if size > BATCH_BYTES:
                break
        used_s = await self._in_thread(partial(self._add, entries))
        self._cursor = entries[-1].seq
        share = SHARE if self._is_busy() else IDLE_SHARE
        used_s = max(used_s, min(time.monotonic() - started, 2 * used_s))  # the store's threads work, too
        await asyncio.sleep(min(MOST_PAUSE_S, used_s * (1 / share - 1)))
        return True

    def _add(self, entries: Sequence[Entry]) -> float:
        """In the thread. Returns the CPU time it took."""
        started = time.thread_time()
        try:
            self._open_writer.add(entries)
        except (sqlite3.Error, OSError):
            raise
        except Exception:  # one rollout's data must not keep out the others
            for entry in entries:
                try:
                    self._open_writer.add([entry])
                except (sqlite3.Error, OSError):
                    raise
                except Exception:
                    _log.exception("a rollout cannot be indexed", extra={"rollout": entry.rollout.id})
                    self._open_writer.skip_to(entry.seq)
        return time.thread_time() - started

    async def _skip_deleted(self) -> int:
        """Moves the cursor to the store's last number if the rollouts up to it were deleted."""
        last = await self._store.last_ended()
        newer = await self._store.list(state=State.ENDED, after=f"e:{self._cursor}", limit=1)
        if last <= self._cursor or newer.rollouts:
            return self._cursor
        await self._in_thread(partial(self._open_writer.skip_to, last))
        return last

    async def _check_some(self) -> None:
        """Deletes what the store has deleted: some rows, from where the last call stopped."""
        gone, self._gone = self._gone, set[int]()
        deleted = self._deleted.take_rows()
        for run, last in deleted:
            gone |= set(await self._in_thread(partial(self._open_writer.seqs_of_run, run, last)))
        rows = list[tuple[int, str, bool]]()
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_S
            if not await asyncio.to_thread(self._path.exists):
                self._must_rebuild = True
                raise FileNotFoundError(f"{self._path} was deleted")
            rows = await self._in_thread(partial(self._open_writer.ids_after, self._checked, CHECKED))
            self._checked = rows[-1][0] if len(rows) == CHECKED else 0
        kept = await self._store.kept([key for _, key, _ in rows]) if rows else {}
        pruned = list[int]()
        for seq, key, has_text in rows:
            one = kept.get(key)
            if one is None or one.ended_seq != seq:
                gone.add(seq)
            elif has_text and not one.has_trajectory:
                pruned.append(seq)
        await self._forget(sorted(gone))
        await self._forget(pruned, only_texts=True)
        if gone or pruned:
            await self._in_thread(self._open_writer.shrink)
        for run, last in deleted:
            self._deleted.remove(run, last)

    async def _forget(self, seqs: Sequence[int], *, only_texts: bool = False) -> None:
        for start in range(0, len(seqs), FORGOTTEN):
            few = seqs[start : start + FORGOTTEN]
            started = time.monotonic()
            await self._in_thread(partial(self._open_writer.forget, few, only_texts=only_texts))
            share = SHARE if self._is_busy() else IDLE_SHARE
            await asyncio.sleep(min(MOST_PAUSE_S, (time.monotonic() - started) * (1 / share - 1)))

    async def _policy(self, run: str) -> str:
        if (policy := self._policies.get(run)) is not None:
            return policy
        deletions = self._deleted.count
        try:
            policy = (await self._store.get_run(run)).policy
        except NotFound:  # deleted meanwhile
            return ""
        if len(self._policies) > 10_000:
            self._policies.clear()
        if self._deleted.count == deletions:
            self._policies[run] = policy
        return policy

    @property
    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise RuntimeError("the catalog is not open")
        return self._writer

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
