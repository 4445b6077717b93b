"""One HTML file with rollouts: the dashboard's rollout view, and the replies of the API that it reads.

The file needs no service and no network. Its Content-Security-Policy allows exactly one script and one style sheet, by
their hashes, and no connection at all, so nothing that an agent or a tool wrote can run or be sent anywhere. The data
is a block that browsers do not execute; characters that could end it are escaped. Equal rollouts give equal files.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollyard.core.files import replacing
from rollyard.core.version import __version__
from rollyard.exports.encoding import json_text
from rollyard.exports.modules import join_modules
from rollyard.exports.replies import Recorded, Reply, row

ENTRY = "js/exported.js"
MAX_BYTES = 256 << 20
"""Of the data of one file. Browsers refuse strings of 512 MiB, and need several times the size to read one."""

GENERATOR = "rollyard"
OPENING = '<script type="application/json" id="recorded">'
CLOSING = "</script>"

_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_STYLES = re.compile(r'<link rel="stylesheet" href="/assets/([^"]+)">')


class TooLarge(ValueError):
    """The rollouts do not fit into one file."""


@cache
def _parts() -> tuple[str, str, str]:
    """The script, the styles and the licences of the libraries in it."""
    folder = files("rollyard.web")

    def read(path: str) -> str:
        return folder.joinpath(path).read_text("utf-8")

    script, modules = join_modules(ENTRY, read)
    names = [name for name in _STYLES.findall(read("index.html")) if name != "vendor/uplot.css" or _has_charts(modules)]
    styles = "\n".join(read(name) for name in names)
    licences = read("vendor/LICENSES.txt")
    for part, end in ((script, "script"), (styles, "style"), (licences, "script")):
        if re.search(rf"</{end}|<!--", part, re.IGNORECASE):
            raise ValueError(f"a file of the dashboard contains </{end} or <!--, which would end its element early")
    return script, styles, licences


def _has_charts(modules: Mapping[str, object]) -> bool:
    return "vendor/uplot.js" in modules


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(script: str, styles: str) -> str:
    """The Content-Security-Policy of a file with this script and these styles."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def page(rollouts: Iterable[Recorded]) -> Iterator[str]:
    """Yields the file in parts. Raises `TooLarge` if the data exceeds `MAX_BYTES`."""
    script, styles, licences = _parts()
    yield (
        '<!doctype html>\n<html lang="en" data-offline>\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script, styles)}">\n'
        f'<meta name="generator" content="{GENERATOR} {__version__}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Rollyard</title>\n<style>{styles}</style>\n</head>\n<body>\n"
        '<div id="app"><p class="starting">Rollyard</p></div>\n'
        "<noscript>This page needs JavaScript, which is in the file itself.</noscript>\n"
    )
    yield OPENING
    yield from _data(rollouts)
    yield f"{CLOSING}\n"
    yield f'<script type="module">{script}</script>\n'
    yield f'<script type="text/plain" id="licences">\n{licences}</script>\n</body>\n</html>\n'


def _data(rollouts: Iterable[Recorded]) -> Iterator[str]:
    rows: list[dict[str, Any]] = []
    left = MAX_BYTES
    start = "{"
    for recorded in rollouts:
        rows.append(row(recorded.record))
        for address, reply in recorded.replies.items():
            text = f"{start}{encode(address)}:{encode([reply.status, reply.body])}"
            start = ",\n"
            left -= len(text)
            if left < 0:
                raise TooLarge(f"the data exceeds {MAX_BYTES >> 20} MiB after {len(rows) - 1} rollouts")
            yield text
    listed = Reply(200, {"rows": rows, "next": None, "total": len(rows), "total_is_exact": True, "behind": 0})
    yield f"{start}{encode('/v1/results')}:{encode([listed.status, listed.body])}}}"


def encode(value: object) -> str:
    """JSON that contains no markup, whatever is in its texts."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text(value))


def write_page(path: Path, rollouts: Iterable[Recorded]) -> None:
    """Writes the file; an interrupted or failed call leaves none, and an old one stays."""
    with replacing(path) as file:
        for part in page(rollouts):
            file.write(part.encode())
