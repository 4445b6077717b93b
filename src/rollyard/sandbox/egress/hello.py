"""The name that a TLS client asks for, read from its ClientHello before anyone is connected.

Strict: lengths have to fit exactly, an extension comes once, the name is one. A server might read a wrong hello
differently from us, so a wrong one goes nowhere. Neither a certificate nor anything after the hello is looked at.
"""

from __future__ import annotations

MOST_BYTES = 16 << 10
"""Of a hello. One with post-quantum keys has about 2 KB."""

MOST_RECORDS = 16
"""That it may be cut into. Clients send one."""

_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class NotTls(ValueError):
    """These bytes are not the beginning of a TLS connection, or of none that we can read."""


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
            raise NotTls("there is more in the ClientHello than its lengths say")


def whole_hello(data: bytes) -> bytes | None:
    """The ClientHello in these records, without their headers; None: more has to come. NotTls."""
    hello, at = b"", 0
    for _ in range(MOST_RECORDS):
        header = data[at : at + 5]
        if header[:1] not in (b"", bytes([_HANDSHAKE])) or header[1:2] not in (b"", b"\x03"):
            raise NotTls("this does not begin as TLS does")
        if len(header) < 5:
            return None
        size = int.from_bytes(header[3:5])
        if not 0 < size <= MOST_BYTES:
            raise NotTls("a TLS record of that size holds no ClientHello")
        part = data[at + 5 : at + 5 + size]
        hello, at = hello + part, at + 5 + size
        if hello and hello[0] != _CLIENT_HELLO:
            raise NotTls("TLS begins with a ClientHello")
        if len(hello) >= 4:
            wanted = 4 + int.from_bytes(hello[1:4])
            if wanted > MOST_BYTES:
                raise NotTls(f"a ClientHello has at most {MOST_BYTES} bytes here")
            if len(hello) >= wanted:
                if len(hello) > wanted or len(part) < size:
                    raise NotTls("there is more in the record than a ClientHello")
                return hello
        if len(part) < size:
            return None
    raise NotTls("the ClientHello is cut into too many records")


def server_name(hello: bytes) -> str | None:
    """The name in its server_name extension; None: it has none. NotTls."""
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
            raise NotTls("an extension of the ClientHello comes twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            names = content.sized(2)
            content.end()
            if names.number(1) != _HOST_NAME:
                raise NotTls("the ClientHello names something that is no host")
            raw = names.take(names.number(2))
            names.end()
            if not raw.isascii():
                raise NotTls("the name in the ClientHello is not ASCII")
            name = raw.decode("ascii")
    return name
