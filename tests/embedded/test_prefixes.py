"""Kept caches: after any sequence of operations, `find` returns a cache with the longest matching prefix."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.trace import common_prefix
from rollyard.embedded.transformer.prefixes import GRAIN, PrefixCache


@dataclass(eq=False)
class Cache:
    length: int
    is_free: bool = False

    @property
    def capacity(self) -> int:
        return 2 * self.length

    def free(self) -> None:
        assert not self.is_free
        self.is_free = True


def stored(prefixes: PrefixCache, tokens: list[int], salt: str = "", session: str = "") -> Cache:
    cache: Any = Cache(len(tokens))
    prefixes.keep(tokens, cache, salt, session)
    return cache


def lookup(prefixes: PrefixCache, tokens: list[int], salt: str = "", session: str = "") -> tuple[Any, int] | None:
    one = prefixes.find(tokens, salt, session)
    return None if one is None else (one[0].kv, one[1])


def test_a_sessions_own_prefix_may_be_shorter_than_grain_but_not_that_of_another_session():
    prefixes = PrefixCache()
    own = stored(prefixes, [1, 2, 3], session="a")
    assert lookup(prefixes, [1, 2, 3, 4], session="a") == (own, 3)
    assert lookup(prefixes, [1, 2, 3, 4], session="b") is None
    other = stored(prefixes, list(range(GRAIN + 3)), session="c")
    assert lookup(prefixes, [*range(GRAIN + 1), 99], session="b") == (other, GRAIN + 1)
    assert lookup(prefixes, [*range(GRAIN - 1), 99], session="b") is None
    assert lookup(prefixes, list(range(GRAIN)), salt="s", session="c") is None, "found with another salt"


def test_a_longer_match_of_another_session_is_preferred_to_a_partial_match_of_the_own():
    prefixes = PrefixCache()
    stored(prefixes, [*range(20), 7, 7, 7], session="a")
    other = stored(prefixes, list(range(40)), session="b")
    assert lookup(prefixes, list(range(50)), session="a") == (other, 40)


def test_a_prefix_that_the_session_has_extended_is_freed():
    prefixes = PrefixCache()
    first = stored(prefixes, [1, 2], session="a")
    fork = stored(prefixes, [1, 3], session="a")
    second = stored(prefixes, [1, 2, 3], session="a")
    assert first.is_free and not fork.is_free and len(prefixes) == 2
    assert prefixes.capacity_tokens == fork.capacity + second.capacity


def test_the_least_recently_used_is_evicted_first_and_one_may_be_spared():
    prefixes = PrefixCache()
    caches = [stored(prefixes, [n] * GRAIN, session=str(n)) for n in range(3)]
    oldest = prefixes.find([0] * GRAIN, "", "")
    assert oldest is not None
    prefixes.touch(oldest[0])
    assert prefixes.forget_oldest() and caches[1].is_free
    assert prefixes.forget_oldest(spared=prefixes.find([2] * GRAIN, "", "")[0])  # pyright: ignore[reportOptionalSubscript]
    assert caches[0].is_free and not caches[2].is_free
    prefixes.clear()
    assert caches[2].is_free and not prefixes.forget_oldest() and prefixes.capacity_tokens == 0


@given(st.integers(0, 10_000))
def test_find_matches_as_much_as_a_linear_search(seed: int):
    chance = random.Random(seed)

    def history(length: int) -> list[int]:
        """Few different prefixes, so that many histories share one."""
        start = [chance.randrange(3)] * chance.randrange(1, 3 * GRAIN)
        return (start + [chance.randrange(2) for _ in range(length)])[:length]

    prefixes, alive = PrefixCache(), list[tuple[list[int], str, str, Cache]]()
    for _ in range(chance.randrange(1, 40)):
        tokens, salt, session = history(chance.randrange(1, 90)), chance.choice(["", "s"]), chance.choice("abc")
        alive.append((tokens, salt, session, stored(prefixes, tokens, salt, session)))
        if chance.random() < 0.2:
            prefixes.forget_oldest()
        alive = [one for one in alive if not one[3].is_free]
    assert len(prefixes) == len(alive) and prefixes.capacity_tokens == sum(one[3].capacity for one in alive)
    query, salt, session = history(80), chance.choice(["", "s"]), chance.choice("abc")
    shares = [(_shared(tokens, query), who) for tokens, its, who, _ in alive if its == salt]
    best = max((shared for shared, who in shares if who == session or shared >= GRAIN), default=0)
    one = prefixes.find(query, salt, session)
    assert (one is None) == (best == 0)
    if one is not None:
        is_whole = one[0].session == session and one[1] == len(one[0].tokens)
        assert one[1] == _shared(one[0].tokens, query) and one[0].salt == salt
        assert is_whole or one[1] // GRAIN == best // GRAIN or one[1] == best


def _shared(one: Any, other: Any) -> int:
    return common_prefix(array("i", one), array("i", other))
