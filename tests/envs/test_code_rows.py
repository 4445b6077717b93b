"""Shortened rows of public datasets. If a row contains a solution, the solution must pass all tests."""

import asyncio
import base64
import json
import pickle
import zlib
from typing import Any

import pytest
import pytest_asyncio

from rollyard.core.failure import TaskInvalid
from rollyard.envs.code import CodeEnvironment, rows
from rollyard.service.schemas.task import to_task

from .stage_resources import open_resources, played

pytestmark = pytest.mark.asyncio(loop_scope="module")


def pack(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


APPS = {
    "problem_id": 1,
    "question": "Print the sum.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))", "?"]),
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}),
    "starter_code": "",
    "difficulty": "introductory",
}
APPS_CALLED = {
    **APPS,
    "solutions": json.dumps(["def pairs(a, b):\n    return a * b"]),
    "input_output": json.dumps({"fn_name": "pairs", "inputs": [[2, 3], [4, 5]], "outputs": [[6], 20]}),
    "starter_code": "def pairs(a, b):\n\t",
}
LCB = {
    "question_title": "Sum",
    "question_content": "Print the sum.",
    "question_id": "abc",
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}]),
    "private_test_cases": pack(json.dumps([{"input": "9 9", "output": "18", "testtype": "stdin"}])),
    "metadata": "{}",
}
LCB_CALLED = {
    **LCB,
    "starter_code": "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        ",
    "public_test_cases": json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": '[1, 2]\n"x"', "output": "null", "testtype": "functional"}]),
    "metadata": '{"func_name": "add"}',
}
CODEFORCES = {
    "id": "1/A",
    "description": "Add two numbers.",
    "input_format": "Two numbers.",
    "output_format": "Their sum.",
    "interaction_format": None,
    "note": None,
    "examples": [{"input": "1 2", "output": "3"}],
    "official_tests": [{"input": "5 6", "output": "11"}],
    "official_tests_complete": True,
    "input_mode": "stdio",
    "generated_checker": None,
    "time_limit": 2.0,
    "memory_limit": 256.0,
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def shift(s: str):\n    return s[::-1]\n\ndef unshift(s: str):\n    """Undoes shift."""\n',
    "canonical_solution": "    return s[::-1]\n",
    "test": "\n\ndef check(candidate):\n    for s in ('ab', 'xyz'):\n        assert candidate(shift(s)) == s\n",
    "entry_point": "unshift",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function that merges two lists.",
    "code": "def merge(a, b):\r\n  return (a + b) ",
    "test_list": ["assert merge([1],[2])==[1, 2]", "assert merge([],[3])==[3]"],
    "test_setup_code": "",
    "challenge_test_list": ["assert merge([],[])==[]"],
}
MBPP_SET_UP = {
    "text": "Write a function that finds the height of a tree, and one that counts by kind.",
    "code": """
class Node:
    def __init__(self, data): self.data, self.left = data, None
def height(root): return 0 if root is None else 1 + height(root.left)
def count(items, kind): return sum(isinstance(item, kind) for item in items)
""",
    "test_list": ["assert height(root) == 3", "assert count((1, 'a', 'b'), str) == 2 and height(None) == 0"],
    "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)",
}
MBPP_SANITIZED = {
    "prompt": "Write a function that adds.",
    "code": "def add(a, b): return a + b",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"],
}
ROLLYARD = {"question": "Echo.", "tests": [{"input": "a", "output": "a"}], "solution": "print(input())"}


def body_of(row: dict[str, Any], **options: str) -> Any:
    body = CodeEnvironment().from_row(row, options)
    CodeEnvironment().check(to_task(dict(body), {}))
    return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resources():
    async with open_resources("bubblewrap") as there:
        yield there


async def test_a_rows_own_solution_passes_all_tests(resources):
    rows = (APPS, APPS_CALLED, HUMAN_EVAL, MBPP, MBPP_SET_UP, MBPP_SANITIZED, ROLLYARD)
    results = await asyncio.gather(*(played(resources, body_of(row), "oracle") for row in rows))
    assert [result.score and result.score.reward for result in results] == [1.0] * len(rows), results


async def test_a_cheat_cannot_redefine_what_a_prompt_defines(resources):
    """HumanEval's tests may use the prompt's functions: those of the dataset, not of the solution."""
    cheat = "class Same(str):\n    __eq__ = lambda *_: True\nshift = lambda s: ''\ndef unshift(s): return ''"
    body = body_of(HUMAN_EVAL)
    result = await played(resources, {**body, "data": {**body["data"], "solution": cheat}}, "oracle")
    assert result.score is not None and result.score.reward == 0.0, result


async def test_apps_rows_become_tasks():
    assert body_of(APPS) == {
        "environment": "code",
        "data": {
            "question": "Print the sum.",
            "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "3 4", "output": "7"}],
            "solution": "print(sum(map(int, input().split())))",
        },
    }
    assert body_of({**APPS, "solutions": ""})["data"].get("solution") is None
    data = body_of(APPS_CALLED)["data"]
    assert (data["entry_point"], data["starter_code"]) == ("pairs", "def pairs(a, b):\n\t")
    assert data["tests"] == [{"input": [2, 3], "outputs": [[6], 6]}, {"input": [4, 5], "outputs": [20]}]


async def test_live_code_bench_rows_become_tasks():
    data = body_of(LCB)["data"]
    assert data["public_tests"] == [{"input": "1 2", "output": "3"}]
    assert data["tests"] == [{"input": "1 2", "output": "3"}, {"input": "9 9", "output": "18"}]
    data = body_of(LCB_CALLED)["data"]
    assert data["entry_point"] == "add"
    assert data["tests"] == [{"input": [[1], 2], "output": 3}, {"input": [[1, 2], "x"], "output": None}]
    cases = json.dumps([{"input": '"a\u2028b"\n2\n', "output": "3", "testtype": "functional"}])
    assert body_of({**LCB_CALLED, "public_test_cases": cases})["data"]["tests"][0] == {
        "input": ["a\u2028b", 2],
        "output": 3,
    }
    assert len(body_of({**LCB, "private_test_cases": ""})["data"]["tests"]) == 1


async def test_codeforces_rows_become_tasks():
    data = body_of(CODEFORCES, language="cpp")["data"]
    assert data["question"] == "Add two numbers.\n\nInput\n\nTwo numbers.\n\nOutput\n\nTheir sum."
    assert data["tests"] == [{"input": "5 6", "output": "11"}]
    assert data["public_tests"] == [{"input": "1 2", "output": "3"}]
    assert (data["time_s"], data["memory_bytes"], data["language"]) == (2.0, 512 << 20, "cpp")


async def test_mbpp_rows_become_tasks():
    data = body_of(MBPP)["data"]
    assert (data["entry_point"], data["public_tests"]) == ("merge", MBPP["test_list"][:1])
    assert data["asserts"] == [*MBPP["test_list"], *MBPP["challenge_test_list"]]


async def test_options_override_the_row():
    body = body_of(CODEFORCES, time_s="7.5", memory_bytes="1000000000", reward="share", image="box.sif")
    assert body["sandbox"] == {"image": "box.sif"}
    data = body["data"]
    assert (data["time_s"], data["memory_bytes"], data["reward"]) == (7.5, 1_000_000_000, "share")
    with pytest.raises(TaskInvalid, match=r"unknown option 'timeout' of its importer; there are image, language"):
        body_of(APPS, timeout="3")
    with pytest.raises(TaskInvalid, match="time_s=soon: a number was expected"):
        body_of(APPS, time_s="soon")


async def test_the_eval_limit_grows_with_the_number_of_tests():
    many = {**CODEFORCES, "official_tests": CODEFORCES["official_tests"] * 500}
    assert body_of(many)["limits"] == {"eval_s": 1060.0}
    assert body_of(many, time_s="100")["limits"] == {"eval_s": 7200.0}
    assert "limits" not in body_of(CODEFORCES)


class Evil:
    def __reduce__(self):
        return (print, ("run!",))


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"a": 1}, r"a row of an unknown dataset.*question, input_output; question_content, public_test_cases; descr"),
        ({**APPS, "input_output": ""}, "input_output: JSON was expected"),
        ({**APPS, "input_output": "[]"}, "input_output: an object was expected"),
        ({**APPS, "input_output": '{"inputs": [1], "outputs": []}'}, r"as many outputs as inputs \(1\)"),
        ({**APPS, "input_output": '{"inputs": [1], "outputs": ["1"]}'}, "input_output: a list was expected"),
        ({**APPS, "input_output": '{"inputs": []}'}, "outputs: a list was expected"),
        ({**APPS, "question": 1}, "question: a string was expected"),
        ({**LCB, "private_test_cases": pack(Evil())}, "it names builtins.print, and only data is loaded"),
        ({**LCB, "private_test_cases": pack([1])}, "private_test_cases: JSON was expected"),
        ({**LCB, "private_test_cases": "?"}, "neither JSON nor packed JSON"),
        ({**LCB, "private_test_cases": base64.b64encode(b"?").decode()}, "neither JSON nor packed JSON"),
        ({**LCB, "private_test_cases": pack("x" * 2000)}, "more than 0 MiB, or cut off"),
        ({**LCB_CALLED, "public_test_cases": '[{"input": 1}]'}, "strings for input and output"),
        ({**LCB_CALLED, "public_test_cases": '[{"input": "x", "output": ""}]'}, "input: JSON was expected"),
        ({**CODEFORCES, "interaction_format": "Ask."}, "interaction_format: this problem is not supported"),
        ({**CODEFORCES, "generated_checker": "…"}, "several answers are right"),
        ({**CODEFORCES, "input_mode": "file"}, "it reads and writes files"),
        ({**CODEFORCES, "official_tests": []}, "data.tests: either at least one test here"),
        ({**MBPP, "code": None, "test_list": None}, "unknown dataset"),
    ],
)
async def test_rows_that_cannot_become_tasks_are_refused_with_the_reason(row, wrong, monkeypatch, capsys):
    monkeypatch.setattr(rows, "MOST_TESTS_BYTES", 1000)
    with pytest.raises(TaskInvalid, match=wrong):
        body_of(row)
    assert not capsys.readouterr().out
