"""Deleted runs whose rows are still in the catalog's file.

A later run of such a name, perhaps of another tenant, must have none of their figures. So each has a mark, a number of
the terminal order up to which rows of that name are left out of pages and figures, until these rows are deleted. Marks
are in memory: when the file is opened, they are found again by what the store has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollyard.store.base import Store

MOST_MARKS = 1000
"""More are waiting only while the file cannot be written; the oldest is dropped."""

NumberedKey = tuple[int, str]
"""A rollout in the catalog: its number in the terminal order, and its key."""


@dataclass(slots=True)
class DeletedRuns:
    """The marks, and what remains to be deleted for each."""

    count: int = 0  # marks set so far
    _last: dict[str, int] = field(default_factory=dict[str, int])
    _rows: set[str] = field(default_factory=set[str])
    _versions: set[str] = field(default_factory=set[str])

    def mark(self, run: str, last: int) -> None:
        self.count += 1
        self._last[run] = max(last, self._last.pop(run, 0))
        while len(self._last) > MOST_MARKS:
            del self._last[next(iter(self._last))]
        self._rows.add(run)
        self._versions.add(run)

    def last_of(self, run: str) -> int:
        """Returns the last number that belongs to a deleted run of that name; 0 without one."""
        return self._last.get(run, 0)

    def among(self, runs: Sequence[str] | None) -> tuple[tuple[str, int], ...]:
        """Returns the marks of these names."""
        return tuple((run, self._last[run]) for run in runs or () if run in self._last)

    def take_versions(self) -> list[tuple[str, int]]:
        """Returns the runs whose newest version is to be computed again."""
        taken, self._versions = self._versions, set()
        return [(run, self.last_of(run)) for run in taken]

    def take_rows(self) -> list[tuple[str, int]]:
        """Returns the runs whose rows are to be deleted. `remove` each when they are."""
        taken, self._rows = self._rows, set()
        return [(run, self.last_of(run)) for run in taken]

    def remove(self, run: str, last: int) -> None:
        if self._last.get(run) == last:
            del self._last[run]


async def last_deleted(store: Store, rows_after: Callable[[int], Awaitable[Sequence[NumberedKey]]]) -> int:
    """Returns the last number of a run's oldest rows that the store does not have; 0 if it has the first. `rows_after`
    returns the run's next rows after a number: those of a deleted run precede those of a later one of its name."""
    last = 0
    while rows := await rows_after(last):
        kept = await store.kept([key for _, key in rows])
        for seq, key in rows:
            if (one := kept.get(key)) is not None and one.ended_seq == seq:
                return last
            last = seq
    return last
