"""What ended sequences leave behind: their caches, for the next turn of their session, or for whoever begins alike.

The next prompt of a session begins with its last prompt and completion, so the session's own cache is taken whole and
cut to what agrees. Somebody else's cache (the same system prompt, a sibling of a group) is copied up to where they
agree, if there is room for both. The least recently used is forgotten first, when memory is needed.

Hundreds are kept, and one is looked for in every turn: so each is found by its session, and by marks, which are hashes
of its first GRAIN tokens, its first 2 × GRAIN, and so on. What a mark finds is compared token by token.

Invariant: a cache is only ever used under the salt that it was made with, and for the tokens that it was made of.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollyard.embedded.attention import Kv
    from rollyard.embedded.paged import PagedKv
    from rollyard.embedded.stacked import StackedKv

GRAIN = 16  # tokens; fewer of another session's are not worth a copy
_LOOKS = 8  # of those that share a longest mark, so many are compared, the last used first


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A cache, and the tokens that are in it."""

    tokens: array[int]
    kv: Kv | PagedKv | StackedKv
    salt: str
    session: str
    marks: tuple[int, ...]


class PrefixCache:
    """See the module."""

    def __init__(self) -> None:
        self.capacity_tokens = 0  # of all of them
        self._kept: dict[CachedPrefix, None] = {}  # the least recently used first, here and below
        self._by_session: dict[str, dict[CachedPrefix, None]] = {}
        self._by_mark: dict[int, dict[CachedPrefix, None]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tokens: Sequence[int], kv: Kv | PagedKv | StackedKv, salt: str, session: str) -> None:
        if kv.length == 0:
            kv.free()
            return
        own = array("i", tokens[: kv.length])
        made = CachedPrefix(own, kv, salt, session, tuple(_marks(own, salt)))
        for one in [*self._by_session.get(session, ())] if session else ():  # what it left before and went beyond now
            if one.salt == salt and _begins(made, one.tokens):
                self.take(one)
                one.kv.free()
        self._put(made)

    def find(self, tokens: Sequence[int], salt: str, session: str) -> tuple[CachedPrefix, int] | None:
        """A cache that agrees with the most of these tokens, to within GRAIN, and with how many. The session's own
        comes before others', at once if all of it agrees."""
        wanted = array("i", tokens)
        best: tuple[CachedPrefix, int] | None = None
        best_rank = (0, False)
        for one in self._by_session.get(session, ()) if session else ():
            shared = common_prefix(one.tokens, wanted) if one.salt == salt else 0
            if shared > best_rank[0]:
                best, best_rank = (one, shared), (shared, True)
        if best is not None and best[1] == len(best[0].tokens):
            return best
        for mark in reversed([*_marks(wanted, salt)]):
            for one in islice(reversed(self._by_mark.get(mark, {})), _LOOKS):
                shared = common_prefix(one.tokens, wanted) if one.salt == salt else 0
                if shared >= GRAIN and (shared, False) > best_rank:
                    best, best_rank = (one, shared), (shared, False)
            if mark in self._by_mark:
                break
        return best

    def take(self, kept: CachedPrefix) -> None:
        """It is no longer here; its cache belongs to whoever took it."""
        del self._kept[kept]
        self.capacity_tokens -= kept.kv.capacity
        for places, key in self._places(kept):
            del places[key][kept]
            if not places[key]:
                del places[key]

    def touch(self, kept: CachedPrefix) -> None:
        self.take(kept)
        self._put(kept)

    def forget_oldest(self, spared: CachedPrefix | None = None) -> bool:
        """Whether there was one to forget."""
        for one in self._kept:
            if one is not spared:
                self.take(one)
                one.kv.free()
                return True
        return False

    def clear(self) -> None:
        while self.forget_oldest():
            pass

    def _put(self, kept: CachedPrefix) -> None:
        self._kept[kept] = None
        self.capacity_tokens += kept.kv.capacity
        for places, key in self._places(kept):
            places.setdefault(key, {})[kept] = None

    def _places(self, kept: CachedPrefix) -> Iterator[tuple[dict[Any, dict[CachedPrefix, None]], str | int]]:
        """Where it is found."""
        if kept.session:
            yield self._by_session, kept.session
        for mark in kept.marks:
            yield self._by_mark, mark


def _marks(tokens: array[int], salt: str) -> Iterator[int]:
    raw, width, mark = tokens.tobytes(), GRAIN * tokens.itemsize, hash(salt)
    for end in range(width, len(raw) + 1, width):
        mark = hash((mark, raw[end - width : end]))
        yield mark


def _begins(kept: CachedPrefix, tokens: array[int]) -> bool:
    return kept.tokens[: len(tokens)] == tokens


def common_prefix(one: array[int], other: array[int]) -> int:
    """How many first tokens they share, in a few comparisons of whole arrays."""
    high = min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    low = 0  # up to here they agree; up to `high` they do not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
