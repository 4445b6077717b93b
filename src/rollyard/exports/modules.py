"""Joins ES modules into one script, so that a page can contain them and forbid all other code by its hash.

Each module becomes a function that is called once, in the order of the imports, and returns its exports. This is not a
general bundler: it supports the forms that the modules of `rollyard.web` use and raises `ValueError` for all others.
Bindings are copied when a module has run; `export let` and circular imports are therefore refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_START = r"(?:^|(?<=[;}]))[ \t]*"
_FROM = r"\s*from\s*[\"'](?P<path>[^\"']+)[\"'][ \t]*;?"
_NAME = r"[A-Za-z_$][\w$]*"

_IMPORT = re.compile(
    rf"{_START}import\s*(?:(?P<default>{_NAME})\s*)?,?\s*(?:\{{(?P<names>[^}}]*)\}}|\*\s*as\s+(?P<all>{_NAME}))?{_FROM}",
    re.MULTILINE,
)
_IMPORT_ONLY = re.compile(rf"{_START}import\s*[\"'](?P<path>[^\"']+)[\"'][ \t]*;?", re.MULTILINE)
_EXPORT_FROM = re.compile(rf"{_START}export\s*(?:\{{(?P<names>[^}}]*)\}}|\*){_FROM}", re.MULTILINE)
_EXPORT_NAMES = re.compile(rf"{_START}export\s*\{{(?P<names>[^}}]*)\}}[ \t]*;?", re.MULTILINE)
_EXPORT_DECLARED = re.compile(
    rf"{_START}export\s+(?P<kind>async\s+function\*?|function\*?|class|const)\s+(?P<name>{_NAME})", re.MULTILINE
)
_EXPORT_DEFAULT_NAMED = re.compile(
    rf"{_START}export\s+default\s+(?P<kind>async\s+function|function|class)\s+(?P<name>{_NAME})", re.MULTILINE
)
_EXPORT_DEFAULT_FUNCTION = re.compile(
    rf"{_START}export\s+default\s+(?P<kind>async\s+function|function)\s*(?=\()", re.MULTILINE
)
_EXPORT_DEFAULT = re.compile(rf"{_START}export\s+default\s+", re.MULTILINE)
_DYNAMIC = re.compile(r"\bimport\(\s*[\"']([^\"']+)[\"']\s*\)")
_LEFT = re.compile(rf"{_START}(?:import|export)\b(?!\()|\bimport\.meta\b|\bimport\(", re.MULTILINE)

DEFAULT = "$default"


@dataclass(slots=True)
class _Module:
    """A module's code without imports and exports, and what it exports: name → expression."""

    code: str
    exports: dict[str, str] = field(default_factory=dict[str, str])
    spread: list[str] = field(default_factory=list[str])  # variables of modules that are exported as a whole


class _Joined:
    def __init__(self, read: Callable[[str], str]) -> None:
        self._read = read
        self.variables: dict[str, str] = {}  # path → variable, in the order of evaluation
        self.exports: dict[str, set[str]] = {}
        self.scripts: list[str] = []
        self._open: list[str] = []

    def add(self, path: str) -> str:
        """Adds a module after those that it imports. Returns its variable."""
        if path in self.variables:
            return self.variables[path]
        if path in self._open:
            raise ValueError(f"a circular import: {' → '.join([*self._open, path])}")
        self._open.append(path)
        module = self._convert(path, self._read(path))
        self._open.pop()
        variable = self.variables[path] = f"$module{len(self.variables)}"
        self.exports[path] = set(module.exports)
        parts = [f"...{other}" for other in module.spread]
        parts += [f"{name}: {value}" for name, value in module.exports.items()]
        code = module.code.strip("\n")
        self.scripts.append(
            f"// {path}\nconst {variable} = (() => {{\n{code}\nreturn {{ {', '.join(parts)} }};\n}})();\n"
        )
        return variable

    def _convert(self, path: str, code: str) -> _Module:
        module = _Module("")

        def other(specifier: str) -> str:
            if not specifier.startswith((".", "..")):
                raise ValueError(f"{path}: imports {specifier!r}, which is not a relative path")
            return self.add(posixpath.normpath(posixpath.join(posixpath.dirname(path), specifier)))

        def imported(match: re.Match[str]) -> str:
            variable, found = other(match["path"]), list[str]()
            if match["default"]:
                found.append(f"default: {match['default']}")
            if match["names"] is not None:
                found += [f"{name}: {local}" if name != local else name for name, local in _names(match["names"])]
            if match["all"]:
                return f"const {match['all']} = {variable};"
            return f"const {{ {', '.join(found)} }} = {variable};"

        def exported_from(match: re.Match[str]) -> str:
            variable = other(match["path"])
            if match["names"] is None:
                module.spread.append(variable)
            else:
                module.exports.update({local: f"{variable}.{name}" for name, local in _names(match["names"])})
            return ""

        def exported(match: re.Match[str]) -> str:
            module.exports.update({outer: name for name, outer in _names(match["names"])})
            return ""

        def declared(match: re.Match[str]) -> str:
            module.exports[match["name"]] = match["name"]
            return f"{match['kind']} {match['name']}"

        def default_named(match: re.Match[str]) -> str:
            module.exports["default"] = match["name"]
            return f"{match['kind']} {match['name']}"

        def default_function(match: re.Match[str]) -> str:
            module.exports["default"] = DEFAULT
            return f"{match['kind']} {DEFAULT}"

        def default(_: re.Match[str]) -> str:
            module.exports["default"] = DEFAULT
            return f"const {DEFAULT} = "

        code = _EXPORT_FROM.sub(exported_from, code)
        code = _IMPORT.sub(imported, code)
        code = _IMPORT_ONLY.sub(lambda match: other(match["path"]) and "", code)
        code = _EXPORT_NAMES.sub(exported, code)
        code = _EXPORT_DECLARED.sub(declared, code)
        code = _EXPORT_DEFAULT_NAMED.sub(default_named, code)
        code = _EXPORT_DEFAULT_FUNCTION.sub(default_function, code)
        code = _EXPORT_DEFAULT.sub(default, code)
        code = _DYNAMIC.sub(lambda match: f"Promise.resolve({other(match[1])})", code)
        if (left := _LEFT.search(code)) is not None:
            line = code[left.start() : left.start() + 80].strip().splitlines()[0]
            raise ValueError(f"{path}: this form of import or export is not supported: {line}")
        module.code = code
        return module


def _names(text: str) -> list[tuple[str, str]]:
    """The pairs of `a as b, c`: (a, b), (c, c)."""
    pairs: list[tuple[str, str]] = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, alias = item.partition(" as ")
        pairs.append((name.strip(), alias.strip() or name.strip()))
    return pairs


def join_modules(entry: str, read: Callable[[str], str]) -> tuple[str, dict[str, set[str]]]:
    """Returns one script that does what the module `entry` and its imports do, and each module's exported names.

    `read` returns the text of a module by its path.
    """
    joined = _Joined(read)
    joined.add(entry)
    return "".join(joined.scripts), joined.exports
