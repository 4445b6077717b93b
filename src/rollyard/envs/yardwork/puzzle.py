"""The parts of a task: the files before, the instruction, the solution's steps, and the answer or the files after.

A family makes a `Scene`; a template's text and a scene make a `Puzzle`. Everything depends on the task's data alone,
without a sandbox. Invariant: a step's command names only what the instruction or an earlier command's output contains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollyard.core import Json
from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.words import Split

LEVELS = range(1, 6)


@dataclass(frozen=True, slots=True)
class File:
    text: str
    mode: int = 0o644


Tree = Mapping[str, File | None]
"""Paths below the workspace; None is a folder. Parent folders of a file need not be listed."""


@dataclass(frozen=True, slots=True)
class SolutionStep:
    """A command, and the short text before it."""

    command: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class SolutionTurn:
    """A turn of a perfect policy: its text and its tool call."""

    text: str
    tool: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Scene:
    """A task without its wording. Either `answer` or `after` is set."""

    files: Tree
    slots: Mapping[str, str]  # for the template's text
    steps: Sequence[SolutionStep]
    answer: str | None = None
    after: Tree | None = None
    checks_modes: bool = False


@dataclass(frozen=True, slots=True)
class Puzzle:
    instruction: str
    scene: Scene

    @property
    def turns(self) -> list[SolutionTurn]:
        """The steps as turns, including `finish`."""
        turns = [SolutionTurn(step.text, "shell", {"command": step.command}) for step in self.scene.steps]
        if self.scene.answer is None:
            return [*turns, SolutionTurn("Done.", "finish", {})]
        return [*turns, SolutionTurn(f"It is {self.scene.answer}.", "finish", {"answer": self.scene.answer})]


@dataclass(frozen=True, slots=True)
class Template:
    """A wording for one split. Some have their own rule, which changes the task."""

    name: str
    text: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    make: Callable[[SeededDraw, int, str], Scene]
    templates: Mapping[Split, tuple[Template, ...]] = field(default_factory=dict[Split, tuple[Template, ...]])

    def puzzle(self, draw: SeededDraw, level: int, template: Template) -> Puzzle:
        scene = self.make(draw, level, template.rule)
        return Puzzle(template.text.format(**scene.slots), scene)


Wording = tuple[str, str]
"""A rule and a text."""


def family(
    name: str, make: Callable[[SeededDraw, int, str], Scene], train: Sequence[Wording], held_out: Sequence[Wording]
) -> Family:
    """Creates a family. Template names start with a letter for the split, so that no name is in both splits."""
    return Family(
        name,
        make,
        {
            "train": tuple(Template(f"t{index}", text, rule) for index, (rule, text) in enumerate(train)),
            "held_out": tuple(Template(f"h{index}", text, rule) for index, (rule, text) in enumerate(held_out)),
        },
    )


def text_file(lines: Iterable[str], mode: int = 0o644) -> File:
    return File("".join(f"{line}\n" for line in lines), mode)


def changed(tree: Tree, path: str, lines: Iterable[str]) -> dict[str, File | None]:
    """The tree with that file's text replaced."""
    old = tree.get(path)
    return {**tree, path: replace(text_file(lines), mode=old.mode if old else 0o644)}


def lines_of(tree: Tree, path: str) -> list[str]:
    file = tree[path]
    return file.text.splitlines() if file else []


def whole(tree: Tree) -> dict[str, File | None]:
    """The tree with every folder listed, parents first."""
    full: dict[str, File | None] = {}
    for path in sorted(tree):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            full.setdefault("/".join(parts[:depth]), None)
        full[path] = tree[path]
    return dict(sorted(full.items()))
