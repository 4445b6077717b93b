"""Reads the server name from a TLS client's ClientHello, before the proxy connects to the host.

The parser is strict: lengths must match exactly, an extension occurs once, and there is one name. A server might
interpret a malformed ClientHello differently, so it is never forwarded. Nothing after the ClientHello is inspected,
and no certificate.
"""

from __future__ import annotations

MOST_BYTES = 16 << 10
"""Largest ClientHello. One with post-quantum keys has about 2 KB."""

MOST_RECORDS = 16
"""Maximum number of records in which a ClientHello may arrive. Clients send one."""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class NotTls(ValueError):
    """Raised if the bytes are not the start of a TLS connection, or of one that this parser accepts."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise NotTls("a length in the ClientHello is wrong")
        self._at += size
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def sized(self, size: int) -> _Reader:
        return _Reader(self.take(self.number(size)))

    def end(self) -> None:
        if not self.is_done:
            raise NotTls("the ClientHello is longer than its length fields declare")


def complete_hello(data: bytes) -> bytes | None:
    """Returns the ClientHello in these records, without their headers, or None if it is incomplete. Raises NotTls."""
    hello, at = b"", 0
    for _ in range(MOST_RECORDS):
        header = data[at : at + 5]
        if header[:1] not in (b"", bytes([_HANDSHAKE])) or header[1:2] not in (b"", b"\x03"):
            raise NotTls("this is not the start of a TLS connection")
        if len(header) < 5:
            return None
        size = int.from_bytes(header[3:5])
        if not 0 < size <= MOST_BYTES:
            raise NotTls("a TLS record of that size cannot hold a ClientHello")
        part = data[at + 5 : at + 5 + size]
        hello, at = hello + part, at + 5 + size
        if hello and hello[0] != _CLIENT_HELLO:
            raise NotTls("the first TLS message is not a ClientHello")
        if len(hello) >= 4:
            hello_size = 4 + int.from_bytes(hello[1:4])
            if hello_size > MOST_BYTES:
                raise NotTls(f"the ClientHello is larger than {MOST_BYTES} bytes")
            if len(hello) >= hello_size:
                if len(hello) > hello_size or len(part) < size:
                    raise NotTls("the record contains more than a ClientHello")
                return hello
        if len(part) < size:
            return None
    raise NotTls("the ClientHello is split into too many records")


def server_name(hello: bytes) -> str | None:
    """Returns the name in its server_name extension, or None if it has none. Raises NotTls."""
    body = _Reader(hello[4:])
    body.take(2 + 32)  # version, random
    body.sized(1)  # session
    body.sized(2)  # ciphers
    body.sized(1)  # compressions
    if body.is_done:
        return None
    extensions = body.sized(2)
    body.end()
    seen: set[int] = set()
    name: str | None = None
    while not extensions.is_done:
        kind, content = extensions.number(2), extensions.sized(2)
        if kind in seen:
            raise NotTls("the ClientHello repeats an extension")
        seen.add(kind)
        if kind == _SERVER_NAME:
            names = content.sized(2)
            content.end()
            if names.number(1) != _HOST_NAME:
                raise NotTls("the server name in the ClientHello is not a host name")
            raw = names.take(names.number(2))
            names.end()
            if not raw.isascii():
                raise NotTls("the name in the ClientHello is not ASCII")
            name = raw.decode("ascii")
    return name
