"""The messages between a head and its nodes. Nodes call; the head answers.

    POST /v1/fleet/join    `Join`   → `Joined`     the node's name and status, and what it still holds
    POST /v1/fleet/poll    `Poll`   → `Orders`     held until there is something to do: leases, cancels, gates
    POST /v1/fleet/report  `Report` → `Reported`   what happened; answered when all of it is durable
    POST /v1/fleet/view    `View`   → `Viewed`     a part of a running rollout, which the orders asked for

Bodies are msgpack. Tokens are sent once, with the end of RUN, in the store's own encoding, which the head does not
decode. Rollouts are JSON inside, which preserves integers of any size.

Invariants. Orders are numbered; what a node has not confirmed with `got` is sent again, except requests for views. A
call of a session that the head does not know (any more) is answered with 409 `node_unknown` and changes nothing: the
node then joins and reports what it holds. Every struct is decoded strictly; anything else is `InvalidRequest`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rollyard.core import Json, LostAttempt, Rollout, Run, State
from rollyard.core.failure import InvalidRequest
from rollyard.engines.weights.weight_gates import WeightGates
from rollyard.store.codec import from_json, to_json

PROTOCOL = 1
"""Incremented when older nodes and newer heads, or the reverse, cannot communicate."""

MEDIA_TYPE = "application/msgpack"

T = TypeVar("T")


class Key(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of one rollout."""

    id: str
    attempt: int


class PoolUse(msgspec.Struct, frozen=True, array_like=True):
    """Size and use of a pool."""

    size: int
    active: int
    waiting: int


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """A node's current and total use of an engine, and whether it can use it."""

    engine: str
    sessions: int
    in_flight: int
    tokens: int
    is_reachable: bool = True  # it has sampled a token for this node, and has not failed since
    error: str = ""  # why not; empty while it has not been tried


class NodeStatus(msgspec.Struct, frozen=True):
    """A node's status, sent with every call."""

    got: int = 0  # number of the last orders that it received
    want: int = 0  # rollouts that it could take in addition
    gates: int = -1  # number of the last gates that it has fully applied
    is_drained: bool = False  # takes nothing more until it is resumed
    pools: dict[str, PoolUse] = {}
    engines: list[EngineUse] = []


class Join(msgspec.Struct, frozen=True):
    protocol: int
    version: str  # of Rollyard
    name: str
    session: str
    host: str
    holds: list[Key] = []  # running, or ended and not handed over yet
    status: NodeStatus = msgspec.field(default=NodeStatus(), name="standing")
    sends_views: bool = False  # it answers requests for views


class Joined(msgspec.Struct, frozen=True):
    epoch: int
    lease_s: float
    hold_s: float
    keeps: list[Key] = []  # those of `holds` that it keeps; the rest was given back and must be ended


class Poll(msgspec.Struct, frozen=True):
    session: str
    status: NodeStatus = msgspec.field(name="standing")


class Lease(msgspec.Struct, frozen=True):
    rollout: str  # JSON, as it was in the queue
    run: str
    queued_s: float = 0.0  # time waited at the head: clocks of machines differ


class Cancel(msgspec.Struct, frozen=True):
    key: Key
    detail: str


class ViewRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the messages of a running attempt, for its calls, or for its agent program's requests. It is sent once
    and need not be answered."""

    id: str
    key: Key
    after: int | None  # messages from this number on; None: the calls, or
    requests: bool = False  # the requests of an agent program; an older node sends the calls


class Orders(msgspec.Struct, frozen=True):
    number: int
    leases: list[Lease] = []
    runs: list[str] = []  # JSON: those of the leases that are new to it or have changed
    cancels: list[Cancel] = []
    gates: WeightGates | None = None
    is_drained: bool | None = None  # None: unchanged
    views: list[ViewRequest] = []


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    key: Key
    state: State


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """An artifact: its name and its bytes."""

    name: str
    data: bytes


class Saved(msgspec.Struct, frozen=True, array_like=True, tag="saved"):
    """RUN is over: its encoded trajectory, and what a later EVAL needs."""

    key: Key
    data: bytes
    sampled_tokens: int
    info: str  # JSON
    artifacts: list[Blob]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    key: Key
    ending: str  # JSON
    data: bytes | None  # its trajectory, if none was saved before
    sampled_tokens: int
    evidence: bytes = b""  # of EVAL, as JSON


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """An attempt that failed because of infrastructure, or was drained: it will run again."""

    key: Key
    lost: LostAttempt
    is_excused: bool


Item = Moved | Saved | Ended | Returned


class Report(msgspec.Struct, frozen=True):
    session: str
    status: NodeStatus = msgspec.field(name="standing")
    items: list[Item] = []
    is_leaving: bool = False  # the node leaves: what it still holds is given back at once


class Reported(msgspec.Struct, frozen=True):
    refused: list[Key] = []  # not its own any more: another node has them, or they have ended


class View(msgspec.Struct, frozen=True):
    """The answer to a `ViewRequest`."""

    session: str
    id: str  # of the request
    turns: int = 0
    sampled_tokens: int = 0
    messages: bytes = b"[]"  # a JSON list
    end: int = 0  # the number after the last of them
    calls: bytes = b"{}"  # JSON, as `CallLog.info` returns it
    requests: bytes = b""  # JSON, as `RequestLog.encoded` returns it
    conversation: int = 0  # of the messages
    message_turns: list[int | None] = []

    @property
    def size_bytes(self) -> int:
        return len(self.messages) + len(self.calls) + len(self.requests)


class Viewed(msgspec.Struct, frozen=True):
    """A view was received."""


_ENCODER = msgspec.msgpack.Encoder()
_ROLLOUTS = msgspec.json.Decoder(Rollout)


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decodes a `kind`. Raises `InvalidRequest` for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"this is not a {kind.__name__} of the fleet's protocol {PROTOCOL}: {error}") from error


def lease_of(rollout: Rollout, queued_s: float = 0.0) -> Lease:
    return Lease(to_json(rollout), rollout.run, queued_s)


def rollout_of(lease: Lease) -> Rollout:
    return _ROLLOUTS.decode(lease.rollout)


def run_of(text: str) -> Run:
    return from_json(text, Run)


def info_of(saved: Saved) -> dict[str, Json]:
    return from_json(saved.info, dict[str, Json])
