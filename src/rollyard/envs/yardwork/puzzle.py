"""The parts of a task: files before, what is told, a plan that solves it, and the answer or the files after.

A `Scene` is what a family makes; with a template's words it is a `Puzzle`. Everything in it follows from the task's
data, without a sandbox. Invariant: the plan's commands name only what the instruction or an earlier command's output
has shown.
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
"""Paths below the workspace; None is a folder. Folders above a file need not be named."""


@dataclass(frozen=True, slots=True)
class SolutionStep:
    """A command, and the few words said before it."""

    command: str
    said: str = ""


@dataclass(frozen=True, slots=True)
class SolutionTurn:
    """What a policy should have said and called."""

    text: str
    tool: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a family makes. Either `answer` or `after` is given."""

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
        """The plan as turns, `finish` included."""
        turns = [SolutionTurn(step.said, "shell", {"command": step.command}) for step in self.scene.steps]
        if self.scene.answer is None:
            return [*turns, SolutionTurn("Done.", "finish", {})]
        return [*turns, SolutionTurn(f"It is {self.scene.answer}.", "finish", {"answer": self.scene.answer})]


@dataclass(frozen=True, slots=True)
class Template:
    """A wording, for one split. Some go with a rule of their own, which changes what is to be done."""

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
    """Templates are named after their split, so that no name is in both."""
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
    """With every folder named, those above before those below."""
    full: dict[str, File | None] = {}
    for path in sorted(tree):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            full.setdefault("/".join(parts[:depth]), None)
        full[path] = tree[path]
    return dict(sorted(full.items()))
