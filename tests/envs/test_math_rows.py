"""Rows of public datasets as `math` tasks, each of which its oracle solves."""

from typing import Any

import pytest
import pytest_asyncio

from rollyard.core.failure import TaskInvalid
from rollyard.envs.math.boxed import HINT
from rollyard.envs.math.environment import MathEnvironment

from .conftest import context, evidence, task

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form"
    " Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $6 \\cdot 7$?\n\nThink."
    '\n\nRemember to put your answer on its own line after "Answer:".'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def math():
    environment = MathEnvironment()
    yield environment
    await environment.close()


def verl(*messages: tuple[str, str], truth="42"):
    prompt = [{"role": role, "content": content} for role, content in messages]
    return {"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": truth, "style": "rule"}}


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"problem": "P?", "answer": "\\frac{1}{2}", "solution": "So \\boxed{3}."}, "P?", "\\frac{1}{2}"),
        ({"question": "Q?", "answer": "He has 1 <<2=2>>.\n#### 1,234,567"}, "Q?", "1234567"),
        ({"problem": "P?", "level": "Level 5", "solution": "First \\boxed{1}, then $\\boxed{(1,2)}$."}, "P?", "(1,2)"),
        ({"ID": "2024-I-1", "Problem": "P?", "Solution": "…", "Answer": 25}, "P?", "25"),
        ({"problem": "P?", "answer": 142.0}, "P?", "142"),
        ({"problem": "P?", "answer": 1e-05}, "P?", "0.00001"),
        ({"problem": "P?", "answer": "so \\boxed{\\sqrt{2}}"}, "P?", "\\sqrt{2}"),
        ({"problem": "P?", "answer": None, "solution": "\\boxed{7}"}, "P?", "7"),
        (verl(("user", DAPO)), "What is $6 \\cdot 7$?\n\nThink.", "42"),
        (verl(("user", "Q? Let's think step by step and output the final answer within \\boxed{}.")), "Q?", "42"),
        (verl(("user", 'Q? Let\'s think step by step and output the final answer after "####".')), "Q?", "42"),
        ({"prompt": "Q?", "solution": "34", "reward_model": {"ground_truth": 34}}, "Q?", "34"),
        ({"prompt": "Q?", "answer": "wrong", "reward_model": {"ground_truth": "34"}}, "Q?", "34"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_row_becomes_a_task_that_its_oracle_solves(math, row, question, answer):
    body = math.from_row(row, {})
    assert body == {"environment": "math", "data": {"question": question, "answer": answer}}
    eval_context = context(task("math", body["data"]))
    solved = await math.solve(eval_context, {})
    score = await math.eval(eval_context, evidence(str(solved.messages[-1]["content"])))
    assert score.reward == 1.0


def imported(row, **options: str) -> Any:
    return MathEnvironment().from_row(row, options)["data"]


def test_a_system_message_is_kept_and_the_question_still_asks_for_a_box():
    data = imported(verl(("system", "Be brief."), ("user", "Q?")))
    assert data == {"question": f"Q?\n\n{HINT}", "answer": "42", "system_prompt": "Be brief."}
    boxed = imported(verl(("system", "Use \\boxed{}."), ("user", "Q?")))
    assert boxed["question"] == "Q?"


def test_options_set_columns_and_a_system_prompt():
    row = {"Aufgabe": "Q?", "Lösung": 3, "answer": "no"}
    data = imported(row, question="Aufgabe", answer="Lösung", system_prompt="Use \\boxed{}.")
    assert data == {"question": "Q?", "answer": "3", "system_prompt": "Use \\boxed{}."}


@pytest.mark.parametrize(
    ("row", "options", "wrong"),
    [
        ({"answer": "1"}, {}, "math: the row has no question: a column problem or question or prompt"),
        (
            {"problem": "P?", "text": "x"},
            {},
            "no answer: a column answer or ground_truth .*; its columns are problem, text",
        ),
        ({"problem": "P?", "answer": True}, {}, "the row has no answer"),
        ({"problem": "P?", "answer": float("nan")}, {}, "the row has no answer"),
        ({"problem": "P?", "solution": "It is 7."}, {}, r"solution: a \\boxed{} answer was expected"),
        ({"problem": "P?", "answer": "1"}, {"answer": "gold"}, "the row has no answer: a column gold"),
        (
            {"problem": "P?", "answer": "1"},
            {"hint": "x"},
            "unknown option 'hint' of its importer; there are answer, qu",
        ),
        (verl(("user", "a"), ("assistant", "b"), ("user", "c")), {}, "there are user, assistant, user"),
        (verl(), {}, "the row has no question|there are none"),
        ({"prompt": ["x"], "answer": "1"}, {}, "prompt: messages with a role and a string"),
        (
            {"prompt": [{"role": "user", "content": ["x"]}], "answer": "1"},
            {},
            "prompt: messages with a role and a string",
        ),
    ],
)
def test_an_invalid_row_is_refused_with_the_reason(row, options, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        MathEnvironment().from_row(row, options)
