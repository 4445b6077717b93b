"""The state machine: legal moves, and their effect on the attempt."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import LIVE, MOVES, IllegalMove, Position, State


@given(st.lists(st.sampled_from(list(State)), max_size=40))
def test_only_moves_of_the_table_are_legal_and_only_requeuing_increments_the_attempt(targets: list[State]):
    position = Position()
    for target in targets:
        before = position
        if target not in MOVES[before.state]:
            with pytest.raises(IllegalMove):
                before.to(target)
            continue
        position = before.to(target)
        assert position.attempt == before.attempt + (target is State.QUEUED)
        assert before.state is not State.ENDED


def test_ended_is_final_and_reachable_from_every_state():
    assert MOVES[State.ENDED] == frozenset()
    assert all(State.ENDED in MOVES[state] for state in State if state is not State.ENDED)


def test_stages_are_in_order_and_cannot_be_skipped():
    way = [State.QUEUED, State.INIT, State.READY, State.RUN, State.EVAL, State.ENDED]
    for here, there in itertools.pairwise(way):
        assert there in MOVES[here]
    for index, here in enumerate(way[:-1]):
        for later in way[index + 2 : -1]:
            assert later not in MOVES[here], f"{here} → {later} would skip a stage"


def test_live_states_are_those_between_queued_and_ended():
    assert set(State) - LIVE == {State.QUEUED, State.ENDED}
