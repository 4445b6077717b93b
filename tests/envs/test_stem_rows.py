"""Rows of public datasets as `stem` tasks."""

from typing import Any

import pytest

from rollyard.core.failure import TaskInvalid
from rollyard.envs.stem.data import StemData
from rollyard.envs.stem.environment import StemEnvironment

from .conftest import task

GPQA = {
    "Record ID": "r1",
    "Question": "Which one?\n",
    "Correct Answer": "right\n",
    "Incorrect Answer 1": "wrong 1",
    "Incorrect Answer 2": "wrong 2",
    "Incorrect Answer 3": "wrong 3",
    "Pre-Revision Correct Answer": "old",
    "Pre-Revision Incorrect Answer 1": "older",
}


def read(row, **options) -> StemData:
    body: Any = StemEnvironment().from_row(row, options)
    assert set(body) == {"environment", "data"}
    return StemData.read(task(body["environment"], body["data"]))


def test_gpqa_is_shuffled_with_its_answer():
    data = read(GPQA)
    assert data.question == "Which one?"
    assert sorted(data.choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
    assert data.choices[data.right] == data.answer == "right"
    assert {read({**GPQA, "Question": f"{n}?"}).right for n in range(40)} == {0, 1, 2, 3}
    assert {read(GPQA, seed=str(n)).right for n in range(40)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("row", "choices", "right"),
    [
        ({"question": "Q?", "subject": "x", "choices": ["a", "b", "c", "d"], "answer": 2}, "abcd", 2),
        ({"question": "Q?", "choices": ["a", "b", "c", "d"], "answer": 2.0}, "abcd", 2),
        ({"question": "Q?", "options": ["a", "b", "c"], "answer": "B", "answer_index": 1}, "abc", 1),
        ({"question": "Q?", "options": {"A": "a", "B": "b"}, "answer": "b", "answer_idx": "B"}, "ab", 1),
        ({"question": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}, "ab", 1),
        ({"question": "Q?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}, "ab", 1),
        ({"question_stem": "Q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}, "ab", 0),
        ({"question": "Q?", "choices": {"text": ["2", "1"], "label": ["1", "2"]}, "answerKey": "2"}, "21", 1),
        ({"question": "Q?", "choices": {"text": ["a", "b"], "label": [1, 2]}, "answerKey": 1}, "ab", 0),
    ],
)
def test_rows_with_choices_keep_their_order(row, choices, right):
    data = read(row)
    assert (data.question, data.choices, data.right) == ("Q?", tuple(choices), right)
    assert {read(row, seed=str(n)).choices for n in range(40)} > {data.choices}


def test_the_right_answer_and_the_distractors_become_choices():
    row = {"question": "Q?", "correct_answer": "r", "distractor1": "x", "distractor2": "y", "distractor3": "z"}
    data = read({**row, "support": "because"})
    assert sorted(data.choices) == ["r", "x", "y", "z"]
    assert data.answer == "r"


def test_options_set_the_tolerance_or_the_judge_of_free_answers():
    assert read({"question": "Q?", "answer": 4.5}) == StemData("Q?", "4.5")
    assert read({"question": "Q?", "answer": "ATP"}, judge="true", tolerance="0.05") == StemData(
        "Q?", "ATP", is_judged=True
    )
    assert read({"question": "Q?", "answer": "4.5"}, judge="true", tolerance="0.05") == StemData(
        "Q?", "4.5", tolerance=0.05
    )
    assert read({"question": "Q?", "answer": "4.5"}, judge="true") == StemData("Q?", "4.5", is_judged=True)
    assert read({"question": "Q?", "answer": "ATP"}, judge="False") == StemData("Q?", "ATP")


@pytest.mark.parametrize("none", [{"text": [], "label": []}, {"text": None, "label": None}, [], {}])
def test_a_row_with_an_empty_choices_column_has_a_free_answer(none):
    """SciKnowEval has both kinds of questions in one table."""
    assert read({"question": "Q?", "choices": none, "answerKey": "", "answer": "ATP"}) == StemData("Q?", "ATP")


def test_options_set_columns_and_a_system_prompt():
    row = {"frage": "Q?", "wahl": ["a", "b"], "antwort": "b"}
    data = read(row, question="frage", choices="wahl", answer="antwort", system_prompt="Be right.")
    assert (data.question, data.answer, data.system_prompt) == ("Q?", "b", "Be right.")


@pytest.mark.parametrize(
    ("row", "options", "wrong"),
    [
        ({"answer": "1"}, {}, "stem: the row has no question: a column question or problem"),
        ({"question": "Q?"}, {}, "the row has no answer: .*; its columns are question"),
        ({"question": "Q?", "incorrect answer 1": "x"}, {}, "no answer: a column correct answer or correct_answer"),
        ({"question": "Q?", "choices": ["a", "b"]}, {}, "data.answer"),
        ({"question": "Q?", "choices": ["a", "b"], "answer": 2}, {}, "an index from 0 to 1"),
        ({"question": "Q?", "choices": {"text": ["a"], "label": []}, "answerKey": "A"}, {}, "as many labels as texts"),
        ({"question": "Q?", "choices": {"text": ["a"]}, "answerKey": "A"}, {}, "as many labels as texts"),
        ({"question": "Q?", "answer": "x"}, {"judge": "maybe"}, "the option judge is true or false"),
        ({"question": "Q?", "answer": "x"}, {"tolerance": "1%"}, "the option tolerance is a number, not '1%'"),
        ({"question": "Q?", "answer": "1"}, {"tolerance": "-1"}, "data.tolerance: a number above 0"),
        ({"question": "Q?", "choices": ["a", "b"], "answer": 0}, {"seed": "x"}, "the option seed is a number"),
        ({"question": "Q?", "answer": "x"}, {"shuffle": "1"}, "unknown option 'shuffle' of its importer; there are"),
    ],
)
def test_an_invalid_row_is_refused_with_the_reason(row, options, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        StemEnvironment().from_row(row, options)
