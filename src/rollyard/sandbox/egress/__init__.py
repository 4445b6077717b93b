"""Egress of a sandbox that is otherwise offline: a forward proxy that reaches the hosts that its task lists."""

from rollyard.sandbox.egress.base import EGRESS_PORT, Egress, ProxyBounds, Resolve
from rollyard.sandbox.egress.ledger import EgressLedger
from rollyard.sandbox.egress.mirrors import egress_env, mirror_rule
from rollyard.sandbox.egress.proxy import EgressProxy
from rollyard.sandbox.egress.resolver import SystemResolver

__all__ = [
    "EGRESS_PORT",
    "Egress",
    "EgressLedger",
    "EgressProxy",
    "ProxyBounds",
    "Resolve",
    "SystemResolver",
    "egress_env",
    "mirror_rule",
]
