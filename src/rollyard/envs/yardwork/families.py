"""All families by name, and the puzzle of a task's data. The same data give the same puzzle on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rollyard.core import DataField, Json, Task
from rollyard.envs.fields import Fields
from rollyard.envs.yardwork.arranging import ARRANGING
from rollyard.envs.yardwork.counting import COUNTING
from rollyard.envs.yardwork.draw import SeededDraw
from rollyard.envs.yardwork.editing import EDITING
from rollyard.envs.yardwork.finding import FINDING
from rollyard.envs.yardwork.numbers import NUMBERS
from rollyard.envs.yardwork.puzzle import LEVELS, Family, Puzzle, SolutionTurn, Template
from rollyard.envs.yardwork.scripts import SCRIPTS
from rollyard.envs.yardwork.texts import TEXTS
from rollyard.envs.yardwork.wordings import with_more
from rollyard.envs.yardwork.words import Split

FAMILIES: dict[str, Family] = {
    family.name: with_more(family) for family in (*FINDING, *COUNTING, *NUMBERS, *EDITING, *ARRANGING, *TEXTS, *SCRIPTS)
}

MAX_SEED = (1 << 48) - 1

FIELDS = (
    DataField("family", "string", f"One of {', '.join(FAMILIES)}."),
    DataField("template", "string", "The wording, of those that the family has for the split."),
    DataField("level", f"whole number, {LEVELS[0]} to {LEVELS[-1]}", "The difficulty."),
    DataField("seed", f"whole number, 0 to {MAX_SEED}", "Other seeds give other files and answers."),
    DataField("split", "train or held_out", "Tasks for training, or for testing."),
    DataField("system_prompt", "string or null", "Replaces the system message; empty: none.", "the environment's"),
)


@dataclass(frozen=True, slots=True)
class YardworkData:
    """A task's data, parsed."""

    family: Family
    template: Template
    level: int
    seed: int
    split: Split
    system_prompt: str | None = None

    @classmethod
    def read(cls, task: Task) -> YardworkData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        family = FAMILIES.get(fields.text("family"))
        if family is None:
            raise fields.wrong("family", f"one of {', '.join(FAMILIES)}")
        split = _split(fields)
        templates = {template.name: template for template in family.templates[split]}
        template = templates.get(fields.text("template"))
        if template is None:
            first, *_, last = templates
            raise fields.wrong("template", f"one of {first} to {last}, for {split},")
        data = cls(
            family,
            template,
            _whole(fields, "level", LEVELS[0], LEVELS[-1]),
            _whole(fields, "seed", 0, MAX_SEED),
            split,
            fields.optional_text("system_prompt"),
        )
        fields.done()
        return data

    def puzzle(self) -> Puzzle:
        """The template is not part of the seed: it changes only the wording, unless it has its own rule."""
        return _puzzle(self.family.name, self.template, self.level, self.seed, self.split)


@lru_cache(maxsize=256)  # INIT, RUN and EVAL of all rollouts of a group use the same puzzle
def _puzzle(family: str, template: Template, level: int, seed: int, split: Split) -> Puzzle:
    draw = SeededDraw(f"yardwork/{split}/{family}/{level}/{seed}", split)
    return FAMILIES[family].puzzle(draw, level, template)


def make(data: Mapping[str, Json]) -> Puzzle:
    """Returns the puzzle of a task's data. Raises TaskInvalid."""
    return YardworkData.read(Task("yardwork", data)).puzzle()


def demonstration(data: Mapping[str, Json]) -> list[SolutionTurn]:
    """The turns of a perfect policy, ending with `finish`. The oracle takes the same turns."""
    return make(data).turns


def _split(fields: Fields) -> Split:
    match fields.text("split"):
        case "train":
            return "train"
        case "held_out":
            return "held_out"
        case _:
            raise fields.wrong("split", '"train" or "held_out"')


def _whole(fields: Fields, name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise fields.wrong(name, f"a whole number from {low} to {high}")
    return value
