"""Identifiers and seeds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import check_id, digest, new_id, sampling_seed
from rollyard.core.failure import MalformedId


def test_generated_ids_are_valid_unique_and_sorted_by_creation_time():
    ids = [new_id("ro") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(check_id(id_) == id_ for id_ in ids)
    assert [id_[:13] for id_ in ids] == sorted(id_[:13] for id_ in ids)


@pytest.mark.parametrize("bad", ["", " ", "a b", "-a", ".a", "a/b", "a\n", "é", "a" * 129, "../x"])
def test_a_malformed_id_is_refused(bad: str):
    with pytest.raises(MalformedId):
        check_id(bad)


@given(st.integers(0, 2**63), st.text(max_size=20), st.integers(0, 1000))
def test_a_seed_is_a_function_of_run_rollout_and_turn(run_seed: int, rollout: str, turn: int):
    seed = sampling_seed(run_seed, rollout, turn)
    assert seed == sampling_seed(run_seed, rollout, turn)
    assert 0 <= seed < 2**31


def test_each_turn_of_each_rollout_has_its_own_seed():
    seeds = {sampling_seed(1, rollout, turn) for rollout in "abcdef" for turn in range(20)}
    assert len(seeds) == 120


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [1, None]}) == digest({"b": [1, None], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})
