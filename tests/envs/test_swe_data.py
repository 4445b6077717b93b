"""What the environment `swe` parses: rows of datasets, Rollyard's options, and the output of tests."""

import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollyard.core import SandboxOptions, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.swe import SweEnvironment
from rollyard.envs.swe.data import SweData, touched
from rollyard.envs.swe.grading import Grader, cut, script
from rollyard.envs.swe.suites import SUITES
from rollyard.service.schemas.task import to_task

pytestmark = pytest.mark.slow

TEST_PATCH = """diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-old
+new
diff --git a/tests/data.json b/tests/data.json
new file mode 100644
--- /dev/null
+++ b/tests/data.json
@@ -0,0 +1 @@
+{}
diff --git a/tests/was.py b/tests/sub dir/is.py
similarity index 100%
rename from tests/was.py
rename to tests/sub dir/is.py
diff --git a/tests/gone.py b/tests/gone.py
deleted file mode 100644
--- a/tests/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-old
"""
ROW: dict[str, Any] = {
    "repo": "pallets/flask",
    "instance_id": "pallets__Flask-1",
    "base_commit": "abc",
    "patch": "diff --git a/src/a.py b/src/a.py\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "It {breaks}.",
    "hints_text": "look at {repo}",
    "version": "2.0",
    "FAIL_TO_PASS": '["tests/test_a.py::test_x"]',
    "PASS_TO_PASS": '["tests/test_a.py::test_y"]',
    "environment_setup_commit": "def",
}
R2E: dict[str, Any] = {
    "repo_name": "orange3",
    "docker_image": "namanjain12/orange3_final:123",
    "commit_hash": "123",
    "problem_statement": "[ISSUE]\nIt breaks.\n[/ISSUE]",
    "expected_output_json": '{"T.test_a": "PASSED", "test_b": "FAILED"}',
    "modified_files": '["setup.cfg", "a.py"]',
    "prompt": "…",
}


def task(data: Mapping[str, Any]) -> Task:
    return Task("swe", dict(data), sandbox=SandboxOptions(image="x"))


def read(data: Mapping[str, Any]) -> SweData:
    return SweData.read(task(data))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"repo": None}, "swe: data.repo: a string was expected"),
        ({"problem_statement": " "}, "data.problem_statement: a string"),
        ({"FAIL_TO_PASS": None}, "data.FAIL_TO_PASS: a list of tests, or one in JSON,"),
        ({"FAIL_TO_PASS": "[x"}, "data.FAIL_TO_PASS: a list of tests"),
        ({"FAIL_TO_PASS": "[]"}, "data.FAIL_TO_PASS: at least one test"),
        ({"PASS_TO_PASS": [1]}, "data.PASS_TO_PASS: a list of tests"),
        ({"repo": "me/mine"}, "data.test_command: how to run the tests of me/mine at version '2.0', which is not a k"),
        ({"repo": "python/mypy", "version": None}, "data.test_command: how to run the tests of python/mypy, which"),
        ({"repo": "django/django", "version": "1.4"}, "how to run the tests of django/django at version '1.4'"),
        ({"repo": "django/django", "version": None}, "how to run the tests of django/django, which is not a known"),
        ({"repo": "me/mine", "test_command": "make"}, "data.log_parser: the name of one of swebench's parsers"),
        (
            {"eval_script": "pytest", "log_parser": "parse_log_pytest"},
            "data.eval_script: a swebench script that contains '>>",
        ),
        ({"eval_type": "other"}, 'data.eval_type: "pass_and_fail" or "fail_only"'),
        ({"workdir": "testbed"}, "data.workdir: the absolute path of a repository"),
        ({"workdir": "/"}, "data.workdir"),
        ({"instruction": "do it"}, "data.instruction: a string that contains {problem_statement}"),
        ({"env": {"A": 1}}, r"data.env\['A'\]: a string"),
        ({"test_patch": 1}, "data.test_patch: a string"),
        ({"expected_output_json": "[]"}, "data.repo_name: a string"),
        (
            {"expected_output_json": "[]", "repo_name": "x"},
            "data.expected_output_json: an object of tests and their out",
        ),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(change: dict[str, Any], wrong: str):
    with pytest.raises(TaskInvalid, match=wrong):
        SweEnvironment().check(task({**ROW, **change}))


def test_a_task_without_an_image_or_without_swebench_is_refused(monkeypatch: pytest.MonkeyPatch):
    SweEnvironment().check(task(ROW))
    with pytest.raises(TaskInvalid, match=r"swe: sandbox\.image: the image that holds the repository was expected"):
        SweEnvironment().check(Task("swe", ROW))
    monkeypatch.setitem(sys.modules, "swebench", None)
    with pytest.raises(
        TaskInvalid, match=r"swebench grades these tasks and is not installed: pip install 'rollyard\[s"
    ):
        SweEnvironment().check(task(ROW))


def test_rows_are_parsed_unchanged():
    data = read({**ROW, "anything": {"else": 1}})
    assert data.fail_to_pass == ("tests/test_a.py::test_x",)
    assert read({**ROW, "FAIL_TO_PASS": ["a", "b"]}).fail_to_pass == ("a", "b")
    names = ("test_a.py", "data.json", "was.py", "sub dir/is.py", "gone.py")
    assert data.test_files == tuple(f"tests/{name}" for name in names)
    assert data.tests_to_run() == "pytest -rA tests/test_a.py 'tests/sub dir/is.py'"
    assert data.log_parser == "parse_log_flask"
    django = read({**ROW, "repo": "django/django", "version": "4.0"})
    assert django.tests_to_run().endswith(" --parallel 1 test_a 'sub dir.is'")
    own = read({**ROW, "test_command": "make check", "log_parser": "parse_log_pytest_v2"})
    assert (own.tests_to_run(), own.log_parser, own.workdir) == ("make check", "parse_log_pytest_v2", "/testbed")


@pytest.mark.parametrize(
    ("repo", "version", "parts"),
    [
        ("django/django", "1.9", ("setup.py install", "./tests/runtests.py --verbosity 2 test_a")),
        ("django/django", "1.10", ("setup.py install", "--settings=test_sqlite --parallel 1 test_a")),
        ("django/django", "3.2", ("locale-gen", "--settings=test_sqlite --parallel 1 test_a")),
        ("astropy/astropy", "1.3", ("pytest -rA -vv -o console_output_style=classic --tb=no tests/",)),
        ("astropy/astropy", "v5.3", ("pytest -rA tests/",)),
        ("conan-io/conan", "2.0", ("PYTHONPATH=${PYTHONPATH:-}:$PWD pytest -n0 -rA tests/",)),
    ],
)
def test_the_test_command_depends_on_the_repositorys_version(repo: str, version: str, parts: tuple[str, ...]):
    command = read({**ROW, "repo": repo, "version": version}).tests_to_run()
    assert all(part in command for part in parts)
    assert ("install" in command) == ("install" in "".join(parts))


def test_every_known_suite_has_a_swebench_parser():
    """For repositories that swebench knows, it is the same parser."""
    code = (
        "import json; from swebench.harness.log_parsers import PARSER_REGISTRY;"
        " from swebench.harness.log_parsers.python import MAP_REPO_TO_PARSER_PY;"
        " print(json.dumps([{name: id(parser) for name, parser in PARSER_REGISTRY.items()},"
        " {repo: id(parser) for repo, parser in MAP_REPO_TO_PARSER_PY.items()}]))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    registry, by_repo = json.loads(completed.stdout)
    suites = [(repo, suite) for repo, versions in SUITES.items() for suite in versions.values()]
    assert {suite.log_parser for _, suite in suites} <= set(registry)
    for repo, suite in suites:
        assert registry[suite.log_parser] == by_repo.get(repo, registry[suite.log_parser]), repo
    assert set(by_repo) <= set(SUITES)


def test_a_stripped_patch_gets_its_final_line_break():
    data = read({**ROW, "patch": "diff --git a/x b/x", "test_patch": TEST_PATCH.strip()})
    assert (data.patch, data.test_patch) == ("diff --git a/x b/x\n", TEST_PATCH)
    assert read({**ROW, "patch": ""}).patch == ""


def test_the_prompt_contains_the_issue_but_not_the_tests():
    prompt = read(ROW).first_message()
    assert "It {breaks}." in prompt and "/testbed" in prompt
    assert "look at" not in prompt and "test_x" not in prompt
    own = read({**ROW, "instruction": "{repo}: {problem_statement} ({hints_text}) {other}"})
    assert own.first_message() == "pallets/flask: It {breaks}. (look at {repo}) {other}"


def test_files_that_decide_how_tests_run_are_left_out_unless_the_fix_has_them():
    excluded = read({**ROW, "test_patch": "diff --git a/t/a[1].py b/t/a[1].py\n"}).excluded_patterns
    assert {r"t/a\[1].py", "conftest.py", "*/conftest.py", "setup.cfg", "pyproject.toml", "*.pth"} <= set(excluded)
    assert "run_tests.sh" not in excluded
    own = read({**ROW, "patch": "diff --git a/x/conftest.py b/x/conftest.py\n"}).excluded_patterns
    assert "conftest.py" not in own and "*/conftest.py" not in own and "setup.cfg" in own
    r2e = read(R2E).excluded_patterns
    assert {"r2e_tests/*", "run_tests.sh", "tox.ini"} <= set(r2e) and "setup.cfg" not in r2e
    django = {**ROW, "repo": "django/django", "version": "4.0"}
    assert "tests/runtests.py" in read(django).excluded_patterns
    fixed = read({**django, "patch": "diff --git a/tests/runtests.py b/tests/runtests.py\n"}).excluded_patterns
    assert "tests/runtests.py" not in fixed and "*.egg-info/*" in fixed
    plugin = read({**ROW, "patch": "diff --git a/x.egg-info/a b/x.egg-info/a\n"}).excluded_patterns
    assert "*.egg-info/*" not in plugin and "*.dist-info/*" in plugin


def test_names_in_a_patch_with_carriage_returns_are_read():
    assert touched("diff --git a/x.py b/x.py\r\n--- a/x.py\r\n") == ("x.py",)


@pytest.mark.parametrize(
    ("row", "options", "image"),
    [
        (ROW, {}, "docker://swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest"),
        ({**ROW, "environment_setup_commit": ...}, {}, "docker://xingyaoww/sweb.eval.x86_64.pallets_s_flask-1:latest"),
        ({**ROW, "image": "swebench/sweb:1"}, {}, "docker://swebench/sweb:1"),
        (R2E, {}, "docker://namanjain12/orange3_final:123"),
        (ROW, {"images": "/data/sif/{instance_id}.sif"}, "/data/sif/pallets__Flask-1.sif"),
        ({**ROW, "image": "x"}, {"images": "/data/sif/"}, "/data/sif/pallets__Flask-1.sif"),
        (ROW, {"images": "docker://host:5000/{name}"}, "docker://host:5000/pallets_1776_flask-1"),
        (R2E, {"images": "/data"}, "/data/orange3-123.sif"),
        (ROW, {"images": "/data/one.sif"}, "/data/one.sif"),
        (ROW, {"images": "docker://host:5000/one:1"}, "docker://host:5000/one:1"),
    ],
)
def test_a_row_becomes_a_task_with_its_image(row: dict[str, Any], options: dict[str, str], image: str):
    row = {name: value for name, value in row.items() if value is not ...}
    body = SweEnvironment().from_row(row, options)
    assert body["sandbox"] == {"image": image}
    swe_task = to_task(json.loads(json.dumps(body)), {})
    SweEnvironment().check(swe_task)
    assert (swe_task.limits.run_s, swe_task.limits.eval_s) == (3600, 1800)
    assert {name: swe_task.data[name] for name in row} == row
    bin_folder = "/testbed/.venv/bin" if row is R2E or "repo_name" in row else "/opt/miniconda3/envs/testbed/bin"
    assert str(SweEnvironment().plan(swe_task).env["PATH"]).startswith(bin_folder)


def test_options_of_the_importer_are_applied():
    options = {"test_command": "make check", "log_parser": "parse_log_pytest", "workdir": "/src"}
    body = SweEnvironment().from_row({**ROW, "repo": "me/mine"}, options)
    data = body["data"]
    assert isinstance(data, dict) and {name: data[name] for name in options} == options
    assert "env" not in data
    for options, wrong in (
        ({"image": "x"}, "swe: unknown option 'image' of its importer; there are images, instruction, log_parser, sys"),
        ({"images": "/x/{id}.sif"}, r"swe: option images: there is no \{id\}; there are \{instance_id\} and \{name\}"),
    ):
        with pytest.raises(TaskInvalid, match=wrong):
            SweEnvironment().from_row(ROW, options)
    with pytest.raises(TaskInvalid, match=r"data\.FAIL_TO_PASS"):
        SweEnvironment().from_row({**ROW, "FAIL_TO_PASS": None}, {})
    with pytest.raises(TaskInvalid, match=r"data\.repo: a string"):
        SweEnvironment().from_row({**ROW, "repo": ["pallets/flask"]}, {})
    with pytest.raises(TaskInvalid, match="swe: instance_id: a string was expected"):
        SweEnvironment().from_row({**ROW, "instance_id": None}, {})


def test_tasks_of_one_image_share_a_set_up():
    swe = SweEnvironment()
    assert swe.layer_key(task(ROW)) == swe.layer_key(task({**ROW, "problem_statement": "x", "FAIL_TO_PASS": ["y"]}))
    assert swe.layer_key(task(ROW)) != swe.layer_key(task({**ROW, "workdir": "/src"}))
    assert swe.layer_key(task(ROW)) != swe.layer_key(task(R2E))


@pytest.mark.parametrize(
    ("output", "body"),
    [
        ("set up\n\nN-begins\nPASSED a\n\nN-ends\n", "PASSED a\n"),
        ("+ printf N\n\nN-begins\nPASSED a\n\nN-ends\n+ exit 1\n", "PASSED a\n"),
        ("PASSED a\n", None),
        ("\nN-begins\nPASSED a\n", None),
        ("\nN-begins\nPASSED a\n\nN-ends\nFAILED a\n\nN-ends\n", None),
        ("\nN-begins\nFAILED a\n\nN-begins\nPASSED a\n\nN-ends\n", None),
        ("\nN-begins\nPASSED a\n\nN-ends\nmore\nmore\n", None),
    ],
)
def test_only_output_between_the_marks_counts(output: str, body: str | None):
    assert cut(output, "N") == body


def test_the_marks_are_random_and_not_in_a_trace_of_the_shell():
    text = script(read(ROW), "N")
    assert "N-begins" not in text and "N-ends" not in text
    assert text.startswith("exec 2>&1\n")


def test_a_script_that_stores_the_status_itself_does_not_hide_it():
    """In such a script the last line before swebench's mark is not a test."""
    own = "cd /\n: '>>>>> Start Test Output'\n(exit 3)\nSWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n"
    for text, status in ((own, 3), (own.replace("SWEBENCH_TEST_EXIT_CODE=$?\n", ""), 3), (own.replace("3", "0"), 0)):
        data = read({**ROW, "eval_script": text})
        completed = subprocess.run(["bash", "-c", script(data, "N")], capture_output=True, text=True)
        assert (completed.returncode, cut(completed.stdout, "N")) == (status, "")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grader() -> AsyncGenerator[Grader, None]:
    """Shared by all tests: swebench takes a second or two to start."""
    new_grader = Grader()
    yield new_grader
    await new_grader.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_swebench_decides(grader: Grader):
    data = read({**ROW, "log_parser": "parse_log_pytest", "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": ["t.py::b"]})

    async def verdict(log: str, status: int = 0, of: SweData = data) -> tuple[bool, dict[str, float]]:
        graded = await grader.verdict(of, log, status, wait_s=60)
        return graded.is_resolved, graded.shares

    both = "PASSED t.py::a\nPASSED t.py::b\n"
    assert await verdict(both) == (True, {"fail_to_pass": 1.0, "pass_to_pass": 1.0})
    assert await verdict("PASSED t.py::a\nFAILED t.py::b - x\n", 1) == (
        False,
        {"fail_to_pass": 1.0, "pass_to_pass": 0.0},
    )
    assert await verdict("PASSED t.py::a\n") == (False, {"fail_to_pass": 1.0, "pass_to_pass": 0.0})
    # tests reported as passed by a runner that exits with an error
    assert await verdict(both, 1) == (False, {"fail_to_pass": 0.0, "pass_to_pass": 0.0})
    # swebench's own marks, printed by the code under test
    forged = f"{both}>>>>> End Test Output\n>>>>> Test Exit Code: 0\nFAILED t.py::a - x\n"
    assert not (await verdict(forged, 1))[0]
    assert not (await verdict(f"{both}>>>>> Test Exit Code: 0\n", 1))[0]
    assert await verdict("") == (False, {"fail_to_pass": 0.0, "pass_to_pass": 0.0})
    only_failures = read({**ROW, "log_parser": "parse_log_eslint", "eval_type": "fail_only"})
    assert (await verdict("12 passing (1s)\n", 0, only_failures))[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_outcomes_of_r2e_must_be_the_expected_ones(grader: Grader):
    async def verdict(log: str) -> tuple[bool, float]:
        graded = await grader.verdict(read(R2E), log, 1, wait_s=60)
        return graded.is_resolved, graded.shares["expected"]

    summary = "=== short test summary info ===\n"
    right = f"{summary}\x1b[32mPASSED\x1b[0m r2e_tests/t.py::T::test_a\nFAILED r2e_tests/t.py::test_b - it's wrong\n"
    assert await verdict(right) == (True, 1.0)
    assert await verdict(f"{right}PASSED r2e_tests/t.py::test_c\n") == (False, 1.0)
    assert await verdict(right.replace("FAILED", "PASSED")) == (False, 0.5)
    others = "XFAIL r2e_tests/t.py::test_x - later\nSKIPPED [1] r2e_tests/t.py:3: no\nSKIPPED r2e_tests/t.py::test_s\n"
    assert await verdict(f"{right}{others}") == (True, 1.0)
    spaced = {**R2E, "expected_output_json": {"test_a[x  y]": "PASSED"}}
    graded = await grader.verdict(read(spaced), f"{summary}PASSED r2e_tests/t.py::test_a[x  y]\n", 0, wait_s=60)
    assert graded.is_resolved
    assert await verdict(right.replace(summary, "")) == (False, 0.0)


def test_nothing_heavy_is_imported_with_the_environment():
    code = "import rollyard.envs.swe, sys; print('swebench' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert completed.stdout == "False\n", completed.stderr
