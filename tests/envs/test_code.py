"""The `code` environment in real sandboxes: right solutions, wrong ones, and those that try to cheat.

The agent `oracle` writes a task's `solution` as it is, so each cheat is played as one.
"""

from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from rollyard.core import Score
from rollyard.core.failure import SetupFailed, TaskInvalid, VerifierCrashed
from rollyard.envs.code import CodeEnvironment, grading
from rollyard.envs.code.data import LANGUAGES
from rollyard.pipeline import Workshop
from rollyard.sandbox import WORKDIR

from .conftest import context, evidence, task
from .yard import RUNTIMES, played, rewards, workshop

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
PAIRS = [{"input": f"{n} {n}\n", "output": f"{2 * n}\n"} for n in range(1, 4)]
PROGRAM = {"question": "Add two numbers.", "tests": PAIRS, "solution": ADD}
CALLED = {
    "question": "Add two numbers.",
    "entry_point": "add",
    "tests": [{"input": [1, 2], "output": 3}, {"input": [[1], [2]], "output": [1, 2]}],
    "solution": "class Solution:\n    def add(self, a: List[int], b):\n        return a + b\n",
}
ASSERTED = {
    "question": "Add two numbers.",
    "asserts": ["assert add(1, 2) == 3", "import math\nassert math.isclose(add(0.1, b=0.2), 0.3)"],
    "solution": "def add(a, b):\n    return a + b\n",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop():
    async with workshop("bubblewrap") as made:
        yield made


async def scored(shop: Workshop, data: dict[str, Any], solution: str | None = None) -> Score:
    """Of this solution; that there is a score, whatever the solution does, is part of every test here."""
    body = {"environment": "code", "data": {**data, "solution": solution or data["solution"]}}
    result = await played(shop, body, "oracle")
    assert result.score is not None, result.failure
    assert result.failure is None
    return result.score


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_gets_all_and_the_no_op_nothing(runtime: str):
    async with workshop(runtime) as there:
        for data in (PROGRAM, CALLED, ASSERTED):
            assert await rewards(there, {"environment": "code", "data": data}) == (1.0, 0.0)


# --- scores -------------------------------------------------------------------------------------------


HALF = "a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)\n"


async def test_the_reward_is_for_all_tests_or_for_their_share(shop: Workshop):
    score = await scored(shop, PROGRAM, HALF)
    assert (score.reward, score.components) == (0.0, {"passed": pytest.approx(2 / 3)})
    assert score.metrics == {
        "tests": 3,
        "passed": 2,
        "failed": 1,
        "timed_out": 0,
        "skipped": 0,
        "has_solution": 1,
    }
    assert (await scored(shop, {**PROGRAM, "reward": "share"}, HALF)).reward == pytest.approx(2 / 3)


async def test_any_of_several_outputs_is_accepted(shop: Workshop):
    data = {**PROGRAM, "tests": [{"input": "1 2", "outputs": ["4", "3"]}]}
    assert (await scored(shop, data)).reward == 1.0


async def test_other_languages_run_by_their_own_programs_or_a_given_command(shop: Workshop):
    bash = {**PROGRAM, "language": "bash", "solution": "read a b; echo $((a + b))"}
    assert (await scored(shop, bash)).reward == 1.0
    awk = {**PROGRAM, "language": "awk", "file": "sum.awk", "command": "awk -f sum.awk", "solution": "{print $1 + $2}"}
    assert (await scored(shop, awk)).reward == 1.0
    made = {
        **PROGRAM,
        "language": "m4ke",
        "file": "raw.txt",
        "compile": "sed s/PLUS/+/ raw.txt > made.sh",
        "command": "sh made.sh",
        "solution": "read a b; echo $((a PLUS b))",
    }
    assert (await scored(shop, made)).reward == 1.0
    score = await scored(shop, {**made, "compile": "exit 1"})
    assert (score.reward, score.metrics["skipped"]) == (0.0, 3)


async def test_many_tests_are_all_run(shop: Workshop):
    tests = [{"input": f"{n} 1", "output": str(n + 1)} for n in range(40)]
    assert (await scored(shop, {**PROGRAM, "tests": tests})).metrics["passed"] == 40


async def test_a_program_that_ends_with_a_status_fails_whatever_it_printed(shop: Workshop):
    assert (await scored(shop, PROGRAM, f"{ADD}raise SystemExit(1)")).reward == 0.0


async def test_asserts_see_changed_arguments_objects_and_exceptions(shop: Workshop):
    data = {
        **ASSERTED,
        "entry_point": "first",
        "prelude": "from collections import Counter\ndef first(pair): return None\ndef twice(n): return 2 * n",
        "asserts": [
            "given = [3, 1, 2]\nassert order(given) is None and given == [1, 2, 3]",
            "pair = Pair(1, b=2)\npair.a = 5\nassert pair.total() == 7 and first(pair) == 5 and pair.next is None",
            "try:\n    fails()\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
            "try:\n    fails_oddly()\nexcept Exception as error:\n    pass\nelse:\n    assert False",
            "assert letters('aab') == Counter(a=2, b=1) and twice(two()) == 4",
            "assert kinds() == (1, {2}, b'x', 1j, 10 ** 5000, frozenset(), {(1, 2): None}, float('inf'))",
            "assert list(squares(3)) == [0, 1, 4]",
            "def check(candidate):\n    for n in range(3):\n        assert candidate(n, n) == 2 * n\n\ncheck(add)",
        ],
    }
    solution = """
import collections
class Odd(Exception): pass
class Pair:
    next = None
    def __init__(self, a, b): self.a, self.b = a, b
    def total(self): return self.a + self.b
def first(pair): return pair.a
def order(given): given.sort()
def fails(): raise ValueError("no")
def fails_oddly(): raise Odd
def letters(text): return collections.Counter(text)
def two(): return 2
def kinds(): return 1, {2}, b"x", 1j, 10 ** 5000, frozenset(), {(1, 2): None}, float("inf")
def squares(n): return (k * k for k in range(n))
def add(a, b): return a + b
"""
    score = await scored(shop, data, solution)
    assert score.metrics["passed"] == len(data["asserts"]), score


async def test_wrong_functions_fail_each_assert_by_itself(shop: Workshop):
    solution = "import os\ndef add(a, b):\n    return 3 if a == 1 else os._exit(0)"
    score = await scored(shop, ASSERTED, solution)
    assert (score.reward, score.metrics["passed"], score.metrics["failed"]) == (0.0, 1, 1)
    assert (await scored(shop, ASSERTED, "def (")).reward == 0.0
    assert (await scored(shop, ASSERTED, "x = 1")).reward == 0.0
    assert (await scored(shop, CALLED, "def add(a, b): return object()")).reward == 0.0


async def test_a_result_in_a_list_is_no_result_unless_the_task_says_so(shop: Workshop):
    solution = "def add(a, b): return [a + b]"
    assert (await scored(shop, CALLED, solution)).reward == 0.0
    data = {**CALLED, "tests": [{"input": [1, 2], "outputs": [3, [3]]}]}
    assert (await scored(shop, data, solution)).reward == 1.0


# --- limits -------------------------------------------------------------------------------------------


async def test_what_runs_too_long_fails_and_after_three_the_rest_is_skipped(shop: Workshop):
    tests = [{"input": "1 1", "output": "2"}] * 5
    score = await scored(shop, {**PROGRAM, "tests": tests, "time_s": 0.5}, "while True: pass")
    assert (score.reward, score.metrics["timed_out"], score.metrics["skipped"]) == (0.0, 3, 2)


async def test_neither_sleep_nor_a_handler_escapes_the_limit(shop: Workshop):
    one = {**ASSERTED, "time_s": 0.1, "asserts": ["assert add(1, 2) == 3"]}
    score = await scored(shop, one, "import time\ndef add(a, b):\n    time.sleep(60)\n    return a + b")
    assert (score.reward, score.metrics["timed_out"]) == (0.0, 1)
    one = {**PROGRAM, "time_s": 0.1, "tests": PAIRS[:1]}
    score = await scored(shop, one, f"import time\ntime.sleep(60)\n{ADD}")
    assert (score.reward, score.metrics["timed_out"]) == (0.0, 1)
    ignores = f"import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass\n{ADD}"
    assert (await scored(shop, one, ignores)).reward == 0.0


async def test_a_function_that_never_ends_timed_out(shop: Workshop):
    solution = "def add(a, b):\n    while True: pass"
    for data in ({**CALLED, "tests": CALLED["tests"][:1]}, {**ASSERTED, "asserts": ASSERTED["asserts"][:1]}):
        score = await scored(shop, {**data, "time_s": 0.5}, solution)
        assert (score.reward, score.metrics["timed_out"]) == (0.0, 1)


async def test_memory_is_limited(shop: Workshop):
    limit = {"memory_bytes": 256 << 20}
    assert (await scored(shop, {**PROGRAM, **limit})).reward == 1.0
    assert (await scored(shop, {**PROGRAM, **limit}, f"x = bytes(1 << 29)\n{ADD}")).reward == 0.0
    solution = "def add(a, b):\n    x = bytes(1 << 29)\n    return a + b"
    for data in (CALLED, ASSERTED):
        assert (await scored(shop, {**data, **limit})).reward == 1.0
        assert (await scored(shop, {**data, **limit}, solution)).metrics["failed"] == 2


async def test_a_flood_of_output_is_bounded_and_wrong(shop: Workshop):
    flood = f"import sys\n{ADD}sys.stdout.flush()\nfor _ in range(200): sys.stdout.write(' ' * (1 << 16))"
    assert (await scored(shop, PROGRAM, flood)).metrics["failed"] == 3
    loud = f"import sys\n{ADD}sys.stderr.write('x' * (4 << 20))"
    assert (await scored(shop, PROGRAM, loud)).reward == 1.0


async def test_a_fork_bomb_is_bounded_and_fails(shop: Workshop):
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)"
    score = await scored(shop, {**PROGRAM, "time_s": 0.1, "tests": PAIRS[:2], "reward": "share"}, bomb)
    assert score.reward == 0.0
    many = f"""
import subprocess
{ADD}
try:
    for _ in range(300): subprocess.Popen(["sleep", "60"])
    print("no limit")
except OSError:
    pass
"""
    assert (await scored(shop, {**PROGRAM, "tests": PAIRS[:1]}, many)).reward == 1.0


@pytest.mark.parametrize("data", [PROGRAM, CALLED, ASSERTED], ids=["program", "called", "asserted"])
async def test_a_solution_that_ends_the_sandbox_has_a_score(shop: Workshop, data: dict[str, Any]):
    solution = "import time\nopen('big', 'wb').write(bytes(80 << 20))\ntime.sleep(60)"
    body = {"environment": "code", "data": {**data, "solution": solution}, "sandbox": {"disk_bytes": 20 << 20}}
    result = await played(shop, body, "oracle")
    assert result.score is not None, result.failure
    assert (result.score.reward, result.score.metrics["failed"], result.score.metrics["skipped"] > 0) == (0.0, 1, True)


async def test_a_program_has_all_the_stack_that_there_is(shop: Workshop):
    given = "import resource\nprint(len(set(resource.getrlimit(resource.RLIMIT_STACK))))"
    assert (await scored(shop, {**PROGRAM, "tests": [{"input": "", "output": "1"}]}, given)).reward == 1.0


# --- cheats -------------------------------------------------------------------------------------------


LOOK = """
import os, re

def peeked():
    parent = os.getppid()
    places = ["/proc/%d/%s" % (parent, name) for name in ("environ", "cmdline", "fd/0", "fd/3", "fd/4", "fd/5")]
    for place in places:
        try:
            with open(place, "rb", buffering=0) as file: text = file.read(1 << 20)
        except OSError:
            continue
        if b"== 3" in text: return True
    try:
        os.listdir("/proc/%d/map_files" % parent)
        open("/proc/%d/mem" % parent, "rb")
        return True
    except OSError:
        pass
    try:
        import ctypes
        if ctypes.CDLL(None).ptrace(16, parent, 0, 0) == 0: return True
    except Exception:
        pass
    import sys
    frame = sys._getframe()
    while frame:
        if "== 3" in repr(frame.f_globals) + repr(frame.f_locals): return True
        frame = frame.f_back
    for above, _, names in os.walk("/workspace"):
        for name in names:
            if name != "solution.py" and "== 3" in open(os.path.join(above, name), errors="replace").read():
                return True
    return False

def add(a, b):
    return 3 if peeked() else 0
"""

CHEATS = {
    "exits": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit": "import sys\ndef add(a, b): sys.exit(0)",
    "equals everything": "class All(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return All(9)",
    "equals everything, no number": "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()",
    "patches builtins": (
        "import builtins, math\nmath.isclose = lambda *_: True\nbuiltins.AssertionError = KeyError\n"
        "builtins.exec = lambda *_: None\nimport ast\nast.parse = lambda *_: None\ndef add(a, b): return 0"
    ),
    "writes verdicts everywhere": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0 0 passed\\n{\"passed\": true}\\n')\n"
        "    except OSError: pass\ndef add(a, b): return 0"
    ),
    "answers for the worker": (
        "import os\ndef add(a, b):\n    for fd in range(3, 64):\n"
        '        try: os.write(fd, b\'{"value": {"object": true}}\\n\')\n'
        "        except OSError: pass\n    os._exit(0)"
    ),
    "kills the tester": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "rings the tester's clock": (
        "import os, signal\ndef add(a, b):\n"
        "    for _ in range(20000): os.kill(os.getppid(), signal.SIGALRM)\n    return 0"
    ),
    "starves the tester": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1, 1))\ndef add(a, b): return [0] * 10 ** 6"
    ),
    "nests deeply": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "looks for the asserts": LOOK,
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
async def test_no_verdict_of_an_assert_can_be_forged(shop: Workshop, cheat: str):
    score = await scored(shop, {**ASSERTED, "reward": "share"}, cheat)
    assert (score.reward, score.metrics["passed"]) == (0.0, 0)


@pytest.mark.parametrize("name", ["exits", "answers for the worker", "starves the tester", "nests deeply"])
async def test_no_result_of_a_call_can_be_forged(shop: Workshop, name: str):
    assert (await scored(shop, {**CALLED, "reward": "share"}, CHEATS[name])).reward == 0.0


async def test_the_asserts_are_as_well_hidden_in_apptainer():
    async with workshop("apptainer") as there:
        assert (await scored(there, {**ASSERTED, "reward": "share"}, LOOK)).reward == 0.0


async def test_the_cheat_that_looks_would_find_an_open_door(shop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """The cheat is a real one: it succeeds as soon as the tester's memory is not shut."""
    source = grading._source
    monkeypatch.setattr(
        grading, "_source", lambda name: source(name).replace("PR_SET_DUMPABLE, 0", "PR_SET_DUMPABLE, 1")
    )
    assert (await scored(shop, {**ASSERTED, "reward": "share"}, LOOK)).reward == 0.5


async def test_what_an_assert_leaves_running_is_gone_at_the_next(shop: Workshop):
    solution = """
import os, time

def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True: time.sleep(1)
        os._exit(0)
    os.wait()
    return alive()

def alive():
    return sum(b"-c" in open(f"/proc/{pid}/cmdline", "rb").read() for pid in os.listdir("/proc") if pid.isdigit())
"""
    data = {
        **ASSERTED,
        "asserts": ["assert leave() == 3", "assert alive() == 2"],
    }  # the tester, the worker, what is left
    assert (await scored(shop, data, solution)).metrics["passed"] == 2


async def test_a_tester_that_does_not_start_is_no_score(new_sandbox, monkeypatch: pytest.MonkeyPatch):
    sandbox = await new_sandbox()
    monkeypatch.setattr(grading, "_source", lambda name: "raise RuntimeError('no tester')")
    with pytest.raises(VerifierCrashed, match=r"the tester did not start \(status 1\)(.|\n)*no tester"):
        given = context(task("code", ASSERTED), sandbox)
        await CodeEnvironment().eval(given, evidence("```python\nx = 1\n```", kept=()))


# --- the stages ---------------------------------------------------------------------------------------


async def test_nothing_hidden_is_told_or_lies_in_the_sandbox_of_run(new_sandbox):
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
    told = f"{start} {(await sandbox.exec('cat -- * 2>&1; env', timeout_s=20)).stdout!r}"
    assert not [text for text in ("1234", "hidden-5555", "secret") if text in told]


async def test_the_prompt_shows_how_functions_are_called(new_sandbox):
    data = {**CALLED, "public_tests": [{"input": [[True], "x"], "output": None}], "starter_code": "def add(a, b): ..."}
    (user,) = (await CodeEnvironment().init(context(task("code", data), await new_sandbox()))).messages
    for part in ("add([True], 'x') → None", "```python\ndef add(a, b): ...\n```", "defines `add`"):
        assert part in str(user["content"])
    data = {**ASSERTED, "public_tests": ["assert add(1, 1) == 2"]}
    (user,) = (await CodeEnvironment().init(context(task("code", data), await new_sandbox()))).messages
    assert "```python\nassert add(1, 1) == 2\n```" in str(user["content"])


async def test_the_last_code_block_is_the_solution_of_who_left_no_file(new_sandbox):
    given = context(task("code", PROGRAM), await new_sandbox())
    said = f"First:\n```python\nprint(1)\n```\nNo:\n```python\n{ADD}```\nIt prints\n```text\n3\n```\n"
    assert (await CodeEnvironment().eval(given, evidence(said, kept=()))).reward == 1.0
    assert (await CodeEnvironment().eval(given, evidence("done", kept=(), answer=said))).reward == 1.0
    score = await CodeEnvironment().eval(given, evidence("I cannot.", kept=()))
    assert (score.reward, score.metrics["has_solution"], score.metrics["skipped"]) == (0.0, 0.0, 3)


async def test_a_folder_in_the_place_of_the_solution_is_none(new_sandbox):
    sandbox = await new_sandbox()
    await sandbox.write(f"{WORKDIR}/solution.py/__main__.py", ADD.encode())
    score = await CodeEnvironment().eval(context(task("code", PROGRAM), sandbox), evidence(kept=("solution",)))
    assert (score.reward, score.metrics["has_solution"]) == (0.0, 0.0)


async def test_an_image_without_the_language_is_told_at_once(new_sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LANGUAGES, "python", replace(LANGUAGES["python"], needs=("python2000",)))
    with pytest.raises(SetupFailed, match="the image has no python2000, which python solutions need"):
        await CodeEnvironment().init(context(task("code", PROGRAM), await new_sandbox()))


async def test_an_old_python_cannot_run_functions(new_sandbox):
    """Its image is one whose python3 always fails."""
    sandbox = await new_sandbox()
    await sandbox.write(f"{WORKDIR}/bin/python3", b"#!/bin/sh\nexit 1\n", mode=0o755)
    folder = (await sandbox.exec("pwd", timeout_s=20)).stdout.decode().strip()
    run = sandbox.exec
    sandbox.exec = lambda command, **more: run(command, env={"PATH": f"{folder}/bin:/usr/bin:/bin"}, **more)
    await CodeEnvironment().init(context(task("code", PROGRAM), sandbox))
    with pytest.raises(SetupFailed, match=r"it must be 3\.7 or newer, with ctypes"):
        await CodeEnvironment().init(context(task("code", CALLED), sandbox))


async def test_a_task_without_a_solution_has_no_oracle(shop: Workshop):
    data = {name: value for name, value in PROGRAM.items() if name != "solution"}
    result = await played(shop, {"environment": "code", "data": data}, "oracle")
    assert result.failure is not None
    assert result.failure.code == TaskInvalid.code
    assert "this task holds no solution" in result.failure.detail
