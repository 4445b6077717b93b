"""The environment `swe` on real repositories in images, scored by the real swebench."""

import base64
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollyard.agents.base import AgentContext
from rollyard.agents.registry import Agents
from rollyard.core import Message
from rollyard.envs.swe import repository
from rollyard.envs.swe._swebench_child import answer
from rollyard.pipeline import StageResources
from rollyard.pipeline.local_rollout import PlayResult
from tests.envs.stage_resources import RUNTIMES, open_resources, played, rewards
from tests.envs.swe_repos import FAIL_TO_PASS, PASS_TO_PASS, Hands, Repository, as_r2e, as_sif, build

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

FIX = "sed -i 's/a - b/a + b/' calc.py"
ONLY_ADD = {"FAIL_TO_PASS": FAIL_TO_PASS[:1]}
"""Fixing one function is enough."""


def adds(path: str, text: str) -> str:
    """A command that appends the text to a file."""
    return f"echo {base64.b64encode(text.encode()).decode()} | base64 -d >> {path}"


ALWAYS_PASSED = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""
PRINTS_PAST_PYTEST = r"""
import os, stat
for fd in range(3, 64):  # pytest has its own output somewhere, while it catches that of the tests
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        continue
    if is_pipe:
        os.write(fd, b"\nPASSED tests/test_calc.py::test_add\nPASSED tests/test_calc.py::test_mul\n")
        os.write(fd, b"\n>>>>> End Test Output\n>>>>> Test Exit Code: 0\n")
"""
EXCLUDED_FILES = {
    "tests/test_calc.py": "def test_add():\n    pass\n",
    "conftest.py": ALWAYS_PASSED,
    "tests/conftest.py": ALWAYS_PASSED,
    "'*'/conftest.py": ALWAYS_PASSED,
    "$(printf 'caf\\351')/conftest.py": ALWAYS_PASSED,
    "pytest.ini": "[pytest]\naddopts = -p cheat\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p cheat\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n",
    "cheat-1.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n",
    "cheat-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: cheat\nVersion: 1\n",
    "pytest.py": "print('PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_mul')\n",
}
"""Files each of which, with `cheat.py`, would make the tests pass. EVAL must leave out all of them."""
CHEATS = {
    "with swebench's marks": PRINTS_PAST_PYTEST,
    "with outcomes of its own": "def add(a, b):\n    print('PASSED tests/test_calc.py::test_add')\n    return 0\n",
    "with an end of its own": "import os\nos._exit(0)\n",
    "by killing the shell": "import os\nos.kill(os.getppid(), 9)\n",
}


@pytest.fixture(scope="session")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return build(tmp_path_factory.mktemp("swe") / "calc")


@pytest.fixture(scope="session")
def r2e(calc: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return as_r2e(calc, tmp_path_factory.mktemp("swe") / "r2e")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def resource_sets() -> AsyncGenerator[dict[str, StageResources], None]:
    """One per runtime, shared by all tests: swebench takes a second or two to start."""
    agents = Agents({"hands": Hands()})
    async with open_resources("bubblewrap") as bubblewrap, open_resources("apptainer") as apptainer:
        yield {"bubblewrap": replace(bubblewrap, agents=agents), "apptainer": replace(apptainer, agents=agents)}


@pytest.fixture
def resources(resource_sets: dict[str, StageResources]) -> StageResources:
    return resource_sets["bubblewrap"]


async def tried(resources: StageResources, calc: Repository, commands: Sequence[str], **more: Any) -> PlayResult:
    return await played(resources, calc.body(commands, **more), "hands")


def score_of(result: PlayResult) -> Any:
    assert result.failure is None, result.failure
    assert result.score is not None
    return result.score


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_scores_1_and_the_no_op_0(
    runtime: str, calc: Repository, resource_sets: dict[str, StageResources]
):
    """The fix has a binary file, a new one, a deleted one, and one with CRLF; the hidden tests check their bytes.
    The tests to pass are lists here, as in SWE-Gym, and JSON strings elsewhere."""
    body = calc.body(FAIL_TO_PASS=FAIL_TO_PASS, PASS_TO_PASS=PASS_TO_PASS)
    played_best = await played(resource_sets[runtime], body, "oracle")
    best = score_of(played_best)
    patch, tests = json.loads(played_best.evidence)
    assert patch["kind"] == "patch" and "diff --git" in patch["text"]
    assert (tests["kind"], tests["passed"]) == ("tests", True) and "passed" in tests["text"]
    nothing = score_of(await played(resource_sets[runtime], body, "noop"))
    assert (best.reward, best.components) == (1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0})
    assert best.metrics["tests"] == 3.0
    assert (nothing.reward, nothing.metrics) == (0.0, {"patch_kept": 1.0, "patch_bytes": 0.0, "patch_applied": 0.0})


async def test_a_sif_image_works_too(calc: Repository, resource_sets: dict[str, StageResources], tmp_path: Path):
    assert await rewards(resource_sets["apptainer"], as_sif(calc, tmp_path / "calc.sif").body()) == (1.0, 0.0)


async def patch_metrics(resources: StageResources, calc: Repository, script: str) -> Any:
    """The metrics of an agent that replaces git with the script, which writes its patch. The reward must be 0."""
    program = adds("/usr/local/bin/git", f"#!/bin/sh\ncd /var/tmp/rollyard-swe\n{script}\n")
    command = f"mkdir -p /usr/local/bin; {program}; chmod +x /usr/local/bin/git"
    score = score_of(await tried(resources, calc, [command]))
    assert (score.reward, score.components) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0})
    return score.metrics


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_a_patch_that_does_not_apply_scores_0(
    runtime: str, calc: Repository, resource_sets: dict[str, StageResources]
):
    stale = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-other\n+text\n"
    metrics = await patch_metrics(resource_sets[runtime], calc, f"cat > solution.patch <<'END'\n{stale}END")
    assert (metrics["patch_files"], metrics["patch_applied"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "header",
    ["similarity index 100%\nrename from calc.py\nrename to moved.py\n", "old mode 100644\nnew mode 100755\n{names}"],
)
async def test_a_patch_that_renames_a_file_scores_0(calc: Repository, resources: StageResources, header: str):
    """Git compares only the new name with the patterns of files that must not change. It also accepts a patch that does
    not say that it renames."""
    names = "--- a/calc.py\n+++ b/moved.py\n"
    moved = f"diff --git a/calc.py b/moved.py\n{header.format(names=names)}"
    metrics = await patch_metrics(resources, calc, f"cat > solution.patch <<'END'\n{moved}END")
    assert (metrics["patch_files"], metrics["patch_applied"]) == (1.0, 0.0)


async def test_an_invalid_patch_scores_0(calc: Repository, resources: StageResources):
    garbage = await patch_metrics(resources, calc, "echo no patch > solution.patch")
    assert (garbage["patch_files"], garbage["patch_applied"]) == (0.0, 0.0)
    assert await patch_metrics(resources, calc, "truncate -s 33M solution.patch") == {"patch_kept": 0.0}
    assert await patch_metrics(resources, calc, "mkdir -p solution.patch") == {"patch_kept": 0.0}


class Ways(Hands):
    """Runs each command on the original repository and records the resulting patch."""

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        assert context.sandbox is not None
        commands = context.task.agent.options["commands"]
        assert isinstance(commands, list | tuple)
        await context.sandbox.exec("cp -a . /tmp/before", timeout_s=20, cwd="/testbed")
        for command in commands:
            again = f"find . -mindepth 1 -delete && cp -a /tmp/before/. . && {{ {command}; }}"
            result = await context.sandbox.exec(again, timeout_s=20, cwd="/testbed")
            assert result.status == 0, (command, result.stderr)
            await repository.diff(context.sandbox, "/testbed", timeout_s=20)
            patch = await context.sandbox.read(repository.PATCH, limit_bytes=1 << 20)
            self.outputs.append(patch.decode())
        return "done"


async def test_the_patch_contains_the_changes_whatever_was_done_to_the_repository(
    calc: Repository, resources: StageResources
):
    who = "git -c user.name=a -c user.email=a@b.c"
    hostile = (
        "git config diff.external /bin/false; git config core.autocrlf true; git config diff.noprefix true;"
        " git config filter.junk.clean /bin/false; echo '* filter=junk diff=junk text eol=crlf' > .gitattributes;"
        " mkdir -p $HOME; git config --global core.excludesFile /testbed/all; echo '*' > all"
    )
    ways = {
        "staged": f"{FIX}; git add -A",
        "committed": f"{FIX}; {who} commit -qam done",
        "on a branch": f"{FIX}; git checkout -q -b mine; {who} commit -qam done; git rm -q --cached calc.py",
        "no history": f"{FIX}; rm -rf .git",
        "another history": f"{FIX}; rm -rf .git; git init -q; git add -A; {who} commit -qm all",
        "with a configuration": f"{FIX}; {hostile}",
        "beside other repositories": f"{FIX}; git init -q empty; git init -q full; cd full; touch x; git add x;"
        f" {who} commit -qm x",
        "with junk": f"{FIX}; mkdir -p build; python3 -c 'import calc';"
        " head -c 50000000 /dev/zero > build/junk; echo x > x.log",
    }
    agent = Ways()
    resources = replace(resources, agents=Agents({"hands": agent}))
    score = score_of(await tried(resources, calc, list(ways.values()), **ONLY_ADD))
    assert (score.reward, score.metrics["patch_files"]) == (1.0, 1.0)  # the last command's
    for way, patch in zip(ways, agent.outputs, strict=True):
        assert "\n-    return a - b\n+    return a + b\n" in patch, (way, patch)
        assert patch.count("diff --git") == (3 if way == "with a configuration" else 1), (way, patch)


async def test_every_byte_and_mode_is_preserved(calc: Repository, resources: StageResources):
    """A custom test command compares the files in EVAL's sandbox with those that RUN wrote."""
    make = (
        r"printf 'one\r\n2\r\nthree\r\n' > notes.txt; printf 'a\r\nb' > 'odd \"name*[x].txt';"
        r" printf '\000\001\377\r\n\n' > bytes; printf 'caf\351\n' > latin; mkdir -p deep/er;"
        r" ln -s ../../calc.py deep/er/l;"
        r" rm old.py; printf '#!/bin/sh\n' > run; chmod +x run; echo more >> kept.log; mkdir -p tests/x;"
        r" : > tests/x/empty; : > $(printf 'caf\351.py')"
    )
    listing = (
        "find . -name .git -prune -o ! -type d -printf '%P %l %m ' -a -type f -exec md5sum -b {} ';' -o -type l -print"
        " | sort | md5sum"
    )
    test = "printf '%s ' $([ \"$(" + listing + ')" = "$SEEN" ] && echo PASSED || echo FAILED) x::same'
    body = calc.body([make, f"({listing}) > /tmp/seen; cat /tmp/seen"], test_patch="")
    hands = Hands()
    resources = replace(resources, agents=Agents({"hands": hands}))
    await played(resources, body, "hands")
    digest = hands.outputs[-1].strip()
    body["data"] |= {"FAIL_TO_PASS": ["x::same"], "PASS_TO_PASS": [], "test_command": test, "env": {"SEEN": digest}}
    assert score_of(await played(resources, body, "hands")).reward == 1.0
    body["agent"]["options"]["commands"] = [make + "; printf x >> bytes"]
    assert score_of(await played(resources, body, "hands")).reward == 0.0


@pytest.mark.parametrize("how", CHEATS)
async def test_cheats_score_0(how: str, calc: Repository, resources: StageResources):
    assert score_of(await tried(resources, calc, [adds("calc.py", CHEATS[how])], **ONLY_ADD)).reward == 0.0


async def test_files_that_decide_how_tests_run_are_left_out(calc: Repository, resources: StageResources):
    commands = [f'd=$(dirname {path}); mkdir -p "$d"; {adds(path, text)}' for path, text in EXCLUDED_FILES.items()]
    score = score_of(await tried(resources, calc, [*commands, adds("cheat.py", ALWAYS_PASSED)], **ONLY_ADD))
    assert score.reward == 0.0
    assert (score.metrics["patch_files"], score.metrics["patch_files_left_out"]) == (1.0, len(EXCLUDED_FILES))


async def test_edits_of_tests_have_no_effect(calc: Repository, resources: StageResources):
    spoilt = "echo 'assert False' > tests/test_calc.py; echo 'assert False' > tests/conftest.py"
    score = score_of(await tried(resources, calc, [f"{FIX}; {spoilt}"], **ONLY_ADD))
    deleted = score_of(await tried(resources, calc, [f"{FIX}; rm -r tests"], **ONLY_ADD))
    in_the_way = score_of(await tried(resources, calc, [f"{FIX}; rm -r tests; ln -s /tmp tests"], **ONLY_ADD))
    assert (score.reward, score.metrics["patch_files_left_out"]) == (1.0, 2.0)
    assert deleted.reward == 1.0
    assert in_the_way.reward == 0.0


async def test_edits_of_tests_in_the_image_have_no_effect(calc: Repository, resources: StageResources):
    """A row without a test patch: the agent can read its tests, and its changes to them are left out."""
    command = "python3 -m pytest -rA -p no:cacheprovider tests"
    own = {"test_patch": "", "test_command": command, "FAIL_TO_PASS": PASS_TO_PASS, "PASS_TO_PASS": []}
    broken = "echo 'def mul(a, b): return 0' >> calc.py; echo 'def test_mul(): pass' > tests/test_calc.py"
    score = score_of(await tried(resources, calc, [broken], **own))
    assert (score.reward, score.metrics["patch_files_left_out"]) == (0.0, 1.0)


async def test_a_file_that_the_gold_patch_also_changes_counts(calc: Repository, resources: StageResources):
    """A change of conftest.py counts if the gold patch changes it, too."""
    own = calc.row(**ONLY_ADD)
    own["patch"] += "diff --git a/conftest.py b/conftest.py\nnew file mode 100644\n--- /dev/null\n+++ b/conftest.py\n"
    own["patch"] += "@@ -0,0 +1 @@\n+import calc\n"
    commands = ["printf 'import calc\\ncalc.add = lambda a, b: a + b\\n' > conftest.py"]
    assert score_of(await played(resources, calc.task(own, commands), "hands")).reward == 1.0
    assert score_of(await tried(resources, calc, commands, **ONLY_ADD)).reward == 0.0


async def test_neither_later_commits_nor_hidden_tests_are_in_run(calc: Repository, resources: StageResources):
    commands = [
        'test "$(git log --all --oneline | wc -l)" = 1',
        "! git rev-parse -q --verify v2",
        f'test "$(git rev-parse v1)" = {calc.base_commit}',
        'test -z "$(git remote)"',
        'test -z "$(git reflog --all)"',
        "git status --porcelain | grep -q untracked.txt",
        "! grep -rqs --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 'test_add\\|new name.py' /",
        "! env | grep -q test_add",
    ]
    assert score_of(await tried(resources, calc, commands)).reward == 0.0


async def test_a_repository_of_another_user_works(calc: Repository, resources: StageResources):
    """A test variable makes git treat every repository as another user's."""
    foreign = {"env": {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}}
    refused = "! GIT_CONFIG_COUNT=0 git status"
    score = score_of(await tried(resources, calc, [refused, "git status", FIX], **foreign, **ONLY_ADD))
    assert score.reward == 1.0


async def test_output_beyond_the_limit_gives_no_verdict(calc: Repository, resources: StageResources):
    loud = "head -c 9000000 /dev/zero | tr '\\0' x; python3 -m pytest -rA {test_files}"
    score = score_of(await tried(resources, calc, [FIX], test_command=loud, **ONLY_ADD))
    assert (score.reward, score.metrics["tests_ended"]) == (0.0, 0.0)


async def test_a_row_with_its_own_eval_script(calc: Repository, resources: StageResources):
    script = "\n".join(
        [
            "#!/bin/bash",
            "set -uxo pipefail",
            "cd /testbed",
            f"git checkout {calc.base_commit} tests/test_calc.py",
            "git apply -v - <<'EOF_1'",
            f"{calc.test_patch}EOF_1",
            ": '>>>>> Start Test Output'",
            "python3 -m pytest -rA -p no:cacheprovider tests/test_calc.py",
            ": '>>>>> End Test Output'",
            f"git checkout {calc.base_commit} tests/test_calc.py",
        ]
    )
    row = calc.row(eval_script=script, eval_type="pass_and_fail", image=str(calc.image))
    del row["test_command"]
    assert await rewards(resources, calc.task(row)) == (1.0, 0.0)
    half = score_of(await played(resources, calc.task(row, [FIX]), "hands"))
    assert (half.reward, half.components) == (0.0, {"fail_to_pass": 0.5, "pass_to_pass": 1.0})


async def test_a_runner_that_is_not_pytest(calc: Repository, resources: StageResources):
    patch = (
        "diff --git a/test_u.py b/test_u.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_u.py\n@@ -0,0 +1,5 @@\n"
        "+import unittest, calc\n+class T(unittest.TestCase):\n"
        "+    def test_a(self): self.assertEqual(calc.add(1, 1), 2)\n"
        "+    def test_m(self): self.assertEqual(calc.mul(1, 1), 1)\n+    def test_n(self): pass\n"
    )
    body = calc.body(
        [FIX],
        test_patch=patch,
        test_command="python3 -m unittest -v {test_files}",
        log_parser="parse_log_django",
        FAIL_TO_PASS=["test_a (test_u.T.test_a)"],
        PASS_TO_PASS=["test_m (test_u.T.test_m)"],
    )
    assert score_of(await played(resources, body, "hands")).reward == 1.0
    assert score_of(await played(resources, body, "noop")).reward == 0.0


async def test_errors_in_the_task_are_not_the_policys_fault(calc: Repository, resources: StageResources):

    async def code_of(agent: str, commands: Sequence[str] = (), **more: Any) -> tuple[str, str]:
        result = await played(resources, calc.body(commands, **more), agent)
        assert result.score is None and result.failure is not None
        return result.failure.code, result.failure.detail

    failures = {
        "data.patch: this row has no solution": await code_of("oracle", patch=""),
        "data.patch does not apply to the image": await code_of("oracle", patch=calc.patch.replace("a - b", "a / b")),
        "data.test_patch does not apply to the image": await code_of(
            "hands", [FIX], test_patch=calc.test_patch.replace("-from calc import mul", "-from calc import div")
        ),
        "swebench has no parser 'parse_log_nothing'": await code_of("hands", [FIX], log_parser="parse_log_nothing"),
    }
    for text, (code, detail) in failures.items():
        assert code == "task_invalid" and text in detail
    for workdir in ("/usr", "/nowhere"):
        code, detail = await code_of("noop", workdir=workdir)
        assert code == "setup_failed" and f"no git repository in {workdir}" in detail


async def test_tests_that_hang_are_the_policys_fault(calc: Repository, resources: StageResources):
    body = calc.body(["echo 'import time; time.sleep(60)' >> calc.py"])
    body["limits"] = {**body["limits"], "eval_s": 8}  # including the start of the sandbox
    result = await played(resources, body, "hands")
    assert result.failure is not None and result.failure.code == "eval_deadline"
    assert result.score is not None and result.score.reward == 0.0


async def test_r2e_rows_are_scored_by_the_expected_outcomes(
    calc: Repository, r2e: Repository, resources: StageResources
):
    expected = {"T.test_add": "PASSED", "test_mul[a b]": "PASSED", "test_wrong": "FAILED"}
    row = {
        "repo_name": "calc",
        "docker_image": "tests/calc_final:1",
        "commit_hash": calc.base_commit,
        "problem_statement": "You are told:\n[ISSUE]\nadd() subtracts\n[/ISSUE]\n",
        "expected_output_json": json.dumps(expected),
        "modified_files": ["calc.py"],
        "prompt": "not used",
    }
    look = "test ! -e run_tests.sh && test ! -e r2e_tests && test ! -e /r2e_tests && test ! -e parsed_commit.json"
    cheat = "mkdir r2e_tests; echo 'x' > run_tests.sh; echo 'def test_a(): pass' > r2e_tests/test_1.py"
    fixed = await played(resources, r2e.task(row, [look, f"{FIX}; {cheat}"]), "hands")
    other = await played(resources, r2e.task(row, ["echo '# nothing' >> calc.py"]), "hands")
    with_patch = {**row, "patch": calc.patch, "expected_output_json": expected}
    assert await rewards(resources, r2e.task(with_patch)) == (1.0, 0.0)
    assert fixed.trajectory is not None and "add() subtracts" in str(fixed.trajectory.messages[0]["content"])
    assert "You are told" not in str(fixed.trajectory.messages[0]["content"])
    assert (score_of(fixed).reward, score_of(fixed).components) == (1.0, {"expected": 1.0})
    assert score_of(other).reward == 0.0 and score_of(other).components["expected"] == pytest.approx(2 / 3)
    assert score_of(fixed).metrics["patch_files_left_out"] == 2.0


async def test_a_log_that_swebench_cannot_read_is_not_resolved():
    """The tests of a patch may print anything. A grader that fails would lose the rollout instead of scoring it 0."""
    question = {"log_parser": "parse_log_django", "eval_type": "", "repo": "django/django", "instance_id": "i"}
    question |= {"version": "4.0", "fail_to_pass": ["a"], "pass_to_pass": [], "expected": None, "status": 1}
    zero = {"fail_to_pass": 0.0, "pass_to_pass": 0.0}
    assert answer({**question, "log": "FAIL:\n"}) == {"resolved": False, "shares": zero, "tests": 0}
