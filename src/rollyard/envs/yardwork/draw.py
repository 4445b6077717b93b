"""A seeded generator of words, numbers and small texts from one split's pool; the same on every machine.

It uses only `random()` of Python's generator: Python guarantees that sequence for a seed, but not the results of
`sample` and `shuffle`. A task gets no word twice, so a search finds a word only where it was put.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rollyard.envs.yardwork.words import POOLS, Split, is_held_out

T = TypeVar("T")

FILLER = 10
"""The number of meaningless words in a task, which may repeat."""


class SeededDraw:
    """Draws a task's words, numbers and names from the pool of its split."""

    def __init__(self, seed: str, split: Split) -> None:
        self._random = random.Random(seed)
        self._pool = POOLS[split]
        self._is_held_out = split == "held_out"
        self._words = self.shuffled(self._pool.words)
        self._filler = [self._words.pop() for _ in range(FILLER)]

    def below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def count(self, low: int, high: int) -> int:
        """A count from `low` to `high`, inclusive. Counts are not split into pools."""
        return low + self.below(high - low + 1)

    def pick(self, things: Sequence[T]) -> T:
        return things[self.below(len(things))]

    def shuffled(self, things: Iterable[T]) -> list[T]:
        mixed = list(things)
        for last in range(len(mixed) - 1, 0, -1):
            other = self.below(last + 1)
            mixed[last], mixed[other] = mixed[other], mixed[last]
        return mixed

    def word(self) -> str:
        return self._words.pop()

    def words(self, count: int) -> list[str]:
        return [self._words.pop() for _ in range(count)]

    def ending(self) -> str:
        return self.pick(self._pool.endings)

    def variable(self) -> str:
        return self.pick(self._pool.variables)

    def columns(self, count: int) -> list[str]:
        return self.shuffled(self._pool.columns)[:count]

    def numbers(self, count: int, low: int = 10, high: int = 499) -> list[int]:
        """Distinct numbers of this split."""
        candidates = [number for number in range(low, high + 1) if is_held_out(number) == self._is_held_out]
        return self.shuffled(candidates)[:count]

    def names(self, count: int, ending: str, folders: Sequence[str] = ()) -> list[str]:
        """New file names, in the order of `ls`, distributed over the folders if there are any."""
        stems = [f"{word}.{ending}" for word in self.words(count)]
        if folders:
            stems = [f"{folders[index % len(folders)]}/{stem}" for index, stem in enumerate(stems)]
        return sorted(stems)

    def filler(self) -> str:
        return f"{self.pick(self._filler)} {self.pick(self._filler)}"

    def lines(self, count: int, marked: Iterable[str] = ()) -> list[str]:
        """Meaningless lines. Each of the `marked` words is in a different line."""
        rows = [self.filler() for _ in range(count)]
        places = self.shuffled(range(count))
        for word in marked:
            place = places.pop()
            rows[place] = f"{rows[place].split()[0]} {word}"
        return rows
