"""Converts a request's first line and headers to an ASGI scope, or to a refusal."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from math import inf
from typing import Any

import httptools

from rollyard.core.failure import BodyTooLarge, HeadersTooLarge, MalformedRequest, RequestError
from rollyard.http.bounds import ListenerBounds
from rollyard.http.refusals import Reason

Headers = Sequence[tuple[bytes, bytes]]


class Refusal(Exception):
    """Raised inside the parser, which then reads no further."""

    def __init__(self, reason: Reason, error: RequestError, status: int | None = None) -> None:
        self.reason = reason
        self.error = error
        self.status = status or error.status


def scope_of(method: bytes, target: bytes, headers: Headers, bounds: ListenerBounds) -> dict[str, Any]:
    """Returns the part of the scope that depends on the request alone. Raises `Refusal`."""
    if method == b"CONNECT":
        raise Refusal(Reason.TUNNEL, RequestError("tunnels are not supported"), status=405)
    try:
        url = httptools.parse_url(target)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
    except (httptools.HttpParserError, UnicodeDecodeError):
        raise Refusal(Reason.MALFORMED, MalformedRequest("the request's target is not a path")) from None
    if bounds.body_bytes < inf:
        for name, value in headers:
            if name == b"content-length" and int(value) > bounds.body_bytes:  # the parser accepts only numbers
                raise body_too_large(bounds)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": method.decode("ascii"),
        "path": urllib.parse.unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": url.query or b"",
        "root_path": "",
        "headers": headers,
    }


def expects_continue(headers: Headers) -> bool:
    """Whether the client sends its body only after `100 Continue`."""
    for name, value in headers:  # noqa: SIM110 - `any` of a generator takes three times as long, on each request
        if name == b"expect" and value.lower() == b"100-continue":
            return True
    return False


def size_of(target: bytes, headers: Headers) -> int:
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


def too_many_headers(bounds: ListenerBounds) -> Refusal:
    return Refusal(Reason.TOO_MANY_HEADERS, HeadersTooLarge(f"the request has more than {bounds.headers} headers"))


def headers_too_large(bounds: ListenerBounds) -> Refusal:
    detail = f"the request's headers are larger than {bounds.header_bytes} bytes"
    return Refusal(Reason.HEADERS_TOO_LARGE, HeadersTooLarge(detail))


def body_too_large(bounds: ListenerBounds) -> Refusal:
    return Refusal(Reason.BODY_TOO_LARGE, BodyTooLarge(f"the body is larger than {bounds.body_bytes} bytes"))
