"""The start of every script inside the sandbox: text for `python3 -c`, whose arguments are the servers' ports."""

import os
import socket
import ssl
import struct
import sys
import time  # noqa: F401  (for the scripts)

PROXY = ("127.0.0.1", 8130)
AP, AT, FP, FT = map(int, sys.argv[1:5])
ALLOWED, FORBIDDEN = "allowed.test", "forbidden.test"


def send(data, wait=5):
    """Sends these bytes and returns the proxy's whole answer."""
    if isinstance(data, str):
        data = data.encode("latin-1")
    with socket.create_connection(PROXY, wait) as sock:
        try:
            sock.sendall(data)
        except OSError:
            pass
        return read_all(sock)


def read_all(sock):
    got = b""
    try:
        while part := sock.recv(65536):
            got += part
    except OSError:
        pass
    return got


def get(target, *headers, method="GET", version="1.1", body=b"", host=None):
    if host is None:
        host = target.split("//", 1)[-1].split("/", 1)[0]
    lines = [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host else []), *headers]
    return send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)


def connect(target, wait=5):
    """Returns the socket of a CONNECT that received a 200; else the answer."""
    sock = socket.create_connection(PROXY, wait)
    sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode("latin-1"))
    got = b""
    while b"\r\n\r\n" not in got:
        part = sock.recv(1)
        if not part:
            break
        got += part
    return (sock, got) if b" 200 " in got.split(b"\r\n")[0] else (None, got + read_all(sock))


def tls(target, name, path="/"):
    """Sends an HTTPS GET for `name` through a tunnel to `target`. Returns the answer or the error."""
    sock, got = connect(target)
    if sock is None:
        return got
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    context.check_hostname = False
    try:
        with context.wrap_socket(sock, server_hostname=name) as wrapped:
            wrapped.sendall(f"GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
            return read_all(wrapped)
    except OSError as error:
        return f"error: {error}".encode()


def hello(*names, extensions=b"", records=None):
    """Builds a ClientHello with these names in its SNI, split into `records`."""
    listed = b"".join(b"\0" + struct.pack("!H", len(name)) + name for name in names)
    sni = struct.pack("!HHH", 0, len(listed) + 2, len(listed)) + listed if names else b""
    all_extensions = sni + extensions
    body = b"\x03\x03" + os.urandom(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += struct.pack("!H", len(all_extensions)) + all_extensions
    message = b"\x01" + struct.pack("!I", len(body))[1:] + body
    size = len(message) if records is None else -(-len(message) // records)
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in parts)


def tunnel(target, data):
    """Sends these bytes through a CONNECT and returns the answer."""
    sock, got = connect(target)
    if sock is None:
        return got
    try:
        sock.sendall(data)
    except OSError:
        pass
    return read_all(sock)


def show(data):
    print((data if isinstance(data, bytes) else str(data).encode())[:4000].decode("utf-8", "replace"))
