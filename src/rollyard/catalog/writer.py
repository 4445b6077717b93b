"""The connection that writes the catalog. All of it runs in one thread, off the event loop.

Many rows are written by one statement: for each statement the thread releases the interpreter lock and, beside a busy
event loop, waits to get it back.

Invariant: the rows of a batch and the cursor are one transaction. After a kill, the next process continues after the
last complete batch, and no rollout is in the catalog twice or left out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollyard.catalog import schema
from rollyard.catalog.entries import COLUMNS, Entry
from rollyard.catalog.texts import pack, text_of, unpack
from rollyard.store.codec import CorruptRecord

FREE_PAGES = 250
"""Pages of 16 KiB that one call of `shrink` returns to the file system: about 5 ms."""


class Writer:
    """Adds rollouts to the catalog and deletes them. `close` it in the thread that used it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = schema.open_for_writing(path)

    def close(self) -> None:
        self._connection.close()

    @property
    def cursor(self) -> int:
        """The last number of the terminal order that is in the catalog."""
        return int(self._connection.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()[0])

    def add(self, entries: Sequence[Entry]) -> None:
        """Adds rollouts, in terminal order, and moves the cursor to the last one."""
        lags = self._lags(entries)
        rows, records = list[object](), list[object]()
        texts, words = list[object](), list[object]()
        for entry, lag in zip(entries, lags, strict=True):
            text = _text(entry)
            rows += entry.values(lag, len(text))
            records += (entry.seq, entry.record())
            if text:
                texts += (entry.seq, pack(text))
                words += (entry.seq, text)
        with self._transaction():
            self._insert("rollouts", COLUMNS, rows)
            self._insert("records", ("seq", "record"), records)
            self._insert("texts", ("seq", "text"), texts)
            self._insert("words", ("rowid", "text"), words)
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'cursor'", (entries[-1].seq,))
            newest: dict[str, int] = {}
            for entry in entries:
                version = entry.rollout.ending.summary.newest_version if entry.rollout.ending else -1
                newest[entry.rollout.run] = max(version, newest.get(entry.rollout.run, -1))
            self._insert(
                "runs",
                ("run", "newest_version"),
                [value for item in newest.items() for value in item],
                "ON CONFLICT (run) DO UPDATE SET newest_version = max(newest_version, excluded.newest_version)",
            )

    def _lags(self, entries: Sequence[Entry]) -> list[int | None]:
        """For each entry, by how many versions its oldest token is older than the newest of its run so far."""
        runs = {entry.rollout.run for entry in entries}
        newest: dict[str, int] = dict(
            self._connection.execute(
                "SELECT run, newest_version FROM runs WHERE run IN (SELECT value FROM json_each(?))",
                (json.dumps([*runs]),),
            ).fetchall()
        )
        lags: list[int | None] = []
        for entry in entries:
            summary = entry.rollout.ending.summary if entry.rollout.ending else None
            run, version = entry.rollout.run, summary.newest_version if summary else -1
            newest[run] = max(newest.get(run, -1), version)
            lags.append(newest[run] - summary.oldest_version if summary and summary.oldest_version >= 0 else None)
        return lags

    def skip_to(self, seq: int) -> None:
        """Moves the cursor over numbers whose rollouts the store has deleted."""
        with self._transaction():
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'cursor'", (seq,))

    def ids_after(self, seq: int, limit: int) -> list[tuple[int, str, bool]]:
        """Returns (number, key, whether it has a text) of the next rollouts."""
        rows = self._connection.execute(
            "SELECT seq, id, size > 0 FROM rollouts WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
        ).fetchall()
        return [(row[0], row[1], bool(row[2])) for row in rows]

    def seqs_of_run(self, run: str, last: int) -> list[int]:
        """Returns the numbers of a run's rollouts up to that one."""
        rows = self._connection.execute("SELECT seq FROM rollouts WHERE run = ? AND seq <= ?", (run, last)).fetchall()
        return [row[0] for row in rows]

    def oldest_rows(self) -> list[tuple[str, int, str]]:
        """Returns (run, number, key) of the first rollout of each run."""
        return self._connection.execute(
            "SELECT r.run, r.seq, r.id FROM runs q CROSS JOIN rollouts r ON r.seq = "
            "(SELECT f.seq FROM rollouts f WHERE f.run = q.run ORDER BY f.seq LIMIT 1)"
        ).fetchall()

    def ids_of_run(self, run: str, seq: int, limit: int) -> list[tuple[int, str]]:
        """Returns (number, key) of a run's next rollouts."""
        return self._connection.execute(
            "SELECT seq, id FROM rollouts WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?", (run, seq, limit)
        ).fetchall()

    def renew_version(self, run: str, last: int) -> None:
        """Sets a run's newest version to that of its rollouts after this number: earlier ones are of a deleted run."""
        with self._transaction():
            (newest,) = self._connection.execute(
                "SELECT MAX(newest_version) FROM rollouts WHERE run = ? AND seq > ?", (run, last)
            ).fetchone()
            self._connection.execute("DELETE FROM runs WHERE run = ?", (run,))
            if newest is not None:
                self._connection.execute("INSERT INTO runs (run, newest_version) VALUES (?, ?)", (run, newest))

    def id_at(self, seq: int) -> str | None:
        row = self._connection.execute("SELECT id FROM rollouts WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else row[0]

    def forget(self, seqs: Sequence[int], *, only_texts: bool = False) -> None:
        """Deletes rollouts, or only their texts."""
        if not seqs:
            return
        numbers = json.dumps(list(seqs))
        among = "seq IN (SELECT value FROM json_each(?))"
        with self._transaction():
            stored = self._connection.execute(f"SELECT seq, text FROM texts WHERE {among}", (numbers,)).fetchall()
            deletions = [value for seq, data in stored for value in ("delete", seq, unpack(data))]
            self._insert("words", ("words", "rowid", "text"), deletions)
            self._connection.execute(f"DELETE FROM texts WHERE {among}", (numbers,))
            if only_texts:
                self._connection.execute(f"UPDATE rollouts SET size = 0 WHERE {among}", (numbers,))
                return
            self._connection.execute(f"DELETE FROM records WHERE {among}", (numbers,))
            self._connection.execute(f"DELETE FROM rollouts WHERE {among}", (numbers,))

    def shrink(self) -> None:
        """Returns some of the free space of the file to the file system."""
        self._connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()

    def _insert(self, table: str, columns: Sequence[str], values: Sequence[object], more: str = "") -> None:
        if values:
            row = f"({', '.join('?' * len(columns))})"
            rows = ", ".join([row] * (len(values) // len(columns)))
            self._connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES {rows} {more}", values)

    @contextmanager
    def _transaction(self) -> Generator[None, None, None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def is_corrupt(error: Exception) -> bool:
    """Whether the file must be built again; otherwise the same operation may succeed later."""
    return isinstance(error, sqlite3.DatabaseError) and (
        not isinstance(error, sqlite3.OperationalError) or "no such" in str(error)
    )


def _text(entry: Entry) -> str:
    if entry.trajectory is None:
        return ""
    try:
        return text_of(entry.trajectory)
    except CorruptRecord:  # its row is listed all the same
        return ""
