"""What goes between a head and its nodes. Nodes call; the head answers.

    POST /v1/fleet/join    `Join`   → `Joined`     who it is, how large, what it still holds of an earlier contact
    POST /v1/fleet/poll    `Poll`   → `Orders`     held until there is something to do: leases, cancels, gates
    POST /v1/fleet/report  `Report` → `Reported`   what happened; answered when all of it is durable

Bodies are msgpack. Tokens travel once, with the end of RUN, in the store's own encoding, which the head does not read.
Rollouts are JSON inside: integers of any size come back as they were.

Invariants. Orders are numbered; what a node has not said to have `got` is sent again. A call of a session that the head
does not know (any more) is answered with 409 `node_unknown`, and changes nothing: the node joins then, and says what it
holds. Every struct is decoded strictly; whatever else comes is `InvalidRequest`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rollyard.core import Json, LostAttempt, Rollout, Run, State
from rollyard.core.failure import InvalidRequest
from rollyard.engines.weights.weight_gates import WeightGates
from rollyard.store.codec import from_json, to_json

PROTOCOL = 1
"""Raised when an older node could not talk to a newer head, or the other way round."""

MEDIA_TYPE = "application/msgpack"

T = TypeVar("T")


class Key(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of one rollout."""

    id: str
    attempt: int


class PoolUse(msgspec.Struct, frozen=True, array_like=True):
    """A pool as it stands."""

    size: int
    active: int
    waiting: int


class EngineUse(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of an engine now, has had of it in all, and whether it can use it."""

    engine: str
    sessions: int
    in_flight: int
    tokens: int
    is_reachable: bool = True  # it has sampled a token for this node, and has not failed since
    error: str = ""  # why not; empty while it has not been tried


class NodeStatus(msgspec.Struct, frozen=True):
    """How a node stands, said with every call."""

    got: int = 0  # the last orders that it received
    want: int = 0  # rollouts that it could take beyond those
    gates: int = -1  # the last gates that it has applied in full
    is_drained: bool = False  # takes nothing more, until it is told to resume
    pools: dict[str, PoolUse] = {}
    engines: list[EngineUse] = []


class Join(msgspec.Struct, frozen=True):
    protocol: int
    version: str  # of Rollyard
    name: str
    session: str
    host: str
    holds: list[Key] = []  # at work, or ended and not handed over yet
    standing: NodeStatus = NodeStatus()


class Joined(msgspec.Struct, frozen=True):
    epoch: int
    lease_s: float
    hold_s: float
    keeps: list[Key] = []  # of what it holds: still its own. The rest was given back, and is to be ended


class Poll(msgspec.Struct, frozen=True):
    session: str
    standing: NodeStatus


class Lease(msgspec.Struct, frozen=True):
    rollout: str  # JSON, as it was in the queue
    run: str
    queued_s: float = 0.0  # it had waited so long at the head: clocks of machines differ


class Cancel(msgspec.Struct, frozen=True):
    key: Key
    detail: str


class Orders(msgspec.Struct, frozen=True):
    number: int
    leases: list[Lease] = []
    runs: list[str] = []  # JSON: those of the leases that it does not know yet, or not as they are
    cancels: list[Cancel] = []
    gates: WeightGates | None = None
    is_drained: bool | None = None  # None: as it was


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    key: Key
    state: State


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """An artifact: its name and its bytes."""

    name: str
    data: bytes


class Saved(msgspec.Struct, frozen=True, array_like=True, tag="saved"):
    """RUN is over: its trajectory, encoded, and what a later EVAL would need."""

    key: Key
    data: bytes
    sampled_tokens: int
    info: str  # JSON
    artifacts: list[Blob]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    key: Key
    ending: str  # JSON
    data: bytes | None  # its trajectory, where none was saved before
    sampled_tokens: int


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """An attempt that failed for infrastructure's sake, or was drained: to be run again."""

    key: Key
    lost: LostAttempt
    is_excused: bool


Item = Moved | Saved | Ended | Returned


class Report(msgspec.Struct, frozen=True):
    session: str
    standing: NodeStatus
    items: list[Item] = []
    is_leaving: bool = False  # it goes away: what it still holds is given back at once


class Reported(msgspec.Struct, frozen=True):
    refused: list[Key] = []  # not its own any more: somebody else has them, or they have ended


_ENCODER = msgspec.msgpack.Encoder()
_ROLLOUTS = msgspec.json.Decoder(Rollout)


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """`InvalidRequest` for anything but a `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"this is no {kind.__name__} of the fleet's protocol {PROTOCOL}: {error}") from error


def lease_of(rollout: Rollout, queued_s: float = 0.0) -> Lease:
    return Lease(to_json(rollout), rollout.run, queued_s)


def rollout_of(lease: Lease) -> Rollout:
    return _ROLLOUTS.decode(lease.rollout)


def run_of(text: str) -> Run:
    return from_json(text, Run)


def info_of(saved: Saved) -> dict[str, Json]:
    return from_json(saved.info, dict[str, Json])
