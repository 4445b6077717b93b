"""Converts rows of public datasets to `stem` tasks. Their columns identify them; case does not matter.

    Question, Correct Answer, Incorrect Answer 1…         GPQA
    question, correct_answer, distractor1…                SciQ
    question, choices | options, answer                   MMLU, MMLU-Pro: a list, and an index or a letter
    question, choices: {text, label}, answerKey           ARC, OpenBookQA
    question, answer                                      a free answer: SciKnowEval

If the right choice has its own column, the choices are shuffled; otherwise only with the option `seed`, because the
position of "all of the above" matters. Other columns are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollyard.core import Json
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import check_options
from rollyard.envs.math.rows import Columns, as_text
from rollyard.envs.stem.answers import is_number

OPTIONS = ("question", "choices", "answer", "seed", "tolerance", "judge", "system_prompt")
QUESTIONS = ("question", "problem", "question_stem", "prompt")
CHOICES = ("choices", "options")
KEYS = ("answerkey", "answer", "answer_idx", "answer_index")
RIGHT = ("correct answer", "correct_answer")

_WRONG = re.compile(r"incorrect[ _]answer[ _]?\d*|distractor[ _]?\d+", re.IGNORECASE)


def stem_row(row: Mapping[str, Json], options: Mapping[str, str]) -> dict[str, Json]:
    """Returns the row as a task's data."""
    check_options("stem", options, OPTIONS)
    cells = Columns("stem", row, {part: options[part] for part in ("question", "choices", "answer") if part in options})
    data: dict[str, Json] = {"question": cells.text("question", QUESTIONS)}
    seed = _number("seed", options, int)
    wrong = [text for name in sorted(row) if _WRONG.fullmatch(name.strip()) and (text := as_text(row[name]))]
    if wrong:
        data |= {"choices": [cells.text("answer", RIGHT), *wrong], "answer": 0, "seed": seed or 0}
    elif _has_choices(choices := cells.get("choices", CHOICES)):
        choices, key = _labelled(cells, choices, _key(cells.get("answer", KEYS)))
        data |= {"choices": choices, "answer": key}
        if seed is not None:
            data["seed"] = seed
    else:
        data |= _free(cells.text("answer", ("answer", "final_answer")), options)
    if "system_prompt" in options:
        data["system_prompt"] = options["system_prompt"]
    return data


def _free(answer: str, options: Mapping[str, str]) -> dict[str, Json]:
    """With these options, numbers get the tolerance and other answers the judge."""
    tolerance = _number("tolerance", options, float)
    judge = options.get("judge", "false").lower()
    if judge not in ("true", "false"):
        raise TaskInvalid("stem: the option judge is true or false")
    if tolerance is not None and is_number(answer):
        return {"answer": answer, "tolerance": tolerance}
    return {"answer": answer, "judge": True} if judge == "true" else {"answer": answer}


def _has_choices(value: Json) -> bool:
    """Tables with both kinds of questions have empty lists in the rows without choices."""
    return bool(value["text"] if isinstance(value, Mapping) and "text" in value else value)


def _labelled(cells: Columns, choices: Json, key: Json) -> tuple[Json, Json]:
    """Returns the choices and the key unchanged; for columns of texts and labels, the texts and the index. There a key
    is a label, even if it is also the text of another choice."""
    if not isinstance(choices, Mapping) or "text" not in choices:
        return choices, key
    texts, labels = choices["text"], choices.get("label")
    if not isinstance(texts, Sequence) or not isinstance(labels, Sequence) or len(texts) != len(labels):
        raise cells.wrong("choices: as many labels as texts were expected")
    names = [str(label) for label in labels]
    return texts, names.index(str(key)) if str(key) in names else key


def _key(value: Json) -> Json:
    """A table stores integers as 2.0 if a value is missing in the column."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(name: str, options: Mapping[str, str], kind: type[int] | type[float]) -> int | float | None:
    try:
        return kind(options[name]) if name in options else None
    except ValueError:
        raise TaskInvalid(f"stem: the option {name} is a number, not {options[name]!r}") from None
