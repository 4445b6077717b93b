"""The order in which a draw takes the tasks of its source: shuffled by its seed, again for each epoch, each task once.

Pure: the same seed and size give the same order, on any machine and after any restart, so two numbers describe what a
draw has used up. A growing source is taken once, in order of arrival.
"""

from __future__ import annotations

from array import array
from random import Random

from rollyard.core.draw import DrawConfig, DrawItem, DrawProgress


class TaskOrder:
    """The order of one draw's tasks. If `size` is None, the source grows and currently has `grown` tasks."""

    def __init__(self, config: DrawConfig, size: int | None, grown: int = 0) -> None:
        self.grown = grown
        self._size = size
        self._epochs = config.epochs if size is not None else 1
        self._seed = config.seed
        self._is_shuffled = config.shuffle and size is not None
        self._epoch = -1
        self._indices: array[int] | range = range(0)

    @property
    def is_growing(self) -> bool:
        return self._size is None

    def has_more(self, progress: DrawProgress) -> bool:
        """Whether `take` would return an item."""
        if progress.returned:
            return True
        if self._size is None:
            return progress.position < self.grown
        if self._size == 0:
            return False
        if progress.position < self._size:
            return self._epochs is None or progress.epoch < self._epochs
        return self._epochs is None or progress.epoch + 1 < self._epochs

    def is_dry(self, progress: DrawProgress) -> bool:
        """Whether there will never be another item."""
        return not self.has_more(progress) and (not self.is_growing or progress.is_source_closed)

    def take(self, progress: DrawProgress) -> DrawItem:
        """Returns the next item and advances `progress`; returned tasks come first. Call it only if `has_more`."""
        if progress.returned:
            return progress.returned.pop(0)
        if self._size is not None and progress.position >= self._size:
            progress.epoch += 1
            progress.position = 0
        item = DrawItem(progress.epoch, self._index(progress.epoch, progress.position))
        progress.position += 1
        return item

    def _index(self, epoch: int, position: int) -> int:
        if not self._is_shuffled or self._size is None:
            return position
        if epoch != self._epoch:
            self._epoch = epoch
            self._indices = array("q", range(self._size))
            Random(f"{self._seed}/{epoch}").shuffle(self._indices)
        return self._indices[position]
