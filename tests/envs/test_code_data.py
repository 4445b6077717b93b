import pytest

from rollyard.core.failure import TaskInvalid
from rollyard.envs.code import CodeEnvironment
from rollyard.envs.code.answer import last_block
from rollyard.envs.code.compare import is_same_output, is_same_result
from rollyard.envs.code.data import CodeData
from rollyard.sandbox import WORKDIR

from .conftest import task

GOOD = {"question": "Add.", "tests": [{"input": "1 2", "output": "3"}]}


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"question": " "}, "code: data.question: a string was expected"),
        ({"tests": []}, "data.tests: either at least one test here, or at least one of data.asserts"),
        ({"asserts": ["assert True"]}, "data.tests: either"),
        ({"tests": None, "asserts": "x"}, "data.asserts: a list"),
        ({"tests": ["x"]}, r"data.tests\[0\]: an object with input and output"),
        ({"tests": [{"input": "x"}]}, r"data.tests\[0\].output: the right output, or in `outputs` a list"),
        ({"tests": [{"input": "x", "outputs": []}]}, r"data.tests\[0\].output: the right output"),
        ({"tests": [{"input": "x", "output": 1}]}, r"data.tests\[0\].output: a string"),
        ({"tests": [{"input": [1], "output": "1"}]}, r"input: a string for standard input .*need data.entry_point"),
        ({"entry_point": "f"}, r"data.tests\[0\].input: a list"),
        ({"entry_point": "f()"}, "data.entry_point: the name of a function"),
        ({"tests": [{"input": "", "output": "", "time": 1}]}, r"data.tests\[0\].time: unknown field"),
        ({"public_tests": [{"input": "x"}]}, r"data.public_tests\[0\].output"),
        (
            {"language": "cobol"},
            "data.language: one of bash, c, cpp, javascript, python, or another with",
        ),
        ({"language": "cobol", "command": "cobol x"}, "data.language: one of"),
        ({"command": "pypy solution.py"}, "data.file: the name of the file that data.command runs"),
        ({"compile": "make"}, "data.command: the command that runs the solution"),
        ({"file": "a/b", "command": "x"}, f"data.file: the name of a file in {WORKDIR}"),
        ({"file": "..", "command": "x"}, "data.file: the name of a file"),
        ({"language": "bash", "tests": None, "asserts": ["assert 1"]}, "data.language: python, the only language"),
        ({"time_s": 0}, "data.time_s: a number above 0"),
        ({"memory_bytes": 1 << 20}, "data.memory_bytes: at least 33554432"),
        ({"memory_bytes": "1G"}, "data.memory_bytes: a number above 0"),
        ({"tolerance": -1}, "data.tolerance"),
        ({"prelude": "x = 1"}, "data.prelude: nothing, as this task's solution is a program"),
        ({"reward": "some"}, 'data.reward: "all" or "share"'),
        ({"test": []}, "data.test: unknown field; there are asserts, command, compile, entry_point, file, language"),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(change, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        CodeEnvironment().check(task("code", {**GOOD, **change}))


def test_good_data_passes_and_only_the_solution_is_kept():
    for more in ({}, {"language": "cpp"}, {"language": "zig", "file": "a.zig", "command": "zig run a.zig"}):
        CodeEnvironment().check(task("code", {**GOOD, **more}))
    rule, *others = CodeEnvironment().plan(task("code", {**GOOD, "language": "cpp"})).artifacts
    assert (rule.name, rule.path, rule.limit_bytes, others) == ("solution", f"{WORKDIR}/solution.cpp", 1 << 20, [])
    assert CodeEnvironment().plan(task("code", GOOD)).eval_mode == "fresh"


def test_address_space_is_limited_by_the_language_unless_the_task_sets_a_limit():
    for more, limit in (
        ({}, 4 << 30),
        ({"memory_bytes": 1 << 30}, 1 << 30),
        ({"language": "javascript"}, None),
        ({"file": "a.rb", "command": "ruby a.rb", "language": "ruby"}, None),
    ):
        assert CodeData.read(task("code", {**GOOD, **more})).memory_bytes == limit


@pytest.mark.parametrize(
    ("actual", "expected", "is_same"),
    [
        ("3\n", "3", True),
        ("  1   2 \r\n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("", "0", False),
        ("YES", "Yes", False),
        ("0.3333333", "0.33333333333", True),
        ("0.334", "0.33333333333", False),
        ("1000000.5", "1000000.0", True),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("1e-9", "0.0", True),
        ("1.5e3", "1500.0", True),
        ("1500", "15e2", True),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        (".", "0.5", False),
        ("-", "0.5", False),
        ("0.5", ".", False),
        ("9" * 100_000, "1.0", False),
        ("٣", "3", False),
        ("٣.0", "3.0", False),
        ("10000000000000000001", "10000000000000000000", False),
    ],
)
def test_output_is_compared_word_by_word(actual, expected, is_same):
    assert is_same_output(actual, expected) is is_same


@pytest.mark.parametrize(
    ("actual", "expected", "is_same"),
    [
        (3, 3, True),
        (3, 4, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (1, 1.0, True),
        (10**400, 1.5, False),
        (True, 1, True),
        (None, None, True),
        (0, None, False),
        (None, 0, False),
        ("a", "a", True),
        ("a", ["a"], False),
        ((1, [2]), [1, [2]], True),
        ([1], [1, 2], False),
        ({1: (2,)}, {"1": [2]}, True),
        ({1: 2}, {"2": 2}, False),
        ([], {}, False),
        ({1}, [1], False),
        (float("nan"), 1.0, False),
        (object(), 1, False),
    ],
)
def test_results_are_compared_as_json(actual, expected, is_same):
    assert is_same_result(actual, expected) is is_same


def test_the_tolerance_can_be_set():
    assert is_same_output("0.51", "0.5", 0.1)
    assert not is_same_output("0.5000001", "0.5", 1e-12)
    assert is_same_result(0.51, 0.5, 0.1)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("no code", None),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n```py\nb\n```", "b\n"),
        ("```py\na\n```\nprints\n```text\nb\n```", "a\n"),
        ("```text\na\n```\n```text\nb\n```", "b\n"),
        ("```Python title=x\na\n```", "a\n"),
        ("1. So:\n  ```py\n  if a:\n    b\n  ```", "if a:\n  b\n"),
        ("Use ```x```:\n```py\na\n```", "a\n"),
        ("```x```\n```py\na\n```", "a\n"),
        ("```py\r\na = '\u2028'\r\n```", "a = '\u2028'\n"),
        ("~~~py\n```\n~~~", "```\n"),
        ("```py\na\n```\n```py\ncut o", "a\n"),
        ("```py\ncut o", None),
        ("```py\ns = '```'\n```", "s = '```'\n"),
        ("````py\n```\na\n````", "```\na\n"),
    ],
)
def test_the_last_closed_block_of_the_language_counts(text, block):
    assert last_block(text, ("python", "py")) == block
