"""Keeps the caches of finished sequences, for the next turn of their session and for prompts with the same prefix.

The next prompt of a session starts with its last prompt and completion, so the session's own cache is taken and cut to
the common prefix. The cache of another session (the same system prompt, another member of a group) is copied up to the
common prefix, if there is room for both. When memory is needed, the least recently used cache is evicted first.

Hundreds are kept, and every turn looks for one. They are indexed by session and by marks, which are hashes of the first
GRAIN tokens, the first 2 × GRAIN, and so on. A cache found by a mark is compared token by token.

Invariant: a cache is only used with the salt and the tokens with which it was created.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from rollyard.core.trace import common_prefix

if TYPE_CHECKING:
    from rollyard.embedded.transformer.attention import Kv
    from rollyard.embedded.transformer.paged import PagedKv
    from rollyard.embedded.transformer.stacked import StackedKv

GRAIN = 16  # tokens; a shorter prefix of another session is not worth a copy
_MOST_COMPARED = 8  # how many caches that share the longest mark are compared, most recently used first


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A cache, and the tokens that it contains."""

    tokens: array[int]
    kv: Kv | PagedKv | StackedKv
    salt: str
    session: str
    marks: tuple[int, ...]


class PrefixCache:
    """The kept caches, indexed by session and by prefix."""

    def __init__(self) -> None:
        self.capacity_tokens = 0  # of all kept caches
        self._entries: dict[CachedPrefix, None] = {}  # least recently used first, here and below
        self._by_session: dict[str, dict[CachedPrefix, None]] = {}
        self._by_mark: dict[int, dict[CachedPrefix, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def keep(self, tokens: Sequence[int], kv: Kv | PagedKv | StackedKv, salt: str, session: str) -> None:
        if kv.length == 0:
            kv.free()
            return
        own = array("i", tokens[: kv.length])
        entry = CachedPrefix(own, kv, salt, session, tuple(_marks(own, salt)))
        for one in [*self._by_session.get(session, ())] if session else ():  # shorter prefixes of the same session
            if one.salt == salt and _begins(entry, one.tokens):
                self.take(one)
                one.kv.free()
        self._put(entry)

    def find(self, tokens: Sequence[int], salt: str, session: str) -> tuple[CachedPrefix, int] | None:
        """Returns the cache with the longest common prefix, to within GRAIN tokens, and its length. A cache of the
        session itself is preferred, and is returned immediately if all of it matches."""
        query = array("i", tokens)
        best: tuple[CachedPrefix, int] | None = None
        best_rank = (0, False)
        for one in self._by_session.get(session, ()) if session else ():
            shared = common_prefix(one.tokens, query) if one.salt == salt else 0
            if shared > best_rank[0]:
                best, best_rank = (one, shared), (shared, True)
        if best is not None and best[1] == len(best[0].tokens):
            return best
        for mark in reversed([*_marks(query, salt)]):
            for one in islice(reversed(self._by_mark.get(mark, {})), _MOST_COMPARED):
                shared = common_prefix(one.tokens, query) if one.salt == salt else 0
                if shared >= GRAIN and (shared, False) > best_rank:
                    best, best_rank = (one, shared), (shared, False)
            if mark in self._by_mark:
                break
        return best

    def take(self, entry: CachedPrefix) -> None:
        """Removes an entry; the caller owns its cache."""
        del self._entries[entry]
        self.capacity_tokens -= entry.kv.capacity
        for places, key in self._places(entry):
            del places[key][entry]
            if not places[key]:
                del places[key]

    def touch(self, entry: CachedPrefix) -> None:
        self.take(entry)
        self._put(entry)

    def forget_oldest(self, spared: CachedPrefix | None = None) -> bool:
        """Evicts the least recently used cache. Returns False if there is none."""
        for one in self._entries:
            if one is not spared:
                self.take(one)
                one.kv.free()
                return True
        return False

    def clear(self) -> None:
        while self.forget_oldest():
            pass

    def _put(self, entry: CachedPrefix) -> None:
        self._entries[entry] = None
        self.capacity_tokens += entry.kv.capacity
        for places, key in self._places(entry):
            places.setdefault(key, {})[entry] = None

    def _places(self, entry: CachedPrefix) -> Iterator[tuple[dict[Any, dict[CachedPrefix, None]], str | int]]:
        """Returns the indexes that contain it, and its key in each."""
        if entry.session:
            yield self._by_session, entry.session
        for mark in entry.marks:
            yield self._by_mark, mark


def _marks(tokens: array[int], salt: str) -> Iterator[int]:
    raw, width, mark = tokens.tobytes(), GRAIN * tokens.itemsize, hash(salt)
    for end in range(width, len(raw) + 1, width):
        mark = hash((mark, raw[end - width : end]))
        yield mark


def _begins(entry: CachedPrefix, tokens: array[int]) -> bool:
    return entry.tokens[: len(tokens)] == tokens
