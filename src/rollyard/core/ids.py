"""Identifiers: which ids clients may use, how ids are generated, and how ids of different runs are kept apart.

Clients name rollouts, groups, draws, evaluations and sessions by short ids, which are unique within a run. Internally
and in the store, each has a *key*: `RUN~ID`, or the id alone in the default run. No id contains `~`, so no client can
name a key of another run.
"""

from __future__ import annotations

import os
import re
import time
from hashlib import blake2b

from rollyard.core.failure import MalformedId

DEFAULT_RUN = "default"
SEPARATOR = "~"

_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: sorts like the number, no look-alikes


def new_id(prefix: str) -> str:
    """`prefix_` + 10 characters of time + 13 random characters: unique, and sorts by time of creation."""
    number = (time.time_ns() // 1_000_000 << 65) | int.from_bytes(os.urandom(9), "big") >> 7
    letters = ""
    for _ in range(23):
        letters = _ALPHABET[number & 31] + letters
        number >>= 5
    return f"{prefix}_{letters}"


def check_id(value: str, what: str = "id") -> str:
    """Returns the id unchanged, or raises `MalformedId`."""
    if not _PATTERN.fullmatch(value):
        raise MalformedId(f"{what} {value[:140]!r} is not a valid identifier")
    return value


def key_of(run: str, id: str) -> str:
    """Returns the key of the item with that id in that run."""
    return id if run == DEFAULT_RUN else f"{run}{SEPARATOR}{id}"


def id_of(key: str) -> str:
    """Returns the client's id, without the run."""
    return key.rpartition(SEPARATOR)[2]


def sampling_seed(run_seed: int, rollout_id: str, turn: int) -> int:
    """Returns the seed of one model call. It depends neither on the attempt (a retry samples the same way) nor on the
    name of the run."""
    raw = blake2b(f"{run_seed}\0{id_of(rollout_id)}\0{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(raw, "big") >> 1  # engines require a non-negative int32
