"""Decides which addresses a sandbox may connect to, whatever the host name."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"))
)
"""Metadata services of AWS, Alibaba, Azure, Oracle and AWS, which give out credentials. One of these addresses is in a
public range."""

_WRAPPERS = tuple(
    map(ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)
"""IPv6 ranges that contain IPv4 addresses: mapped, compatible, NAT64, 6to4, Teredo. They are never needed, and each
could hide a private address."""


def is_this_machine(address: str) -> bool:
    """Whether it is one of this machine's addresses, public or not: sandboxes must not reach the host's servers."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((address, 9))  # sends nothing; the kernel only selects the source address
            return probe.getsockname()[0] == address
    except OSError:  # no route
        return False


def why_not(text: str, *, may_be_private: bool) -> str:
    """Returns why this address is refused, or "" if it is allowed. `may_be_private`: the operator listed host and
    port."""
    try:
        address = ip_address(text)
    except ValueError:
        return "it is not an address"
    if address in METADATA:
        return "it is a cloud's metadata address"
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "it is an address with an interface scope"
        if address not in (IPv6Address("::"), IPv6Address("::1")) and any(address in each for each in _WRAPPERS):
            return "it is an IPv6 address that contains an IPv4 address"
    if address.is_multicast:
        return "it is a multicast address"
    if address.is_unspecified or (isinstance(address, IPv4Address) and int(address) >> 24 == 0):
        return "it is the unspecified address"
    if isinstance(address, IPv4Address) and address.is_reserved:
        return "it is a reserved address"
    if address.is_link_local:
        return "it is a link-local address"
    if may_be_private:
        return ""
    is_odd = isinstance(address, IPv6Address) and (address.is_site_local or address.is_reserved)
    return "" if address.is_global and not is_odd else "it is a private address"
