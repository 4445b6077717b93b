"""Converts environment/Dockerfile to a base image, a working folder, variables, local files, and commands.

No image is built; the instructions become the task's set-up, which `prepare` runs once. An instruction that needs a
build (stages, archives, downloads, heredocs, variables of the base image) is refused, and the error names its line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import basename, join, normpath

from pydantic import TypeAdapter, ValidationError

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.envs.harbor.files import Packer

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})|\\(.)")
_IGNORED = ("LABEL", "MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "CMD")
_NOTED = {
    "USER": "commands run as the sandbox's own user",
    "ENTRYPOINT": "an image's entry point is not run",
    "HEALTHCHECK": "there is no health check",
}
_IGNORE_FILES = (".dockerignore", "Dockerfile.dockerignore")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz", ".tbz2")


@dataclass(slots=True)
class Recipe:
    """The result of reading a Dockerfile. An empty `workdir` is that of the base image, which is not known here."""

    image: str = ""
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    setup: list[Json] = field(default_factory=list[Json])
    runs: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Instruction:
    """A Dockerfile instruction, with its continuation lines joined."""

    number: int
    word: str
    arguments: str
    place: str

    def refused(self, why: str) -> TaskInvalid:
        text = f"{self.word} {self.arguments}"
        text = text if len(text) <= 100 else f"{text[:97]}..."
        return TaskInvalid(f"{self.place}:{self.number}: {text!r}: {why}")

    def words(self) -> list[str]:
        try:
            return shlex.split(self.arguments)
        except ValueError as error:
            raise self.refused(f"cannot be read: {error}") from error

    def texts(self) -> list[str]:
        """The arguments in JSON form: ["a", "b"]."""
        try:
            return TypeAdapter(list[str]).validate_json(self.arguments)
        except ValidationError as error:
            raise self.refused("a list of strings was expected") from error


def last_workdir(path: Path, place: str) -> str:
    """The working folder of an image built from the Dockerfile; empty if it sets none. Nothing else is read."""
    workdir = ""
    for line in read_lines(path, place):
        if line.word == "FROM":
            workdir = ""
        elif line.word == "WORKDIR" and "$" not in line.arguments:
            workdir = normpath(join(workdir or "/", line.arguments.strip("\"'")))
    return workdir


def read_dockerfile(path: Path, place: str, packer: Packer) -> Recipe:
    """Returns the recipe. Raises TaskInvalid with the line that needs a build."""
    return _Reader(path.parent, packer).read(read_lines(path, place))


def read_lines(path: Path, place: str) -> Iterator[Instruction]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskInvalid(f"{place} cannot be read: {error}") from error
    joined, first_number = "", 0
    lines = text.splitlines()
    for number, raw in enumerate([*lines, ""], 1):
        if raw.lstrip().startswith("#") or (joined and not raw.strip() and number <= len(lines)):
            continue
        first_number = first_number if joined else number
        if raw.rstrip().endswith("\\"):
            joined += raw.rstrip()[:-1]
            continue
        words = (joined + raw).split(maxsplit=1)
        joined = ""
        if words:
            yield Instruction(first_number, words[0].upper(), "".join(words[1:]).strip(), place)


class _Reader:
    def __init__(self, context: Path, packer: Packer) -> None:
        self._context, self._packer = context, packer
        self._recipe = Recipe()
        self._args: dict[str, str] = {}
        self._folders = {"/"}  # known folders: a file that is copied there keeps its name
        self._does: dict[str, Callable[[Instruction], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "WORKDIR": self._workdir,
            "RUN": self._run,
            "ADD": self._add,
            "COPY": self._copy,
        }

    def read(self, lines: Iterator[Instruction]) -> Recipe:
        for line in lines:
            if not self._recipe.image and line.word not in ("FROM", "ARG"):
                raise line.refused("a Dockerfile must start with FROM")
            if line.word in _NOTED:
                self._recipe.notes.append(f"Dockerfile: {line.word}: {_NOTED[line.word]}")
            elif line.word not in _IGNORED:
                does = self._does.get(line.word)
                if does is None:
                    raise line.refused("this needs a build")
                does(line)
        if not self._recipe.image:
            raise TaskInvalid("environment/Dockerfile: there is no FROM")
        return self._recipe

    def _from(self, line: Instruction) -> None:
        if self._recipe.image:
            raise line.refused("more than one stage needs a build")
        words = [word for word in self._expanded(line).split() if not word.startswith("--platform")]
        if not words or words[0] == "scratch" or words[0].startswith("--"):
            raise line.refused("the name of an image was expected")
        self._recipe.image = words[0]

    def _arg(self, line: Instruction) -> None:
        for word in Instruction(line.number, line.word, self._expanded(line), line.place).words():
            name, equals, value = word.partition("=")
            if equals:
                self._args[name] = value

    def _env(self, line: Instruction) -> None:
        words = Instruction(line.number, line.word, self._expanded(line), line.place).words()
        if words and "=" not in words[0]:  # the old form: ENV NAME VALUE
            name, _, value = self._expanded(line).partition(" ")
            words = [f"{name}={value.strip()}"]
        for word in words:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise line.refused("NAME=VALUE was expected")
            self._recipe.env[name] = value

    def _workdir(self, line: Instruction) -> None:
        words = Instruction(line.number, line.word, self._expanded(line), line.place).words()
        path = " ".join(words)
        if not path.startswith("/") and not self._recipe.workdir:
            raise line.refused("it is relative to the working folder of the base image, which is known only in a build")
        self._recipe.workdir = normpath(join(self._recipe.workdir or "/", path))
        self._folders.add(self._recipe.workdir)

    def _run(self, line: Instruction) -> None:
        command = line.arguments
        if command.startswith("--") or "<<" in command:
            raise line.refused("options and heredocs of RUN need a build")
        if command.startswith("["):
            command = shlex.join(line.texts())
        step: dict[str, Json] = {"run": command, "cwd": self._recipe.workdir or "/"}
        if args := {name: value for name, value in self._args.items() if name not in self._recipe.env}:
            step["env"] = args
        self._recipe.setup.append(step)
        self._recipe.runs.append(f"{line.place}:{line.number}: RUN {line.arguments}")

    def _add(self, line: Instruction) -> None:
        if any("://" in word or word.endswith((".git", *_ARCHIVES)) for word in line.words()):
            raise line.refused("ADD of a URL or an archive needs a build")
        self._copy(line)

    def _copy(self, line: Instruction) -> None:
        if "<<" in line.arguments:
            raise line.refused("a heredoc needs a build")
        words = Instruction(line.number, line.word, self._expanded(line), line.place).words()
        options = [word for word in words if word.startswith("--")]
        if any(not option.startswith(("--chown", "--link")) for option in options):
            raise line.refused(f"{options[0]} needs a build")
        words = [word for word in words if not word.startswith("--")]
        if words and words[0].startswith("["):
            words = line.texts()
        if len(words) < 2:
            raise line.refused("a source and a destination were expected")
        *sources, destination = words
        if not destination.startswith("/") and not self._recipe.workdir:
            raise line.refused("the working folder of the base image is not known here: set WORKDIR before this line")
        if any((self._context / name).exists() for name in _IGNORE_FILES):
            raise line.refused("a .dockerignore excludes files of environment/, which needs a build")
        paths = [path for source in sources for path in self._matching_paths(line, source)]
        target = normpath(join(self._recipe.workdir or "/", destination))
        is_folder = destination.endswith(("/", "/.")) or destination == "." or len(paths) > 1 or target in self._folders
        files: dict[str, Json] = {}
        for path in paths:
            if path.is_dir():
                self._folders.add(target)
                files |= self._packer.folder(path, f"{target.strip('/')}/".lstrip("/"))
            else:
                inside = join(target, basename(str(path))) if is_folder else target
                files[inside.strip("/")] = self._packer.file(path)
        if is_folder:
            self._folders.add(target)
        self._recipe.setup.append({"files": files})

    def _matching_paths(self, line: Instruction, source: str) -> list[Path]:
        """The files in the Dockerfile's folder, which is the build context."""
        inside = normpath("/" + source).strip("/")
        root = self._context.resolve()
        try:
            named = sorted(root.glob(inside)) if inside else [root]
        except ValueError as error:  # "**" in the middle of a name
            raise line.refused(f"{source!r} is a pattern that needs a build: {error}") from error
        matches = [path for path in named if path.resolve().is_relative_to(root)]
        if not matches:
            raise line.refused(f"there is no {source!r} in environment/")
        return matches

    def _expanded(self, line: Instruction) -> str:
        def value(match: re.Match[str]) -> str:
            if match[3] is not None:
                return match[0]
            name = match[1] or match[2]
            for known in (self._recipe.env, self._args):
                if name in known:
                    return known[name]
            raise line.refused(f"the value of ${name} is known only in a build")

        expanded = _VARIABLE.sub(value, line.arguments)
        if "${" in expanded:
            raise line.refused("this form of a variable needs a build")
        return expanded
