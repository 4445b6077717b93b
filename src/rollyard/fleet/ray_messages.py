"""The messages between the head and its Ray driver: JSON lines on the driver's standard input, which is a socket.

The head sends one DriverConfig, then DriverOrders; the driver answers with DriverReports. The head's token is in the
DriverConfig, and so in no argument list and no environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollyard.core import Json


@dataclass(frozen=True, slots=True)
class DriverConfig:
    """The first line: the driver's configuration."""

    address: str | None  # None: start a cluster on this machine that ends with this process
    namespace: str
    head_id: str
    head_url: str
    token: str
    entry: str
    settings: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class DriverOrder:
    """Any later line."""

    what: Literal["stop_nodes", "close"]
    bound_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of the Ray cluster, and the status of the node on it."""

    name: str
    ray_id: str
    host: str
    is_alive: bool
    error: str


@dataclass(frozen=True, slots=True)
class DriverReport:
    """A line to the head."""

    what: Literal["status", "superseded", "stopped", "failed"]
    nodes: tuple[RayNode, ...] = ()
    error: str = ""
