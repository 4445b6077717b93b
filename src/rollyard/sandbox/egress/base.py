"""The egress settings of a sandbox, and the exception that refuses a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollyard.core.egress import READING, HostRule
from rollyard.sandbox.egress.addresses import is_this_machine
from rollyard.sandbox.egress.ledger import EgressLedger

EGRESS_PORT = 8130
"""On 127.0.0.1 in the network namespace of a sandbox with egress; the doorway has its own port."""


class Resolve(Protocol):
    """Returns all addresses of a name. Raises OSError if it has none."""

    async def __call__(self, host: str, port: int) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class ProxyBounds:
    """Limits of one proxy. A sandbox can only exhaust its own."""

    connections: int = 32  # open at once
    most_bytes: int = 1 << 30  # total sent and received by all proxies that share a ledger
    head_bytes: int = 16 << 10  # of a request's line and headers
    head_lines: int = 128
    answer_head_bytes: int = 64 << 10
    head_s: float = 10.0  # to receive a head, and to receive a ClientHello
    connect_s: float = 20.0  # to look a name up and to connect
    idle_s: float = 120.0  # without data in either direction: before the first byte of an answer, or in a tunnel
    names: int = 256  # different hosts that one proxy looks up


@dataclass(frozen=True, slots=True)
class Egress:
    """What one sandbox may reach. `env` is added to the environment of its commands."""

    rules: tuple[HostRule, ...]
    resolve: Resolve
    methods: tuple[str, ...] = READING
    private: tuple[HostRule, ...] = ()  # the operator's list of exact names and ports that may have private addresses
    bounds: ProxyBounds = field(default_factory=ProxyBounds)
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mirrors: Mapping[str, str] = field(default_factory=dict[str, str])
    ledger: EgressLedger = field(default_factory=EgressLedger, compare=False)
    is_own: Callable[[str], bool] = is_this_machine  # whether it is an address of the host, which is refused


class Refused(Exception):
    """Raised to refuse or end a connection. `verdict` goes into the record."""

    def __init__(self, verdict: str, detail: str, status: int = 403) -> None:
        super().__init__(detail)
        self.verdict, self.detail, self.status = verdict, detail, status
