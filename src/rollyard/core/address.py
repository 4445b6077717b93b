"""URLs of services: whether their host is local, and the certificate that they may pin.

https://10.0.0.1:8127#sha256:9f86d0…     a service whose certificate has this digest, whatever its issuer
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

_PIN = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


def is_loopback_host(host: str) -> bool:
    """Whether only programs on the same machine can reach the host."""
    host = host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def is_clear(url: str) -> bool:
    """Whether requests to the URL cross a network unencrypted."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback_host(parts.hostname or "")


def split_pin(url: str) -> tuple[str, bytes | None]:
    """Returns the URL without its pin, and the SHA-256 digest of the certificate (DER) or None.

    Raises ValueError for a malformed pin."""
    plain, mark, pin = url.partition("#")
    if not mark:
        return plain, None
    match = _PIN.fullmatch(pin)
    if match is None or not plain.startswith("https://"):
        raise ValueError("expected an https:// URL, then # and sha256: with 64 hexadecimal digits")
    return plain, bytes.fromhex(match[1])


def with_pin(url: str, digest: bytes) -> str:
    return f"{url}#sha256:{digest.hex()}"
