"""The stages of the `code` environment, one by one, in sandboxes of the local runtime."""

import json
from dataclasses import replace

import pytest

from rollyard.core.failure import SetupFailed, TaskInvalid, VerifierCrashed
from rollyard.envs.code import CodeEnvironment, grading
from rollyard.envs.code.data import LANGUAGES
from rollyard.sandbox import WORKDIR

from .conftest import context, evidence, task

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
PROGRAM = {
    "question": "Add two numbers.",
    "tests": [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in (1, 2, 3)],
}
CALLED = {"question": "Add two numbers.", "entry_point": "add", "tests": [{"input": [1, 2], "output": 3}]}
ASSERTED = {"question": "Add two numbers.", "asserts": ["assert add(1, 2) == 3"]}


async def test_hidden_tests_are_neither_in_the_prompt_nor_in_runs_sandbox(new_sandbox):
    sandbox = await new_sandbox()
    data = {
        **PROGRAM,
        "tests": [{"input": "1234 4321", "output": "hidden-5555"}],
        "public_tests": [{"input": "7 8", "output": "shown-15"}],
        "solution": "secret",
        "system_prompt": "Be brief.",
    }
    start = await CodeEnvironment().init(context(task("code", data), sandbox))
    system, user = start.messages
    assert system["content"] == "Be brief."
    assert "Add two numbers." in str(user["content"]) and "shown-15" in str(user["content"])
    assert f"{WORKDIR}/solution.py" in str(user["content"]) and "10 s and 4096 MiB" in str(user["content"])
    visible = f"{start} {(await sandbox.exec('cat -- * 2>&1; env', timeout_s=20)).stdout!r}"
    assert not [text for text in ("1234", "hidden-5555", "secret") if text in visible]


async def test_the_prompt_shows_how_functions_are_called(new_sandbox):
    data = {**CALLED, "public_tests": [{"input": [[True], "x"], "output": None}], "starter_code": "def add(a, b): ..."}
    (user,) = (await CodeEnvironment().init(context(task("code", data), await new_sandbox()))).messages
    for part in ("add([True], 'x') → None", "```python\ndef add(a, b): ...\n```", "defines `add`"):
        assert part in str(user["content"])
    data = {**ASSERTED, "public_tests": ["assert add(1, 1) == 2"]}
    (user,) = (await CodeEnvironment().init(context(task("code", data), await new_sandbox()))).messages
    assert "```python\nassert add(1, 1) == 2\n```" in str(user["content"])


async def test_without_a_file_the_last_code_block_is_the_solution(new_sandbox):
    eval_context = context(task("code", PROGRAM), await new_sandbox())
    message = f"First:\n```python\nprint(1)\n```\nNo:\n```python\n{ADD}```\nIt prints\n```text\n3\n```\n"
    assert (await CodeEnvironment().eval(eval_context, evidence(message, saved=()))).reward == 1.0
    assert (await CodeEnvironment().eval(eval_context, evidence("done", saved=(), answer=message))).reward == 1.0
    score = await CodeEnvironment().eval(eval_context, evidence("I cannot.", saved=()))
    assert (score.reward, score.metrics["has_solution"], score.metrics["skipped"]) == (0.0, 0.0, 3)


async def test_what_a_solution_printed_is_found_and_hidden_tests_are_not(new_sandbox):
    sandbox = await new_sandbox()
    data = {**PROGRAM, "tests": [{"input": "1 1\n", "output": "2\n"}, {"input": "9 9\n", "output": "hidden-18\n"}]}
    eval_context = context(task("code", data), sandbox)
    score = await CodeEnvironment().eval(eval_context, evidence(f"```python\n{ADD}```", saved=()))
    assert score.metrics["passed"] == 1.0
    good, bad = json.loads(eval_context.findings.encoded())
    assert (good["name"], good["passed"]) == ("test 0", True)
    assert (bad["name"], bad["passed"], bad["text"]) == ("test 1", False, "18\n(exit status 0)")
    assert b"hidden" not in eval_context.findings.encoded()


async def test_a_folder_instead_of_the_solution_file_is_no_solution(new_sandbox):
    sandbox = await new_sandbox()
    await sandbox.write(f"{WORKDIR}/solution.py/__main__.py", ADD.encode())
    score = await CodeEnvironment().eval(context(task("code", PROGRAM), sandbox), evidence(saved=("solution",)))
    assert (score.reward, score.metrics["has_solution"]) == (0.0, 0.0)


async def test_an_image_without_the_language_fails_in_init(new_sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LANGUAGES, "python", replace(LANGUAGES["python"], needs=("python2000",)))
    with pytest.raises(SetupFailed, match="the image has no python2000, which python solutions need"):
        await CodeEnvironment().init(context(task("code", PROGRAM), await new_sandbox()))


async def test_an_old_python_cannot_run_functions(new_sandbox):
    """The image's python3 always fails."""
    sandbox = await new_sandbox()
    await sandbox.write(f"{WORKDIR}/bin/python3", b"#!/bin/sh\nexit 1\n", mode=0o755)
    folder = (await sandbox.exec("pwd", timeout_s=20)).stdout.decode().strip()
    run = sandbox.exec
    sandbox.exec = lambda command, **more: run(command, env={"PATH": f"{folder}/bin:/usr/bin:/bin"}, **more)
    await CodeEnvironment().init(context(task("code", PROGRAM), sandbox))
    with pytest.raises(SetupFailed, match=r"it must be 3\.7 or newer, with ctypes"):
        await CodeEnvironment().init(context(task("code", CALLED), sandbox))


@pytest.mark.parametrize(
    ("more", "error", "wrong"),
    [
        (
            {"asserts": ["import json, numpy2000.linalg\nassert add(1, 2)"]},
            SetupFailed,
            r"has no numpy2000, which this",
        ),
        ({"prelude": "from numpy2000 import array"}, SetupFailed, r"has no numpy2000, which this task's tests import"),
        ({"asserts": ["from solution import add\nassert add(1, 2)"]}, SetupFailed, r"no solution, .* need not import"),
        ({"asserts": ["assert 1", "assert ("]}, TaskInvalid, r"data\.asserts\[1\]: this is not Python"),
    ],
)
async def test_asserts_that_can_never_run_fail_in_init(new_sandbox, more, error, wrong):
    """Otherwise every solution would look wrong."""
    with pytest.raises(error, match=wrong):
        await CodeEnvironment().init(context(task("code", {**ASSERTED, **more}), await new_sandbox()))


async def test_a_tester_that_does_not_start_gives_no_score(new_sandbox, monkeypatch: pytest.MonkeyPatch):
    sandbox = await new_sandbox()
    monkeypatch.setattr(grading, "_source", lambda name: "raise RuntimeError('no tester')")
    with pytest.raises(VerifierCrashed, match=r"the tester did not start \(status 1\)(.|\n)*no tester"):
        eval_context = context(task("code", ASSERTED), sandbox)
        await CodeEnvironment().eval(eval_context, evidence("```python\nx = 1\n```", saved=()))
