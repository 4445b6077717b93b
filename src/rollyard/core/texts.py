"""Texts that several packages need: parts of error messages, so that a mistake is described in the same words
everywhere, and texts cut or read from messages."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from rollyard.core.json import Json

SIMILAR = 0.6  # difflib's ratio from which a name is suggested
MOST_DIFFERENCES = 3
MOST_CHARACTERS = 40  # of a value; longer ones are left out


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Returns the most similar of the names, or None if none is similar."""
    return next(iter(difflib.get_close_matches(name, [*names], 1, SIMILAR)), None)


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Returns "there is no runtime 'lokal' (did you mean 'local'?); there are: local, oci"."""
    names = list(names)
    near = nearest(name, names)
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    return f"there is no {kind} {name!r}{hint}; there are: {', '.join(names)}"


def differences(known: Mapping[str, Json], given: Mapping[str, Json]) -> str:
    """Describes the fields that differ: "seed is 0, not 7; defaults.limits.max_turns is 8, not 4"."""
    found = list(_differences(known, given, ""))
    more = f"; and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
    return "; ".join(found[:MOST_DIFFERENCES]) + more


def _differences(known: Mapping[str, Json], given: Mapping[str, Json], path: str) -> Iterator[str]:
    for name in dict.fromkeys((*known, *given)):
        old, new = known.get(name), given.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            shown = [_shown(value) for value in (old, new)]
            is_short = all(len(text) <= MOST_CHARACTERS for text in shown)
            yield f"{path}{name} is {shown[0]}, not {shown[1]}" if is_short else f"{path}{name} differs"


def _shown(value: Json) -> str:
    return "unset" if value is None else repr(value)


def cut_text(text: str, most: int) -> str:
    """Returns a text of more than `most` characters without its middle, and with the number of characters left out."""
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - head
    return f"{text[:head]}\n… {len(text) - most} characters left out …\n{text[len(text) - tail :]}"


def content_text(content: Json) -> str:
    """Returns the content of a message as text: a string as it is, and the texts of a list of parts, joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def os_reason(error: OSError) -> str:
    """Returns the text of an error, such as "Connection refused". For connections, asyncio names the call instead."""
    text = error.strerror or str(error)
    return os.strerror(error.errno) if error.errno and ("call failed" in text or "attempting to bind" in text) else text


def cannot_listen(host: str, port: int, error: OSError) -> tuple[str, str]:
    """Returns why a server cannot listen there, and what to do."""
    remedies = {
        errno.EADDRINUSE: "stop the program that uses this port, or give another one with --port",
        errno.EACCES: "give a port of 1024 or more with --port",
    }
    remedy = remedies.get(error.errno or 0, "give an address of this machine with --host")
    return f"{host}:{port} cannot be listened on: {os_reason(error)}", remedy


def url_problem(url: str) -> tuple[str, str] | None:
    """Returns what is wrong with an HTTP URL, and what to do; None if it can be used."""
    if "://" not in url:
        return f"{url!r} is not a URL: it has no http:// or https://", f"Write it as http://{url}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # of a port or of brackets
        is_good = False
    return None if is_good else (f"{url!r} is not an HTTP URL", "Write it as http://HOST:PORT")
