'''A preset: a small TOML file that describes how to run an unmodified agent program.

    name = "my-agent"                 # its name in tasks: lower case letters, digits and -
    version = "1.2.3"                 # of the program
    about = "One line for `rollyard agents list`."
    dialect = "chat"                  # its API: chat, responses or messages; any: not specified
    command = ["{{python}}", "-m", "my_agent", "--task", "{{instruction}}"]
    stdin = ""                        # its standard input; empty by default
    workdir = ""                      # its working directory; empty: the environment's
    model = "policy"                  # the model name that it gets; the gateway accepts any name and echoes it

    [env]                             # added to the sandbox's own; HOME is {{home}} unless set here
    OPENAI_BASE_URL = "{{base_url}}"
    OPENAI_API_KEY = "none"

    [[files]]                         # written before it starts
    path = "{{home}}/.config/my-agent.toml"
    content = """model = {{model|json}}"""
    source = ""                       # instead of content: a file beside the preset, which is not a template
    mode = "0644"                     # octal
    raw = false                       # true: the content is not a template

    [install]                         # how its files are installed, once: `rollyard agents install NAME`
    kind = "pip"                      # none (it is in the image), pip or npm
    packages = ["my-agent==1.2.3"]    # each pinned; npm: "@scope/name@1.2.3"
    dependencies = true               # pip only; false: `packages` is a complete lock
    remove = []                       # globs of files below the folder that are not needed

    [end]
    ok = [0]                          # exit statuses that mean success

    [try]                             # the model's replies in `rollyard agents try NAME`, see there
    [[try.turns]]
    say = "I look at it."
    calls = [{ name = "bash", arguments = { command = "cat greeting.txt" } }]

Templates, in command, stdin, env, workdir, and in path and content of files:

    {{instruction}}  the environment's messages as one text: the system part, then the user's
    {{base_url}}     http://127.0.0.1:8129/v1     {{root_url}}  the same without /v1
    {{model}}        `model`                      {{home}}      HOME, a writable folder
    {{workdir}}      `workdir`                    {{install}}   the installed files, read-only
    {{arch}}         x64 or arm64, as npm names them; {{machine}}: x86_64 or aarch64. Both in install.packages, too
    {{python}}       Rollyard's own Python, which needs nothing from the image; only as a whole item of `command`: it is
                     several arguments. With install.kind = "pip": ["{{python}}", "{{install}}", "MODULE", ARGUMENTS…]
                     runs an installed module without setting PYTHONPATH, which the program's children would inherit.

`{{name|json}}` is the value as a JSON string (also valid in YAML and TOML), `{{name|sh}}` is quoted for a shell. An
inserted value is never read as a template again. One argument of a command has at most 128 KB: a program that may get a
long instruction should read it from a file or from stdin.

Invariants. A preset that loads uses only names that exist. It is data: nothing of it is run outside a sandbox, except
pip or npm when an operator installs it.
'''

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollyard.agents.template import PYTHON, machine_values, names_in, problem_of, render
from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.core.json import to_builtins

INSTALL_INSIDE = "/.rollyard-agent"
"""The path of the installed files in a sandbox."""

HOME_INSIDE = "/home/agent"
"""A private, writable folder that every sandbox has."""

MOST_NAME_CHARS = 200
MOST_FILES = 64
MOST_FILE_BYTES = 1 << 20
"""For a file, stdin or a command: a preset is configuration and should not contain data."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_PINNED = {
    "pip": re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?==[\w.+!-]+"),
    "npm": re.compile(r"(@[\w.-]+/)?[\w.-]+@\d[\w.+-]*"),
}


class PresetError(ValueError):
    """A preset that cannot be used: `where` names the field, `what` is the error."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where
        self.what = what


class PresetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: str
    content: str = ""
    source: str = ""
    mode: str = "0644"
    raw: bool = False

    @property
    def mode_bits(self) -> int:
        return int(self.mode, 8)


class Install(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: Literal["none", "pip", "npm"] = "none"
    packages: tuple[str, ...] = ()
    dependencies: bool = True
    remove: tuple[str, ...] = ()

    def resolved(self) -> tuple[str, ...]:
        """The packages for this machine."""
        return tuple(render(package, machine_values()) for package in self.packages)


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ok: tuple[int, ...] = (0,)


class TryCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class TryTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One reply of the scripted model: text, calls, or both."""

    say: str = ""
    calls: tuple[TryCall, ...] = ()


class Try(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    turns: tuple[TryTurn, ...] = ()


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to run one agent program. `command` is empty only if the task contains it."""

    name: str
    version: str = ""
    about: str = ""
    dialect: Literal["chat", "responses", "messages", "any"] = "any"
    command: tuple[str, ...] = ()
    stdin: str = ""
    workdir: str = ""
    model: str = "policy"
    env: dict[str, str] = msgspec.field(default_factory=dict)
    files: tuple[PresetFile, ...] = ()
    install: Install = msgspec.field(default_factory=Install)
    end: End = msgspec.field(default_factory=End)
    try_: Try = msgspec.field(name="try", default_factory=Try)

    @property
    def needs_python(self) -> bool:
        return PYTHON in self.command

    @property
    def is_installable(self) -> bool:
        return self.install.kind != "none"

    def with_options(self, options: Mapping[str, Json]) -> Preset:
        """Returns the preset with a task's options: `args` are appended to the command, `env` and `files` are added,
        `model` is replaced. If the preset has no command, the task also gives `command`, `stdin`, `workdir` and `end`.
        Raises TaskInvalid, which names an invalid option."""
        allowed = {"args", "env", "files", "model", *(() if self.command else ("command", "stdin", "workdir", "end"))}
        if unknown := sorted(set(options) - allowed):
            raise TaskInvalid(f"agent.options.{unknown[0]}: unknown; there are {', '.join(sorted(allowed))}")
        try:
            overrides = msgspec.convert({"name": self.name, **to_builtins(_without(options, "args"))}, Preset)
            args = msgspec.convert(to_builtins(options.get("args", [])), tuple[str, ...])
        except msgspec.ValidationError as error:
            where, what = _split_error(error)
            raise TaskInvalid(f"agent.options.{where}: {what}") from error
        merged = msgspec.structs.replace(
            self,
            command=(*(self.command or overrides.command), *args),
            env={**self.env, **overrides.env},
            files=(*self.files, *overrides.files),
            model=overrides.model if "model" in options else self.model,
            stdin=overrides.stdin if "stdin" in options else self.stdin,
            workdir=overrides.workdir if "workdir" in options else self.workdir,
            end=overrides.end if "end" in options else self.end,
        )
        if not merged.command:
            raise TaskInvalid("agent.options.command: a list of at least one string was expected")
        try:
            _check(merged)
        except PresetError as error:
            raise TaskInvalid(f"agent.options.{error}") from error
        return merged


# --- reading ------------------------------------------------------------------------------------------


def read_preset(text: str, folder: Path | None = None) -> Preset:
    """Parses the TOML text of a preset. `folder` has the files that it names as `source`. Raises PresetError."""
    try:
        return preset_of(tomllib.loads(text), folder)
    except tomllib.TOMLDecodeError as error:
        raise PresetError("the file", f"is not valid TOML: {error}") from error


def preset_of(raw: Mapping[str, Any], folder: Path | None = None) -> Preset:
    try:
        preset = msgspec.convert(raw, Preset)
    except msgspec.ValidationError as error:
        raise PresetError(*_split_error(error)) from error
    if folder is not None:
        files = tuple(_with_content(f"files[{index}]", file, folder) for index, file in enumerate(preset.files))
        preset = msgspec.structs.replace(preset, files=files)
    _check(preset)
    return preset


def built_in() -> dict[str, str]:
    """Returns the texts of the presets that come with Rollyard, by name."""
    folder = resources.files("rollyard.agents").joinpath("presets")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file.read_text("utf-8") for file in files}


def presets_in(folder: Path) -> dict[str, str | PresetError]:
    """Returns the text of every NAME.toml in the operator's folder by name, or the reason why it cannot be read."""
    return {path.stem: _text_of(path) for path in sorted(folder.glob("*.toml"))}


def _with_content(where: str, file: PresetFile, folder: Path) -> PresetFile:
    """Returns the file with the content of its `source`."""
    if not file.source:
        return file
    if file.content or Path(file.source).name != file.source:
        raise PresetError(f"{where}.source", "the name of a file beside the preset was expected, and no content")
    text = _text_of(folder / file.source)
    if isinstance(text, PresetError):
        raise PresetError(f"{where}.source", f"{file.source} {text.what}")
    return msgspec.structs.replace(file, content=text, source="", raw=True)


def _text_of(path: Path) -> str | PresetError:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return PresetError("the file", f"cannot be read: {error}")


def _split_error(error: msgspec.ValidationError) -> tuple[str, str]:
    """Splits msgspec's "Expected `str`, got `int` - at `$.command[0]`" into the field and the error."""
    what, _, where = str(error).partition(" - at `")
    return where.rstrip("`").removeprefix("$").lstrip(".") or "the preset", what


def _without(options: Mapping[str, Json], name: str) -> dict[str, Json]:
    return {key: value for key, value in options.items() if key != name}


def _check(preset: Preset) -> None:
    if not _NAME.fullmatch(preset.name):
        raise PresetError("name", "up to 64 lower case letters, digits and - were expected")
    for where, text in _templates(preset):
        if len(text) > MOST_FILE_BYTES:
            raise PresetError(where, f"at most {MOST_FILE_BYTES} characters")
        if "\0" in text and not where.endswith(".content"):
            raise PresetError(where, "NUL is not allowed")
        wrong = problem_of(text, without=where, is_argument=where.startswith("command["))
        if wrong:
            raise PresetError(where, wrong)
    if names_in(preset.model) or len(preset.model) > MOST_NAME_CHARS:
        raise PresetError("model", f"a name of at most {MOST_NAME_CHARS} characters was expected, and no template")
    if preset.workdir and not preset.workdir.startswith(("/", "{{")):
        raise PresetError("workdir", "an absolute path was expected")
    for name in preset.env:
        if not name or "=" in name or "\0" in name or len(name) > MOST_NAME_CHARS:
            what = f"1 to {MOST_NAME_CHARS} characters were expected, without = and NUL"
            raise PresetError(f"env.{name[:MOST_NAME_CHARS]}", what)
    if len(preset.files) > MOST_FILES:
        raise PresetError("files", f"at most {MOST_FILES} files")
    for index, file in enumerate(preset.files):
        if not file.path.startswith(("/", "{{")) or file.path.endswith("/"):
            raise PresetError(f"files[{index}].path", "the absolute path of a file was expected")
        if not re.fullmatch(r"0?[0-7]{3}", file.mode):
            raise PresetError(f"files[{index}].mode", 'octal digits were expected, like "0644"')
        if file.source:  # a task must not read files of the host
            raise PresetError(f"files[{index}].source", "only a preset in the service's folder may name a file")
        if len(file.content) > MOST_FILE_BYTES:
            raise PresetError(f"files[{index}].content", f"at most {MOST_FILE_BYTES} characters")
    _check_install(preset.install)


def _check_install(install: Install) -> None:
    if (install.kind == "none") != (not install.packages):
        raise PresetError("install.packages", "are expected with the kinds pip and npm, and only with them")
    for index, package in enumerate(install.packages):
        where = f"install.packages[{index}]"
        if unknown := names_in(package) - set(machine_values()):
            raise PresetError(where, f"only {{{{arch}}}} and {{{{machine}}}} are allowed here, not {min(unknown)}")
        if not _PINNED[install.kind].fullmatch(render(package, machine_values())):
            example = "name==1.2.3" if install.kind == "pip" else "name@1.2.3"
            raise PresetError(where, f"a package pinned to one version was expected, like {example}")
    for index, pattern in enumerate(install.remove):
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise PresetError(f"install.remove[{index}]", "a pattern below the installed folder was expected")


def _templates(preset: Preset) -> list[tuple[str, str]]:
    templates = [(f"command[{index}]", item) for index, item in enumerate(preset.command)]
    templates += [("stdin", preset.stdin), ("workdir", preset.workdir)]
    templates += [(f"env.{name}", value) for name, value in preset.env.items()]
    for index, file in enumerate(preset.files):
        templates.append((f"files[{index}].path", file.path))
        if not file.raw:
            templates.append((f"files[{index}].content", file.content))
    return templates
