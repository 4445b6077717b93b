"""The `code` environment in real sandboxes: right solutions, wrong ones, and those that try to cheat.

Most tests run EVAL only, with the solution as a code block of the answer: INIT and RUN are the same for all of them.
"""

import asyncio
from typing import Any

import pytest
import pytest_asyncio

from rollyard.core import Deadline, Rollout, Score, Trajectory, new_id
from rollyard.core.failure import TaskInvalid
from rollyard.envs.code import data as code_data
from rollyard.envs.code import grading
from rollyard.pipeline import StageResources
from rollyard.pipeline.attempts.evaluation import evaluate

from .stage_resources import RUNTIMES, open_resources, played, rewards, to_play

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

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
async def resources():
    async with open_resources("bubblewrap") as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RUNTIMES)
async def any_resources(request: pytest.FixtureRequest):
    async with open_resources(request.param) as opened:
        yield opened


async def scored(resources: StageResources, data: dict[str, Any], solution: str | None = None, **sandbox: Any) -> Score:
    """The score of this solution. Every test here also checks that there is a score, whatever the solution does."""
    code_task = to_play({"environment": "code", "data": data, "sandbox": sandbox}, resources.default_runtime)
    rollout = Rollout(new_id("try"), "try", code_task)
    message = {"role": "assistant", "content": f"```\n{solution or data['solution']}\n```"}
    trajectory = Trajectory(rollout.id, 1, messages=(message,))
    clock = Deadline(code_task.limits.eval_s)
    return await evaluate(
        resources.resolve(rollout.task), rollout.id, trajectory, clock, lease_s=600.0, watch=lambda _: None
    )


async def test_the_oracle_scores_1_and_the_no_op_0(any_resources: StageResources):
    bodies = [{"environment": "code", "data": data} for data in (PROGRAM, CALLED, ASSERTED)]
    assert await asyncio.gather(*(rewards(any_resources, body) for body in bodies)) == [(1.0, 0.0)] * 3


async def test_the_asserts_are_hidden_in_each_runtime(any_resources: StageResources):
    assert (await scored(any_resources, {**ASSERTED, "reward": "share"}, LOOK)).reward == 0.0


# --- scores -------------------------------------------------------------------------------------------


HALF = "a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)\n"


async def test_the_reward_is_for_all_tests_or_their_share(resources: StageResources):
    score = await scored(resources, PROGRAM, HALF)
    assert (score.reward, score.components) == (0.0, {"passed": pytest.approx(2 / 3)})
    assert score.metrics == {
        "tests": 3,
        "passed": 2,
        "failed": 1,
        "timed_out": 0,
        "skipped": 0,
        "has_solution": 1,
    }
    assert (await scored(resources, {**PROGRAM, "reward": "share"}, HALF)).reward == pytest.approx(2 / 3)


async def test_any_of_several_outputs_is_accepted(resources: StageResources):
    data = {**PROGRAM, "tests": [{"input": "1 2", "outputs": ["4", "3"]}]}
    assert (await scored(resources, data)).reward == 1.0


async def test_other_languages_run_with_their_own_programs_or_a_given_command(resources: StageResources):
    bash = {**PROGRAM, "language": "bash", "solution": "read a b; echo $((a + b))"}
    assert (await scored(resources, bash)).reward == 1.0
    awk = {**PROGRAM, "language": "awk", "file": "sum.awk", "command": "awk -f sum.awk", "solution": "{print $1 + $2}"}
    assert (await scored(resources, awk)).reward == 1.0
    compiled = {
        **PROGRAM,
        "language": "m4ke",
        "file": "raw.txt",
        "compile": "sed s/PLUS/+/ raw.txt > made.sh",
        "command": "sh made.sh",
        "solution": "read a b; echo $((a PLUS b))",
    }
    assert (await scored(resources, compiled)).reward == 1.0
    score = await scored(resources, {**compiled, "compile": "exit 1"})
    assert (score.reward, score.metrics["skipped"]) == (0.0, 3)


async def test_many_tests_are_all_run(resources: StageResources):
    tests = [{"input": f"{n} 1", "output": str(n + 1)} for n in range(12)]
    assert (await scored(resources, {**PROGRAM, "tests": tests})).metrics["passed"] == 12


async def test_a_program_that_exits_with_an_error_fails_whatever_it_printed(resources: StageResources):
    assert (await scored(resources, PROGRAM, f"{ADD}raise SystemExit(1)")).reward == 0.0


async def test_asserts_see_changed_arguments_objects_and_exceptions(resources: StageResources):
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
    score = await scored(resources, data, solution)
    assert score.metrics["passed"] == len(data["asserts"]), score


async def test_wrong_functions_fail_each_assert_separately(resources: StageResources):
    solution = "import os\ndef add(a, b):\n    return 3 if a == 1 else os._exit(0)"
    score = await scored(resources, ASSERTED, solution)
    assert (score.reward, score.metrics["passed"], score.metrics["failed"]) == (0.0, 1, 1)
    scores = await asyncio.gather(
        scored(resources, ASSERTED, "def ("),
        scored(resources, ASSERTED, "x = 1"),
        scored(resources, CALLED, "def add(a, b): return object()"),
    )
    assert [score.reward for score in scores] == [0.0] * 3


async def test_a_result_in_a_list_is_wrong_unless_the_task_accepts_it(resources: StageResources):
    solution = "def add(a, b): return [a + b]"
    assert (await scored(resources, CALLED, solution)).reward == 0.0
    data = {**CALLED, "tests": [{"input": [1, 2], "outputs": [3, [3]]}]}
    assert (await scored(resources, data, solution)).reward == 1.0


# --- limits -------------------------------------------------------------------------------------------


async def test_a_solution_that_waits_too_long_fails_and_after_three_tests_the_rest_are_skipped(
    resources: StageResources, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(code_data, "WAIT_S", 0.3)
    tests = [{"input": "1 1", "output": "2"}] * 5
    program = scored(resources, {**PROGRAM, "tests": tests, "time_s": 0.1}, f"import time\ntime.sleep(60)\n{ADD}")
    asserts = ["assert add(1, 2) == 3"] * 5
    function = scored(
        resources,
        {**ASSERTED, "asserts": asserts, "time_s": 0.1},
        "import time\ndef add(a, b):\n    time.sleep(60)\n    return 3",
    )
    for score in await asyncio.gather(program, function):
        assert (score.reward, score.metrics["timed_out"], score.metrics["skipped"]) == (0.0, 3, 2)


async def test_a_solution_that_computes_too_long_is_ended_by_its_cpu_limit(
    resources: StageResources, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(code_data, "WAIT_S", 600.0)  # so that nothing else ends it within this test's timeout
    endless = "def add(a, b):\n    while True: pass\nadd(1, 1)"
    called = "def add(a, b):\n    while True: pass"
    ignores = f"import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n{endless}"
    scores = await asyncio.gather(
        scored(resources, {**PROGRAM, "time_s": 0.5, "tests": PAIRS[:1]}, endless),
        scored(resources, {**CALLED, "time_s": 0.5, "tests": CALLED["tests"][:1]}, called),
        scored(resources, {**ASSERTED, "time_s": 0.5, "asserts": ASSERTED["asserts"][:1]}, called),
        scored(resources, {**PROGRAM, "time_s": 0.5, "tests": PAIRS[:1]}, ignores),
    )
    ended = [(score.reward, score.metrics["timed_out"], score.metrics["failed"]) for score in scores]
    assert ended == [(0.0, 1, 0), (0.0, 1, 0), (0.0, 1, 0), (0.0, 0, 1)]


async def test_memory_is_limited(resources: StageResources):
    limit = {"memory_bytes": 256 << 20}
    big = "def add(a, b):\n    x = bytes(1 << 29)\n    return a + b"
    for data, solution in ((PROGRAM, f"x = bytes(1 << 29)\n{ADD}"), (CALLED, big), (ASSERTED, big)):
        right, wrong = await asyncio.gather(
            scored(resources, {**data, **limit}), scored(resources, {**data, **limit}, solution)
        )
        assert (right.reward, wrong.metrics["failed"]) == (1.0, right.metrics["tests"])


async def test_too_much_output_is_cut_and_wrong(resources: StageResources):
    flood = f"import sys\n{ADD}sys.stdout.flush()\nfor _ in range(200): sys.stdout.write(' ' * (1 << 16))"
    assert (await scored(resources, PROGRAM, flood)).metrics["failed"] == 3
    loud = f"import sys\n{ADD}sys.stderr.write('x' * (4 << 20))"
    assert (await scored(resources, PROGRAM, loud)).reward == 1.0


async def test_a_right_answer_may_be_much_longer_than_the_expected_one(
    resources: StageResources, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grading, "OUTPUT_BYTES", 1000)
    data = {**PROGRAM, "tests": [{"input": "", "output": "0.5\n" * 1000}]}
    assert (await scored(resources, data, "print(('0.5' + '0' * 20 + '\\n') * 1000)")).reward == 1.0
    data = {**CALLED, "tests": [{"input": [1, 2], "output": [[]] * 1000}]}
    assert (await scored(resources, data, "def add(a, b): return [()] * 1000")).reward == 1.0


async def test_a_function_that_changes_its_arguments_keeps_its_result(resources: StageResources):
    data = {**CALLED, "tests": [{"input": [[1], [2]], "output": [1, 2]}], "reward": "share"}
    solution = "def add(a, b):\n    c = a + b\n    a.extend([0] * 1_000_000)\n    return c"
    assert (await scored(resources, data, solution)).reward == 1.0
    for variant in (data, {**ASSERTED, "asserts": ["assert add([1], [2]) == [1, 2]"]}):
        assert (
            await scored(resources, variant, "def add(a, b):\n    c = a + b\n    a.append(a)\n    return c")
        ).reward == 1.0


async def test_a_fork_bomb_is_limited_and_fails(resources: StageResources, monkeypatch: pytest.MonkeyPatch):
    bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)"
    with monkeypatch.context() as patched:
        patched.setattr(code_data, "WAIT_S", 0.5)
        score = await scored(resources, {**PROGRAM, "time_s": 0.1, "tests": PAIRS[:2], "reward": "share"}, bomb)
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
    assert (await scored(resources, {**PROGRAM, "tests": PAIRS[:1]}, many)).reward == 1.0


async def test_a_solution_that_ends_the_sandbox_has_a_score(resources: StageResources):
    solution = "import time\nopen('big', 'wb').write(bytes(80 << 20))\ntime.sleep(60)"
    kinds = (PROGRAM, CALLED, ASSERTED)
    for score in await asyncio.gather(*(scored(resources, data, solution, disk_bytes=20 << 20) for data in kinds)):
        assert (score.reward, score.metrics["failed"], score.metrics["skipped"] > 0) == (0.0, 1, True)


async def test_a_program_has_the_largest_allowed_stack(resources: StageResources):
    solution = "import resource\nprint(len(set(resource.getrlimit(resource.RLIMIT_STACK))))"
    assert (await scored(resources, {**PROGRAM, "tests": [{"input": "", "output": "1"}]}, solution)).reward == 1.0


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
}


async def test_the_verdict_of_an_assert_cannot_be_forged(resources: StageResources):
    data = {**ASSERTED, "reward": "share"}
    scores = await asyncio.gather(*(scored(resources, data, cheat) for cheat in CHEATS.values()))
    passed = {name: (score.reward, score.metrics["passed"]) for name, score in zip(CHEATS, scores, strict=True)}
    assert passed == dict.fromkeys(CHEATS, (0.0, 0))


async def test_a_solution_cannot_end_a_loop_in_an_assert(resources: StageResources):
    """A StopIteration from the solution would end the `map`, and `all` would be true."""
    data = {**ASSERTED, "asserts": ["assert all(map(lambda n: add(n, n) == 2 * n, [1, 2]))"]}
    assert (await scored(resources, data)).reward == 1.0
    assert (await scored(resources, data, "def add(a, b): raise StopIteration")).reward == 0.0


async def test_the_result_of_a_call_cannot_be_forged(resources: StageResources):
    data, names = (
        {**CALLED, "reward": "share"},
        ("exits", "answers for the worker", "nests deeply", "starves the tester"),
    )
    scores = await asyncio.gather(*(scored(resources, data, CHEATS[name]) for name in names))
    assert {name: score.reward for name, score in zip(names, scores, strict=True)} == dict.fromkeys(names, 0.0)


async def test_the_cheat_that_reads_memory_is_real(resources: StageResources, monkeypatch: pytest.MonkeyPatch):
    """The cheat is real: it succeeds if the tester's memory is not protected."""
    source = grading._source
    monkeypatch.setattr(
        grading, "_source", lambda name: source(name).replace("PR_SET_DUMPABLE, 0", "PR_SET_DUMPABLE, 1")
    )
    assert (await scored(resources, {**ASSERTED, "reward": "share"}, LOOK)).reward == 0.5


async def test_processes_left_by_an_assert_are_killed_before_the_next(resources: StageResources):
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
    }  # the tester, the worker, the leftover process
    assert (await scored(resources, data, solution)).metrics["passed"] == 2


async def test_a_task_without_a_solution_has_no_oracle(resources: StageResources):
    data = {name: value for name, value in PROGRAM.items() if name != "solution"}
    result = await played(resources, {"environment": "code", "data": data}, "oracle")
    assert result.failure is not None
    assert result.failure.code == TaskInvalid.code
    assert "this task has no solution" in result.failure.detail
