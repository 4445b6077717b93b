"""Decides which hosts a proxy may connect to: checks the task's rules, then every address of the name.

Invariants. A name that no rule allows is never looked up: a lookup sends data to the zone's name servers. All
addresses in the answer must be allowed, not only the one that is used. The caller connects to an address that was
checked here, and never looks the name up again, so a changed DNS answer has no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollyard.core.egress import host_of, is_address, port_of
from rollyard.sandbox.egress.addresses import why_not
from rollyard.sandbox.egress.base import Egress, Refused

MOST_ADDRESSES = 64

LOOKUPS = 2
"""Concurrent lookups of one proxy: all proxies share the resolver's threads. One that was given up counts
until its thread is free."""


class EgressGate:
    """Checks the hosts, methods and addresses of one proxy's requests."""

    def __init__(self, egress: Egress) -> None:
        self._egress = egress
        self._names: set[str] = set()
        self._looking = asyncio.Semaphore(LOOKUPS)

    def check(self, host: str, port: int) -> None:
        """Raises Refused if no rule allows it. `host` is in the form that `host_of` returns."""
        if not any(rule.allows(host, port) for rule in self._egress.rules):
            what = "an address has to be listed literally" if is_address(host) else "it is not on this task's list"
            raise Refused("host", f"{host}:{port}: {what} (sandbox.egress)")

    def check_method(self, method: str) -> None:
        if method not in self._egress.methods:
            allowed = ", ".join(self._egress.methods)
            raise Refused("method", f"the method {method} is not allowed over plain HTTP, only {allowed}", 405)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Returns the addresses of a host. Raises Refused if any of them is not allowed."""
        if is_address(host):
            addresses = [host]
        else:
            self._names.add(host)
            if len(self._names) > self._egress.bounds.names:
                raise Refused("names", f"more than {self._egress.bounds.names} different hosts", 429)
            try:
                async with asyncio.timeout(self._egress.bounds.connect_s):
                    await self._looking.acquire()
                    lookup = asyncio.ensure_future(self._egress.resolve(host, port))
                    lookup.add_done_callback(self._looked_up)
                    addresses = list(await asyncio.shield(lookup))
            except TimeoutError:
                raise Refused("dns", f"{host} was not looked up in time", 504) from None
            except (OSError, UnicodeError) as error:  # UnicodeError: getaddrinfo's codec rejects the name
                raise Refused("dns", f"{host} has no address: {error}", 502) from None
        if not addresses or len(addresses) > MOST_ADDRESSES:
            raise Refused("dns", f"{host} has {len(addresses)} addresses", 502)
        is_named = any(rule.name == host and port in rule.ports for rule in self._egress.private)
        for address in addresses:
            why = why_not(address, may_be_private=is_named)
            if not why and not is_named and self._egress.is_own(address):
                why = "it is this machine's own address"
            if why:
                raise Refused("address", f"{host} has the address {address}, and {why}")
        return addresses

    def _looked_up(self, lookup: asyncio.Future[Sequence[str]]) -> None:
        self._looking.release()
        if not lookup.cancelled():
            lookup.exception()  # marks it as seen, so that asyncio does not log it


def split_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`, normalized. Raises Refused for user names, non-numeric ports and similar
    tricks."""
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = text, ""
    try:
        if not port and ((colon and not text.endswith("]")) or default_port is None):
            raise ValueError("a port was expected")
        return host_of(host), port_of(port) if port else default_port or 0
    except ValueError as error:
        raise Refused("request", f"{_shown(text)} is not HOST:PORT: {error}", 400) from None


def _shown(text: str) -> str:
    return repr(text[:100])
