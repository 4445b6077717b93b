"""Which addresses a sandbox may be connected to, whatever the name was."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"))
)
"""Of the clouds (AWS, Alibaba, Azure, Oracle, AWS): they hand out credentials. One of them looks like a public one."""

_WRAPPERS = tuple(
    map(ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)
"""IPv6 that stands for IPv4: mapped, compatible, NAT64, 6to4, Teredo. Never needed; each could hide a private one."""


def is_this_machine(address: str) -> bool:
    """Whether it is an address of this machine's own, public or not: what listens here is not for sandboxes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((address, 9))  # sends nothing: it only has the kernel choose our address towards it
            return probe.getsockname()[0] == address
    except OSError:  # no route
        return False


def why_not(text: str, *, may_be_private: bool) -> str:
    """Why nobody is connected to it; empty if that is fine. `may_be_private`: the operator named host and port."""
    try:
        address = ip_address(text)
    except ValueError:
        return "it is no address"
    if address in METADATA:
        return "it is a cloud's metadata address"
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "it is an address of one interface"
        if address not in (IPv6Address("::"), IPv6Address("::1")) and any(address in each for each in _WRAPPERS):
            return "it is an IPv4 address in the form of an IPv6 one"
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
