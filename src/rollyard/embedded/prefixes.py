"""What ended sequences leave behind: their caches, for the next turn of their session, or for whoever begins alike.

The next prompt of a session begins with its last prompt and completion, so the session's own cache is taken whole and
cut to what agrees. Somebody else's cache (the same system prompt, a sibling of a group) is copied up to where they
agree, if there is room for both. The least recently used is forgotten first, when memory is needed.

Invariant: a cache is only ever used under the salt that it was made with, and for the tokens that it was made of.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.embedded.attention import Kv
    from rollyard.embedded.paged import PagedKv

LEAST_SHARED_TOKENS = 16  # of another session: below it, copying costs more than computing


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A cache, and the tokens that are in it."""

    tokens: array[int]
    kv: Kv | PagedKv
    salt: str
    session: str


class Prefixes:
    """See the module."""

    def __init__(self) -> None:
        self._kept: list[Kept] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def capacity_tokens(self) -> int:
        return sum(one.kv.capacity for one in self._kept)

    def keep(self, tokens: Sequence[int], kv: Kv | PagedKv, salt: str, session: str) -> None:
        if kv.length == 0:
            kv.free()
            return
        made = Kept(array("i", tokens[: kv.length]), kv, salt, session)
        for one in [*self._kept] if session else ():  # what it left before and went beyond now
            if _is_same(one, salt, session) and _begins(made, one.tokens):
                self._kept.remove(one)
                one.kv.free()
        self._kept.append(made)

    def find(self, tokens: Sequence[int], salt: str, session: str) -> tuple[Kept, int] | None:
        """The cache that agrees with the most of these tokens, and with how many; the session's own before others'."""
        wanted = array("i", tokens)
        best: tuple[Kept, int] | None = None
        best_rank = (0, False)
        for one in self._kept:
            if one.salt != salt:
                continue
            is_own = _is_same(one, salt, session)
            shared = common_prefix(one.tokens, wanted)
            if shared and (is_own or shared >= LEAST_SHARED_TOKENS) and (shared, is_own) > best_rank:
                best, best_rank = (one, shared), (shared, is_own)
        return best

    def take(self, kept: Kept) -> None:
        """It is no longer here; its cache belongs to whoever took it."""
        self._kept.remove(kept)

    def touch(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def forget_oldest(self, spared: Kept | None = None) -> bool:
        """Whether there was one to forget."""
        for place, one in enumerate(self._kept):
            if one is not spared:
                del self._kept[place]
                one.kv.free()
                return True
        return False

    def clear(self) -> None:
        for one in self._kept:
            one.kv.free()
        self._kept.clear()


def _is_same(kept: Kept, salt: str, session: str) -> bool:
    return bool(session) and kept.session == session and kept.salt == salt


def _begins(kept: Kept, tokens: array[int]) -> bool:
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
