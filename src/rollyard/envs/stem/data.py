"""The data of a `stem` task, parsed and checked, with the order in which its choices are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rollyard.core import DataField, Json, Task
from rollyard.envs.fields import Fields
from rollyard.envs.math.rows import as_text
from rollyard.envs.stem.answers import LETTERS, is_number

FIELDS = (
    DataField("question", "string", "The question."),
    DataField("answer", "string or number", "The right answer; with choices, a letter, an index or the text of one."),
    DataField("choices", "list or object of strings", f"2 to {len(LETTERS)} choices.", "none: a free answer"),
    DataField("seed", "whole number or null", "With choices: shuffles them; null keeps their order.", "null"),
    DataField(
        "tolerance",
        "number above 0",
        "Free answer: the share of the known number by which another may differ.",
        "exact",
    ),
    DataField("unit", "string or null", "Free answer: the unit of the number.", "null"),
    DataField("judge", "boolean", "Free answer: an engine of role judge decides.", "false"),
    DataField("system_prompt", "string or null", "Replaces the hint about the form of the answer.", "the hint"),
)


@dataclass(frozen=True, slots=True)
class StemData:
    question: str
    answer: str  # with choices: the right choice's text
    choices: tuple[str, ...] = ()  # in the order shown; empty for a free answer
    right: int = -1  # the index of the right choice
    tolerance: float | None = None
    unit: str | None = None
    is_judged: bool = False
    system_prompt: str | None = None

    @classmethod
    def read(cls, task: Task) -> StemData:
        """Parses the data. Raises TaskInvalid with the field that is wrong."""
        fields = Fields(task)
        question, system_prompt = fields.text("question"), fields.optional_text("system_prompt")
        named, answer, seed = _choices(fields), fields.get("answer"), _seed(fields)
        if named:
            data = _with_choices(fields, question, named, answer, seed, system_prompt)
        else:
            data = _free(fields, question, answer, system_prompt)
        fields.done()
        return data


def _with_choices(
    fields: Fields, question: str, named: dict[str, str], answer: Json, seed: int | None, system_prompt: str | None
) -> StemData:
    for name in ("tolerance", "unit", "judge"):
        if fields.get(name) not in (None, False):
            raise fields.wrong(name, "nothing, since there are choices,")
    right = _right(fields, named, answer)
    texts = list(named.values())
    order = list(range(len(texts)))
    if seed is not None:
        # The order depends on the question, too: else, in a dataset whose right choice comes first, one letter is
        # always right.
        order.sort(key=lambda index: sha256(f"{seed}\0{index}\0{question}".encode("utf-8", "replace")).digest())
    return StemData(
        question, texts[right], tuple(texts[it] for it in order), order.index(right), system_prompt=system_prompt
    )


def _free(fields: Fields, question: str, answer: Json, system_prompt: str | None) -> StemData:
    known = as_text(answer)
    if known is None:
        raise fields.wrong("answer", "a string or a number")
    if fields.get("seed") is not None:
        raise fields.wrong("seed", "nothing, since there are no choices,")
    tolerance = fields.positive("tolerance", 0.0) or None
    judge, unit = fields.get("judge"), fields.optional_text("unit")
    if judge is not None and not isinstance(judge, bool):
        raise fields.wrong("judge", "true or false")
    if unit is not None and not unit.strip():
        raise fields.wrong("unit", "a string")
    if judge and (tolerance is not None or unit is not None):
        raise fields.wrong("judge", "either a judge or a tolerance and a unit")
    if (tolerance is not None or unit is not None) and not is_number(known):
        raise fields.wrong("answer", "a number, since there is a tolerance or a unit,")
    return StemData(question, known, tolerance=tolerance, unit=unit, is_judged=bool(judge), system_prompt=system_prompt)


def _choices(fields: Fields) -> dict[str, str]:
    """The choices by letter, or by the names in the data, sorted by name: stores do not keep the order of keys."""
    value = fields.get("choices")
    if value is None:
        return {}
    if isinstance(value, Mapping):
        choices = {name: value[name] for name in sorted(value, key=lambda name: (len(name), name))}
    elif isinstance(value, Sequence) and not isinstance(value, str):
        choices = dict(zip(LETTERS, value, strict=False)) if len(value) <= len(LETTERS) else {}
    else:
        raise fields.wrong("choices", "a list or an object of strings")
    if not 2 <= len(choices) <= len(LETTERS):
        raise fields.wrong("choices", f"2 to {len(LETTERS)} choices")
    texts = {name: as_text(text) for name, text in choices.items()}
    for name, text in texts.items():
        if text is None:
            raise fields.wrong(f"choices[{name!r}]", "a string or a number")
    return {name: text for name, text in texts.items() if text is not None}


def _right(fields: Fields, named: dict[str, str], answer: Json) -> int:
    names, texts = list(named), list(named.values())
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(texts):
            raise fields.wrong("answer", f"an index from 0 to {len(texts) - 1}")
        indices = {answer}
    else:
        text = as_text(answer)
        indices = {names.index(text)} if text in named else set[int]()
        indices |= {texts.index(text)} if text in texts else set()
        if not indices:
            raise fields.wrong("answer", "the letter, the index or the text of a choice")
    if len(indices) > 1:
        raise fields.wrong("answer", "an index, since this is the letter of one choice and the text of another,")
    right = indices.pop()
    if texts.count(texts[right]) > 1:
        raise fields.wrong("choices", "a right choice that occurs only once")
    return right


def _seed(fields: Fields) -> int | None:
    value = fields.get("seed")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise fields.wrong("seed", "a whole number")
    return value
