"""The messages between head and node: they survive a round trip, and nothing else is accepted."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import LostAttempt, Mode, Position, Rollout, Run, State, Task
from rollyard.core.engine import EngineSpec, Kind
from rollyard.core.failure import InvalidRequest
from rollyard.core.policy import PauseMode
from rollyard.engines.weights.weight_gates import EngineGate, PolicyGate, WeightGates
from rollyard.fleet.messages import (
    Blob,
    Cancel,
    Ended,
    EngineUse,
    Join,
    Joined,
    Key,
    Lease,
    Moved,
    NodeStatus,
    Orders,
    Poll,
    PoolUse,
    Report,
    Reported,
    Returned,
    Saved,
    View,
    ViewRequest,
    decode,
    encode,
    info_of,
    lease_of,
    rollout_of,
)
from rollyard.store.codec import to_json

MESSAGES = (Join, Joined, Poll, Orders, Report, Reported, View)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
small = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e6)
keys = st.builds(Key, text, small)
places = st.builds(PoolUse, small, small, small)
standings = st.builds(
    NodeStatus,
    got=small,
    want=small,
    gates=st.integers(-1, 1 << 60),
    is_drained=st.booleans(),
    pools=st.dictionaries(text, places, max_size=3),
    engines=st.lists(st.builds(EngineUse, text, small, small, small), max_size=3),
)
json = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
lost = st.builds(LostAttempt, small, text, text, st.none() | text, small, text)
items = st.one_of(
    st.builds(Moved, keys, st.sampled_from(State)),
    st.builds(Saved, keys, st.binary(max_size=20), small, text, st.lists(st.builds(Blob, text, st.binary(max_size=9)))),
    st.builds(Ended, keys, text, st.none() | st.binary(max_size=20), small),
    st.builds(Returned, keys, lost, st.booleans()),
)
gates = st.builds(
    WeightGates,
    small,
    st.just((EngineSpec("e1", "http://127.0.0.1:1", Kind.VLLM),)) | st.just(()),
    st.lists(
        st.builds(
            PolicyGate,
            text,
            small,
            st.booleans(),
            st.booleans(),
            st.lists(st.builds(EngineGate, text, small, mode=st.none() | st.sampled_from(PauseMode)), max_size=2).map(
                tuple
            ),
        ),
        max_size=2,
    ).map(tuple),
)
runs = st.builds(Run, text, st.sampled_from(Mode), text, st.dictionaries(text, json, max_size=2))
messages = st.one_of(
    st.builds(Join, small, text, text, text, text, st.lists(keys, max_size=3), standings, st.booleans()),
    st.builds(Joined, small, seconds, seconds, st.lists(keys, max_size=3)),
    st.builds(Poll, text, standings),
    st.builds(
        Orders,
        small,
        st.lists(st.builds(Lease, text, text), max_size=2),
        st.lists(text, max_size=2),
        st.lists(st.builds(Cancel, keys, text), max_size=2),
        st.none() | gates,
        st.none() | st.booleans(),
        st.lists(st.builds(ViewRequest, text, keys, st.none() | small), max_size=2),
    ),
    st.builds(View, text, text, small, small, st.binary(max_size=9), small, st.binary(max_size=9)),
    st.builds(Report, text, standings, st.lists(items, max_size=4), st.booleans()),
    st.builds(Reported, st.lists(keys, max_size=3)),
)


@given(messages)
def test_messages_survive_a_round_trip(message: msgspec.Struct) -> None:
    assert decode(encode(message), type(message)) == message


@given(st.binary(max_size=60), st.sampled_from(MESSAGES))
def test_random_bytes_raise_only_invalid_request(data: bytes, kind: type[msgspec.Struct]) -> None:
    try:
        decode(data, kind)
    except InvalidRequest as error:
        assert kind.__name__ in error.detail


@given(messages, st.integers(0, 400), st.integers(0, 255))
def test_one_wrong_byte_raises_only_invalid_request(message: msgspec.Struct, at: int, byte: int) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    try:
        decode(bytes(data), type(message))
    except InvalidRequest:
        pass


@pytest.mark.parametrize("kind", [Poll, Join, Report])
def test_anything_but_a_message_is_an_invalid_request(kind: type[msgspec.Struct]) -> None:
    for data in (b"", b"nonsense", b"\xc1", b"\x80", encode(Reported([])), b"\x81\xa1x" + b"\x91" * 100_000):
        with pytest.raises(InvalidRequest):
            decode(data, kind)


@given(st.dictionaries(text, json, max_size=3), st.integers(1, 1 << 40))
def test_a_lease_contains_the_rollout_as_it_was_queued(data: dict[str, object], attempt: int) -> None:
    rollout = Rollout("r1", "run", Task("shell", data), position=Position(State.QUEUED, attempt))  # type: ignore[arg-type]
    lease = decode(encode(Orders(1, [lease_of(rollout)])), Orders).leases[0]
    assert rollout_of(lease) == rollout and lease.run == "run"


@given(st.dictionaries(text, json, max_size=3))
def test_runs_info_is_sent_as_json(info: dict[str, object]) -> None:
    saved = Saved(Key("r1", 1), b"", 0, to_json(info), [])
    assert info_of(decode(encode(saved), Saved)) == info
