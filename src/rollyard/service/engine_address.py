"""Checks of engine addresses: in a fleet, a loopback address would refer to each node itself."""

from __future__ import annotations

import logging

from rollyard.core.failure import InvalidRequest
from rollyard.engines.base import EngineSpec
from rollyard.service.settings import Settings

log = logging.getLogger("rollyard.service")


def check_reachable(spec: EngineSpec, settings: Settings) -> None:
    """Raises `InvalidRequest` for an engine that the nodes of a fleet would look for on their own machines, or whose
    key would be sent to them unencrypted."""
    if settings.is_in_clear and spec.api_key:
        raise InvalidRequest(
            f"engine {spec.id}: its key would be sent to the nodes in the clear; serve TLS (tls = own)"
        )
    if settings.fleet is None or not spec.is_loopback:
        return
    is_allowed = settings.is_loopback if settings.loopback_engines is None else settings.loopback_engines
    if not is_allowed:
        raise InvalidRequest(
            f"engine {spec.id}: its URL is a loopback address, which refers to each node of the fleet itself; use an"
            " address that every node reaches, or set loopback_engines if all nodes run on this machine"
        )
    log.warning("an engine has a loopback address: only nodes on this machine can reach it", extra={"engine": spec.id})
