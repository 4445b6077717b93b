"""An agent program in a real sandbox: how it starts, and every way in which it ends."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.harness import instruction_of
from rollyard.agents.installation import AgentInstalls
from rollyard.agents.registry import Agents
from rollyard.core import Blame, Outcome, Run, State, Task, Trajectory
from rollyard.core.failure import AgentMissing, TaskInvalid
from rollyard.engines import EngineSpec, Kind, RouterSettings
from rollyard.envs import Environments, Plan
from rollyard.envs.shell import ShellEnvironment
from rollyard.sandbox.runtimes.local import LocalRuntime
from rollyard.testing.sandbox_conformance import alive, marked
from rollyard.testing.script import Reply
from rollyard.tokens import verify
from rollyard.tools.mcp.sources import OutsideServer
from tests.agents.harness_parts import PROGRAM, call, greeting_task, plays, pythons, runs
from tests.agents.test_preset import PAGE
from tests.agents.test_preset import blocks as page_blocks
from tests.pipeline.site import Site
from tests.pipeline.site import open_site as whole_site

pytestmark = pytest.mark.slow

FIX = call("sh", command="sed -i s/wrold/world/ greeting.txt")
LOOK = call("sh", command="cat greeting.txt")
SOLVES = (LOOK, FIX, "Done.")


def open_site(folder: Path, turns: Sequence[str | Reply] = SOLVES, **more: Any):
    return whole_site(folder, plays(turns), pythons=pythons(), **more)


async def trajectory_of(site: Site, rollout_id: str) -> Trajectory:
    trajectory = await site.store.trajectory(rollout_id)
    assert trajectory is not None
    return trajectory


def nothing_left(site: Site, folder: Path, mark: str) -> None:
    """Checks that no process with the mark, no sandbox, no slot and no call is left."""
    assert not alive(mark)
    assert not list((folder / "sandboxes").glob("sbx_*"))
    site.nothing_left()


@pytest.fixture
def mark() -> str:
    """A word that is in no other command line on this machine."""
    return marked()


# --- successful ends ------------------------------------------------------------------------------------


async def test_the_single_script_of_the_page_runs_by_a_preset_and_by_a_run_default(tmp_path: Path):
    script, client = page_blocks("python")
    (preset, _) = page_blocks("toml")
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "agent.py").write_text(script)
    (folder / "my-script.toml").write_text(preset)
    names: dict[str, Any] = {}
    sent = client.partition("with rollyard.Client()")[0].replace('Path("agent.py")', f'Path("{folder}/agent.py")')
    exec(compile(sent, PAGE.name, "exec"), names)
    turns = (call("bash", command="sed -i s/wrold/world/ greeting.txt"), "Done.")
    agents = Agents(installs=AgentInstalls(folder))
    async with open_site(tmp_path, turns, agents=agents) as site:
        for agent, options in (("my-script", {}), ("command", names["AGENT"]["options"])):
            ending = (await site.rolled(greeting_task(agent, options), within_s=50)).ending
            assert ending is not None and ending.failure is None, ending
            assert ending.score is not None and ending.score.reward == 1.0


async def test_an_unmodified_program_leaves_one_exact_trace_and_its_reward(tmp_path: Path, mark: str):
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(PROGRAM, mark)))
        trajectory = await trajectory_of(site, rollout.id)
        await site.idle()
        nothing_left(site, tmp_path, mark)
    ending = rollout.ending
    assert ending is not None
    assert (ending.outcome, ending.failure) == (Outcome.COMPLETED, None)
    assert ending.score is not None and ending.score.reward == 1.0
    assert ending.is_trainable
    verify(trajectory)
    assert (len(trajectory.traces), trajectory.turns, trajectory.ended_by) == (1, 3, "stop")
    assert [message["role"] for message in trajectory.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    harness, gateway = trajectory.info["harness"], trajectory.info["gateway"]
    assert isinstance(harness, dict) and isinstance(gateway, dict)
    assert (harness["preset"], harness["exit_status"], harness["dropped_bytes"]) == ("command", 0, 0)
    assert harness["output"] == "it begins\nit ends\n"
    assert (gateway["requests"], gateway["forks"]) == (3, {})


async def test_files_stdin_environment_and_workdir_are_filled_in(tmp_path: Path):
    look = PROGRAM + (
        "\nprint(json.dumps([sys.stdin.read(), open(sys.argv[2]).read(), oct(os.stat(sys.argv[2]).st_mode & 0o777),"
        " os.getcwd(), os.environ['HOME'], os.environ['MODEL'], open(sys.argv[3]).read()]))"
    )
    options = runs(
        look,
        "{{home}}/deep/config.yaml",
        "/tmp/raw",
        stdin="{{instruction|sh}}",
        workdir="/tmp",
        model="mine",
        files=[
            {"path": "{{home}}/deep/config.yaml", "content": "task: {{instruction|json}}", "mode": "0600"},
            {"path": "/tmp/raw", "content": "{{untouched}}", "raw": True},
        ],
    )
    env = options["env"]
    assert isinstance(env, dict)
    env["MODEL"] = "{{model}}"
    task = greeting_task("command", options)
    data = {**task.data, "instruction": 'say "{{model}}" \u00e4\n\x7f'}
    async with open_site(tmp_path, ["Done."]) as site:
        rollout = await site.rolled(replace(task, data=data))
        harness = (await trajectory_of(site, rollout.id)).info["harness"]
    assert isinstance(harness, dict)
    values = json.loads(str(harness["output"]).splitlines()[-1])
    assert values[0] == "'say \"{{model}}\" \u00e4\n\x7f'"
    assert values[1] == 'task: "say \\"{{model}}\\" \u00e4\\n\\u007f"'
    assert values[2:] == ["0o600", "/tmp", "/home/agent", "mine", "{{untouched}}"]


class Elsewhere(ShellEnvironment):
    """An environment with a working directory below the workspace."""

    name = "elsewhere"

    def plan(self, task: Task) -> Plan:
        return replace(super().plan(task), workdir="/workspace/inner")


async def test_a_program_starts_in_the_environments_workdir(tmp_path: Path):
    look = PROGRAM + "\nprint(os.getcwd())"
    task = greeting_task("command", runs(look))
    data = {**task.data, "files": {"inner/greeting.txt": "Hello, wrold!\n"}}
    environments = Environments({"elsewhere": Elsewhere()})
    async with open_site(tmp_path, environments=environments) as site:
        rollout = await site.rolled(replace(task, environment="elsewhere", data=data))
        harness = (await trajectory_of(site, rollout.id)).info["harness"]
    assert isinstance(harness, dict)
    assert str(harness["output"]).splitlines()[-1] == "/workspace/inner"
    assert rollout.ending is not None and rollout.ending.score is not None
    assert rollout.ending.score.reward == 1.0, "the checks run there too"


async def test_the_operators_mcp_servers_are_reachable_at_the_doorway(tmp_path: Path):
    look = PROGRAM + "\ntry: urllib.request.urlopen(sys.argv[2])\nexcept OSError as error: print(error.read().decode())"
    options = runs(look, "{{root_url}}/mcp/theirs", mcp={"theirs": {"server": "dead", "inside": True}})
    servers = {"dead": OutsideServer("http://127.0.0.1:9/", {})}
    async with open_site(tmp_path, mcp_servers=servers) as site:
        rollout = await site.rolled(greeting_task("command", options))
        harness = (await trajectory_of(site, rollout.id)).info["harness"]
    assert isinstance(harness, dict)
    assert str(harness["output"]).splitlines()[-1] == "the MCP server cannot be reached"
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED


async def test_exit_statuses_in_end_ok_complete_the_rollout(tmp_path: Path):
    async with open_site(tmp_path) as site:
        task = greeting_task("command", runs(PROGRAM + "\nsys.exit(3)", end={"ok": [0, 3]}))
        rollout = await site.rolled(task)
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED


async def test_a_child_that_keeps_the_output_open_does_not_keep_run_open(tmp_path: Path, mark: str):
    program = PROGRAM + f"\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(program, mark)))
        await site.idle()
        nothing_left(site, tmp_path, mark)
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED


# --- other ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [("import sys; print('no key was given'); sys.exit(2)", 2), ("print('no key was given')", 0)],
)
async def test_a_program_that_never_calls_the_model_is_the_tasks_fault_with_its_last_lines(
    tmp_path: Path, code: str, status: int
):
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(code)))
    ending = rollout.ending
    assert ending is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.code, ending.failure.blame) == (Outcome.FAILED, "agent_crashed", Blame.TASK)
    assert ending.score is None and not ending.is_trainable
    assert "no key was given" in ending.failure.detail and f"status {status}" in ending.failure.detail
    assert "0 requests" in ending.failure.detail


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"command": ["no-such-program"]}, "no-such-program"),
        ({"command": ["/workspace/greeting.txt"]}, "greeting.txt"),
        ({"command": ["true"], "workdir": "/no/such/folder"}, "/no/such/folder"),
    ],
    ids=["program", "no program", "folder"],
)
async def test_a_command_that_cannot_start_is_reported(tmp_path: Path, options: Any, error: str):
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", options))
    assert rollout.ending is not None and rollout.ending.failure is not None
    failure = rollout.ending.failure
    assert (failure.code, failure.blame) == ("agent_crashed", Blame.TASK)
    assert error in failure.detail and "status 12" in failure.detail, failure.detail


@pytest.mark.parametrize(
    ("instruction", "more", "error"),
    [
        ("x" * 200_000, {}, "command[3]: is longer than the 128 KB"),
        ("x\0y", {}, "command[3]: contains a NUL"),
        ("x" * 100_000, {"args": ["{{instruction}}"] * 12}, "more than 1 MB together"),
        ("x" * 100_000, {"stdin": "{{instruction}}" * 200}, "stdin: with its values it has more than"),
        ("x", {"files": [{"path": "/proc/nothing", "content": ""}]}, "files[0]: /proc/nothing could not be written"),
    ],
    ids=["long", "NUL", "many", "bomb", "unwritable"],
)
async def test_values_that_cannot_be_passed_are_the_tasks_fault_and_named(
    tmp_path: Path, instruction: str, more: dict[str, Any], error: str
):
    task = greeting_task("command", runs(PROGRAM, **more))
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(replace(task, data={**task.data, "instruction": instruction}))
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("task_invalid", Blame.TASK)
    assert error in rollout.ending.failure.detail, rollout.ending.failure.detail


async def test_a_crash_after_turns_is_truncated_and_scored_and_not_trained_on(tmp_path: Path):
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(PROGRAM + "\nsys.exit('it broke')")))
        trajectory = await trajectory_of(site, rollout.id)
    ending = rollout.ending
    assert ending is not None and ending.failure is not None and ending.score is not None
    assert (ending.outcome, ending.failure.code) == (Outcome.TRUNCATED, "agent_crashed")
    assert ending.failure.blame is Blame.POLICY and not ending.is_trainable
    assert "it broke" in ending.failure.detail and ending.failure.data["exit_status"] == 1
    assert (ending.score.reward, trajectory.turns) == (1.0, 3)


LOOPS = PROGRAM.replace('if not message.get("tool_calls"):\n        break', "pass")
STUBBORN = "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n" + LOOPS
DEAF = STUBBORN.replace("message = ask()", "try: message = ask()\n    except OSError: continue")


@pytest.mark.parametrize("code", [LOOPS, STUBBORN, DEAF], ids=["loops", "ignores SIGTERM", "ignores errors"])
async def test_the_turn_limit_ends_the_program_and_is_scored(tmp_path: Path, mark: str, code: str):
    async with open_site(tmp_path, [FIX, LOOK]) as site:
        rollout = await site.rolled(greeting_task("command", runs(code, mark), max_turns=3))
        trajectory = await trajectory_of(site, rollout.id)
        await site.idle()
        nothing_left(site, tmp_path, mark)
    ending = rollout.ending
    assert ending is not None and ending.failure is not None and ending.score is not None
    assert (ending.outcome, ending.failure.code, ending.is_trainable) == (Outcome.TRUNCATED, "turn_limit", True)
    assert (trajectory.turns, ending.score.reward) == (3, 1.0)
    verify(trajectory)


async def test_the_token_limit_ends_the_program(tmp_path: Path):
    async with open_site(tmp_path, [FIX, LOOK]) as site:
        rollout = await site.rolled(greeting_task("command", runs(LOOPS), max_tokens=50))
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.outcome) == ("token_limit", Outcome.TRUNCATED)


async def test_a_program_that_gives_up_after_a_reply_was_cut_off_hit_the_token_limit(tmp_path: Path):
    gives_up = PROGRAM.replace("    messages.append(message)\n", "    sys.exit(1)\n", 1)
    task = greeting_task("command", runs(gives_up))
    async with open_site(tmp_path, ["one two three four five six seven eight"]) as site:
        rollout = await site.rolled(replace(task, sampling=replace(task.sampling, max_tokens=3)))
    ending = rollout.ending
    assert ending is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.code) == (Outcome.TRUNCATED, "token_limit")
    assert ending.is_trainable


@pytest.mark.parametrize("end", ["", "\n        sys.exit(4)"], ids=["gives up quietly", "crashes"])
async def test_a_program_that_gives_up_when_its_context_is_full_hit_the_context_limit(tmp_path: Path, end: str):
    code = LOOPS.replace("message = ask()", f"try: message = ask()\n    except OSError:{end or ' break'}")
    async with open_site(tmp_path, [call("sh", command="seq 2000")]) as site:
        rollout = await site.rolled(greeting_task("command", runs(code), max_context=3000))
    ending = rollout.ending
    assert ending is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.code) == (Outcome.TRUNCATED, "context_limit")
    assert ending.is_trainable and ending.score is not None


async def test_run_s_counts_while_the_program_works(tmp_path: Path, mark: str):
    code = PROGRAM + "\nimport time\ntime.sleep(1000)"
    async with open_site(tmp_path) as site:
        rollout_id = await site.submit(greeting_task("command", runs(code, mark)))
        await site.until(rollout_id, State.RUN)
        live = site.pipeline.live[rollout_id]
        async with asyncio.timeout(90):
            while (page := await live.page(0)) is None or page.turns < 3:
                await asyncio.sleep(0.01)
        live.clock.budget_s = live.clock.used_s + 0.5  # only now: a busy machine could use it up before
        live.clock.rearm()
        rollout = await site.ended(rollout_id)
        trajectory = await trajectory_of(site, rollout.id)
        await site.idle()
        nothing_left(site, tmp_path, mark)
    ending = rollout.ending
    assert ending is not None and ending.failure is not None
    assert (ending.outcome, ending.failure.code, ending.is_trainable) == (Outcome.TRUNCATED, "run_deadline", False)
    assert trajectory.turns == 3 and ending.score is not None


async def test_a_silent_program_is_not_a_stall(tmp_path: Path):
    """It runs longer than stall_s without output: run_s bounds it, and it is not retried."""
    code = PROGRAM + "\nimport time\ntime.sleep(4)"
    async with open_site(tmp_path) as site:
        # The clock leaves out only standstills of more than a second: the bound has to be longer.
        rollout = await site.rolled(greeting_task("command", runs(code), stall_s=2.0))
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
    assert rollout.attempt == 1


async def test_a_flood_of_output_is_bounded(tmp_path: Path):
    code = (
        PROGRAM + "\nprint('x' * 79 + '\\n', end='', flush=True)\nfor _ in range(40): print('y' * 9999)\nprint('last')"
    )
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(code)))
        harness = (await trajectory_of(site, rollout.id)).info["harness"]
    assert isinstance(harness, dict)
    output = str(harness["output"])
    assert len(output) < 70_000 and harness["dropped_bytes"] > 300_000  # type: ignore[operator]
    assert output.startswith("it begins\n") and output.endswith("last\n") and "bytes left out" in output
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED


@pytest.mark.parametrize("end", ["os.kill(-1, 9)", "os.system('kill -9 -1')"], ids=["itself", "by its child"])
async def test_a_program_that_ends_its_sandbox_gets_the_failing_score(tmp_path: Path, end: str):
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(greeting_task("command", runs(f"{PROGRAM}\n{end}\nimport time\ntime.sleep(1000)")))
    ending = rollout.ending
    assert ending is not None and ending.failure is not None and ending.score is not None
    assert (ending.failure.code, ending.failure.blame) == ("sandbox_ended_by_policy", Blame.POLICY)
    assert (ending.score.reward, rollout.attempt) == (0.0, 1)


async def test_a_program_killed_for_its_memory_hit_the_memory_limit(tmp_path: Path):
    task = greeting_task("command", runs(PROGRAM + "\nx = b'x' * (400 << 20)\nprint(len(x))"))
    task = replace(task, sandbox=replace(task.sandbox, memory_bytes=200 << 20))
    async with open_site(tmp_path) as site:
        rollout = await site.rolled(task)
        in_force = rollout.ending.summary.limits_in_force["memory"] if rollout.ending is not None else "none"
    if in_force in ("none", "rlimit"):
        pytest.skip("there are no cgroups on this machine, so memory is not counted")
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("memory_limit", Blame.POLICY)


# --- from outside ---------------------------------------------------------------------------------------------


WAITS: dict[str, tuple[str, Sequence[str | Reply], Callable[[Site], Any]]] = {
    "in a model call": (PROGRAM, [Reply("x", latency_s=60.0)], lambda site: site.engines[0].busy()),
    "at work": (STUBBORN, [call("sh", command="sleep 1000")], lambda site: sampled(site, 1)),
}


async def sampled(site: Site, count: int) -> None:
    async with asyncio.timeout(90):
        while len([it for it in site.engines[0].calls if it.session_id]) < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", WAITS)
async def test_a_cancel_leaves_no_process_and_no_call(tmp_path: Path, mark: str, name: str):
    code, turns, until = WAITS[name]
    async with open_site(tmp_path, turns) as site:
        rollout_id = await site.submit(greeting_task("command", runs(code, mark)))
        await site.until(rollout_id, State.RUN)
        await until(site)
        await site.pipeline.cancel(rollout_id)
        rollout = await site.ended(rollout_id)
        await site.idle()
        await site.engines[0].idle()
        nothing_left(site, tmp_path, mark)
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.CANCELLED


async def test_an_engine_that_fails_is_infra_and_the_rollout_is_retried(tmp_path: Path):
    failed: list[int] = []

    def once(turn: Any) -> Any:
        if turn.session_id and turn.number == 1 and not failed:
            failed.append(1)
            return Reply(fault="not_json")
        return plays(SOLVES)(turn)

    once_only = RouterSettings(engine_wait_s=5.0, max_tries=1)
    async with whole_site(tmp_path, once, pythons=pythons(), router_settings=once_only) as site:
        rollout = await site.rolled(greeting_task("command", runs(PROGRAM)), within_s=50)
    assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
    assert rollout.attempt == 2
    assert [lost.code for lost in rollout.lost] == ["engine_broken"]


async def test_an_engine_that_returns_only_text_is_refused(tmp_path: Path):
    async with open_site(tmp_path) as site:
        await site.router.add(EngineSpec("t", site.engines[0].url, Kind.OPENAI, policy="text"))
        run = Run("text", policy="text")
        await site.store.put_run(run, {"id": run.id})
        site.pipeline.register_run(run)
        rollout = await site.rolled(greeting_task("command", runs(PROGRAM)), run="text")
    assert rollout.ending is not None and rollout.ending.failure is not None
    assert rollout.ending.failure.code == "engine_refused" and "token ids" in rollout.ending.failure.detail


# --- at submit ------------------------------------------------------------------------------------------------


async def test_invalid_options_are_refused_at_submit(tmp_path: Path):
    async with open_site(tmp_path) as site:
        for options, expected in (
            ({}, "agent.options.command"),
            ({"command": ["x"], "tools": ["shell"]}, "agent.options.tools: unknown"),
            ({"command": ["{{nothing}}"]}, "agent.options.command[0]: unknown {{nothing}}"),
            ({"command": ["x"], "files": [{"path": "relative"}]}, "agent.options.files[0].path"),
            ({"command": ["x"], "env": {"A": 1}}, "agent.options.env"),
            ({"command": ["x"], "reasoning_history": "never"}, "agent.options.reasoning_history"),
            ({"command": ["x"], "mcp": {"a": {"command": ["y"]}}}, "agent.options.mcp.a"),
        ):
            with pytest.raises(TaskInvalid) as caught:
                site.pipeline.resources.check(greeting_task("command", options), site.run)  # type: ignore[arg-type]
            assert caught.value.detail.startswith(expected), caught.value.detail
        with pytest.raises(AgentMissing, match="mini-swe-agent 2"):
            site.pipeline.resources.check(greeting_task("mini-swe-agent"), site.run)


async def test_a_runtime_that_isolates_nothing_is_refused_at_submit(tmp_path: Path):
    async with open_site(tmp_path) as site, LocalRuntime(root=tmp_path / "local") as local:
        resources = replace(site.pipeline.resources, runtimes={"local": local}, default_runtime="local")
        with pytest.raises(TaskInvalid, match="the runtime local provides none"):
            resources.check(greeting_task("command", runs(PROGRAM)), site.run)


def test_the_instruction_is_the_system_part_followed_by_the_users():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Do it."}]},
    ]
    assert instruction_of(messages) == "Be brief.\n\nDo it."
    for wrong in ({"role": "assistant", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}):
        with pytest.raises(TaskInvalid, match=r"messages\[0\]"):
            instruction_of([wrong])
