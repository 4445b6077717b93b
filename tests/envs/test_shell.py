import pytest

from rollyard.core import Limits
from rollyard.core.failure import SetupDeadline, SetupFailed, TaskInvalid
from rollyard.envs.shell import ShellEnvironment
from rollyard.sandbox import WORKDIR

from .conftest import context, evidence, task

GOOD = {
    "instruction": "Write 42 into answer.txt",
    "files": {"notes/a.txt": "ein Zettel 漢字"},
    "setup": ["test -f notes/a.txt", "echo ready > state"],
    "checks": ["grep -qx 42 answer.txt", {"command": "grep -qx ready state", "weight": 3, "name": "kept"}],
}


async def test_files_are_written_and_set_up_runs_before_the_agent_starts(new_sandbox):
    sandbox = await new_sandbox()
    env_context = context(task("shell", GOOD), sandbox)
    environment = ShellEnvironment()
    await environment.prepare(env_context)
    assert (await sandbox.read(f"{WORKDIR}/notes/a.txt", limit_bytes=100)).decode() == "ein Zettel 漢字"
    assert (await sandbox.read(f"{WORKDIR}/state", limit_bytes=100)) == b"ready\n"
    start = await environment.init(env_context)
    assert start.messages == ({"role": "user", "content": "Write 42 into answer.txt"},)


async def test_a_system_prompt_comes_first():
    env_context = context(task("shell", {**GOOD, "system_prompt": "Be brief."}))
    start = await ShellEnvironment().init(env_context)
    assert [m["role"] for m in start.messages] == ["system", "user"]


async def test_the_reward_is_the_weighted_share_of_passed_checks(new_sandbox):
    sandbox = await new_sandbox()
    await sandbox.write(f"{WORKDIR}/state", b"ready\n")
    environment = ShellEnvironment()
    score = await environment.eval(context(task("shell", GOOD), sandbox), evidence())
    assert score.reward == 0.75
    assert score.components == {"check_0": 0.0, "kept": 1.0}
    await sandbox.write(f"{WORKDIR}/answer.txt", b"42\n")
    assert (await environment.eval(context(task("shell", GOOD), sandbox), evidence())).reward == 1.0


async def test_a_workspace_that_could_not_be_saved_passes_no_check(new_sandbox):
    """Otherwise exceeding the size limit would pass every check that a file is absent."""
    shell_task = task("shell", {"instruction": "Tidy up", "checks": ["test ! -e junk"]})
    score = await ShellEnvironment().eval(context(shell_task, await new_sandbox()), evidence(saved=()))
    assert (score.reward, score.components, score.metrics) == (0.0, {"check_0": 0.0}, {"workspace_kept": 0.0})


async def test_a_check_killed_by_a_signal_does_not_pass(new_sandbox):
    shell_task = task("shell", {"instruction": "x", "checks": ["kill -9 $$"]})
    score = await ShellEnvironment().eval(context(shell_task, await new_sandbox()), evidence())
    assert score.reward == 0.0


async def test_a_failed_set_up_names_the_command_and_its_error(new_sandbox):
    shell_task = task("shell", {**GOOD, "setup": ["echo broken >&2; exit 3"]})
    with pytest.raises(SetupFailed, match=r"'echo broken >&2; exit 3' ended with status 3: broken") as caught:
        await ShellEnvironment().prepare(context(shell_task, await new_sandbox()))
    assert caught.value.data == {"command": "echo broken >&2; exit 3", "status": 3, "stderr": "broken"}


async def test_a_set_up_that_hangs_is_ended(new_sandbox):
    shell_task = task("shell", {**GOOD, "setup": ["sleep 600"]}, Limits(init_s=0.2))
    with pytest.raises(SetupDeadline, match=r"'sleep 600' did not end within 0\.2 s"):
        await ShellEnvironment().prepare(context(shell_task, await new_sandbox()))


def test_the_plan_saves_only_the_workspace():
    plan = ShellEnvironment().plan(task("shell", GOOD))
    assert [(rule.name, rule.path) for rule in plan.artifacts] == [("workspace", WORKDIR)]
    assert plan.is_reevaluable


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"instruction": None}, "shell: data.instruction: a string was expected"),
        ({"instruction": " "}, "data.instruction"),
        ({"setup": "ls"}, "data.setup: a list was expected"),
        ({"setup": [1]}, "data.setup: a list of strings"),
        ({"files": ["a"]}, "data.files: an object of strings"),
        ({"files": {"a": 1}}, r"data.files\['a'\]: a string"),
        ({"files": {"../../etc/passwd": ""}}, "the path of a file, absolute or below /workspace"),
        ({"files": {"": ""}}, "the path of a file"),
        ({"files": {"dir/": ""}}, "the path of a file"),
        ({"checks": []}, "data.checks: a list of at least one check"),
        ({"checks": None}, "data.checks"),
        ({"checks": [7]}, r"data.checks\[0\]: a command, or an object"),
        ({"checks": [{"name": "x"}]}, r"data.checks\[0\].command: a string"),
        ({"checks": [{"command": "x", "weight": 0}]}, r"data.checks\[0\].weight: a number above 0"),
        ({"checks": [{"command": "x", "weight": float("inf")}]}, "weight"),
        ({"checks": [{"command": "x", "wieght": 2}]}, r"data.checks\[0\].wieght: unknown field"),
        ({"checks": [{"command": "x", "name": "check_1"}, "y"]}, "a name that no other check has"),
        ({"system_prompt": 1}, "data.system_prompt: a string"),
        ({"eval": "elsewhere"}, 'data.eval: "fresh" or "same"'),
        ({"instructions": "x"}, "data.instructions: unknown field; there are checks, eval, files, instruction"),
    ],
)
def test_data_that_can_never_work_is_refused_with_the_field(change, wrong):
    with pytest.raises(TaskInvalid, match=wrong):
        ShellEnvironment().check(task("shell", {**GOOD, **change}))


def test_good_data_passes():
    ShellEnvironment().check(task("shell", GOOD))
    ShellEnvironment().check(task("shell", {"instruction": "x", "checks": ["true"], "files": {"/etc/motd": "hi"}}))
