"""The templates of presets, `{{name}}` and `{{name|filter}}`: the names, the filters, and how they are filled.

Invariant: one pass. An inserted value is not read as a template again, so `{{model}}` in an instruction stays as it is.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Mapping

NAMES = frozenset(
    {"instruction", "base_url", "root_url", "model", "home", "workdir", "install", "arch", "machine", "python"}
)
PYTHON = "{{python}}"

_PLACE = re.compile(r"\{\{\s*(\w+)\s*(?:\|\s*(\w+)\s*)?\}\}")
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_ARCH = {"x86_64": "x64", "aarch64": "arm64"}


def _json(text: str) -> str:
    """Quotes a string so that JSON, YAML and TOML can read it: characters that one of them forbids are escaped, all
    others are unchanged (YAML does not join the two halves of a surrogate pair)."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


_FILTERS = {"json": _json, "sh": shlex.quote}


def machine_values() -> dict[str, str]:
    machine = platform.machine()
    return {"machine": machine, "arch": _ARCH.get(machine, machine)}


def names_in(text: str) -> set[str]:
    return {place[1] for place in _PLACE.finditer(text)}


def problem_of(text: str, *, without: str, is_argument: bool) -> str:
    """Returns the error in a template, or an empty string. `without` is a name that it cannot use: its own."""
    for place in _PLACE.finditer(text):
        name, filter_name = place[1], place[2]
        if name not in NAMES or name == without:
            return f"unknown {{{{{name}}}}}; there are {', '.join(sorted(NAMES))}"
        if filter_name is not None and filter_name not in _FILTERS:
            return f"unknown filter |{filter_name}; there are {', '.join(_FILTERS)}"
        if name == "python" and not (is_argument and text == PYTHON):
            return "{{python}} is several arguments: it must be a whole item of `command`"
    return ""


def filled_chars(text: str, values: Mapping[str, str]) -> int:
    """Returns the length of the filled template, before any filter, without filling it."""
    return len(text) + sum(len(values[place[1]]) for place in _PLACE.finditer(text))


def render(text: str, values: Mapping[str, str]) -> str:
    def fill(place: re.Match[str]) -> str:
        value = values[place[1]]
        return _FILTERS[place[2]](value) if place[2] else value

    return _PLACE.sub(fill, text)
