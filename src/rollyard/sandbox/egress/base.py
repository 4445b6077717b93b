"""What a sandbox may reach, as its runtime is told, and how a request is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollyard.core.egress import READING, HostRule
from rollyard.sandbox.egress.addresses import is_this_machine
from rollyard.sandbox.egress.ledger import EgressLedger

EGRESS_PORT = 8130
"""On 127.0.0.1 in the network namespace of a sandbox that has a way out; beside the doorway's."""


class Resolve(Protocol):
    """The addresses of a name, all of them. OSError if it has none."""

    async def __call__(self, host: str, port: int) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class ProxyBounds:
    """Of one proxy. Whoever is inside can only use up its own."""

    connections: int = 32  # open at once
    most_bytes: int = 1 << 30  # sent and received in all, by everything with the same ledger
    head_bytes: int = 16 << 10  # of a request's line and headers
    head_lines: int = 128
    answer_head_bytes: int = 64 << 10
    head_s: float = 10.0  # for a whole head, and for a whole ClientHello
    connect_s: float = 20.0  # to look a name up and to connect
    idle_s: float = 120.0  # in which nothing moves either way: before the first byte of an answer, or in a tunnel
    names: int = 256  # different hosts that one proxy looks up


@dataclass(frozen=True, slots=True)
class Egress:
    """What one sandbox may reach. `env` is what its commands find in their environment."""

    rules: tuple[HostRule, ...]
    resolve: Resolve
    methods: tuple[str, ...] = READING
    private: tuple[HostRule, ...] = ()  # exact names and ports that may have private addresses: the operator's
    bounds: ProxyBounds = field(default_factory=ProxyBounds)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mirrors: Mapping[str, str] = field(default_factory=dict[str, str])
    ledger: EgressLedger = field(default_factory=EgressLedger, compare=False)
    is_own: Callable[[str], bool] = is_this_machine  # an address that is ours, and for nobody in a sandbox


class Refused(Exception):
    """A connection that is not made, or not continued. `verdict` is what the record says."""

    def __init__(self, verdict: str, detail: str, status: int = 403) -> None:
        super().__init__(detail)
        self.verdict, self.detail, self.status = verdict, detail, status
