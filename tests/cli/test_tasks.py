"""`rollyard tasks` with real files and real sandboxes; problems of tasks are reported with their place."""

import asyncio
import gzip
import importlib.metadata
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.core import Json, Score, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs import EnvContext, Environment, Evidence, Plan, Start
from rollyard.envs.base import Solution, check_options
from rollyard.envs.registry import GROUP
from rollyard.testing.script import FolderTokenizer
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.agents.harness_parts import CACHE, PROGRAM
from tests.agents.test_install import wheel
from tests.cli.conftest import Cli
from tests.cli.test_agents import TINY
from tests.cli.test_submit import lines
from tests.client.served import SCRIPT, task

pytestmark = pytest.mark.slow

MATH = {"environment": "math", "data": {"question": "2+2?", "answer": "4"}}
SHELL = task()


class Echo(Environment):
    """An environment whose data sets the rewards of the oracle and of doing nothing."""

    name = "echo"

    def check(self, task: Task) -> None:
        if not isinstance(task.data["word"], str):
            raise TaskInvalid("echo: data.word: a string was expected")

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=bool(task.data.get("setup")), eval_needs_sandbox=False)

    async def prepare(self, context: EnvContext) -> None:
        if context.task.data.get("setup") == "task":
            raise TaskInvalid("echo: it cannot be set up")

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "Say it."},))

    async def solve(self, context: EnvContext, tools: Mapping[str, Any]) -> Solution:
        if context.task.data.get("solution") is None:
            raise TaskInvalid("echo: this task holds no solution")
        return Solution(str(context.task.data["solution"]))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        if context.task.data["word"] == "crash":
            raise RuntimeError("the verifier fell over")
        right = float(evidence.answer == context.task.data["word"])
        return Score(max(right, float(str(context.task.data.get("least", 0)))), components={"right": right})

    def from_row(self, row: Mapping[str, Json], options: Mapping[str, str]) -> Mapping[str, Json]:
        check_options(self.name, options, ("prefix",))
        raw_word: Any = row["word"]
        word = options.get("prefix", "") + raw_word.strip()
        return {"data": {"word": word, **({"least": float("nan")} if word == "NaN" else {})}}

    def from_folder(self, folder: Path, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        for path in sorted(folder.glob("*.txt")):
            word, *notes = path.read_text().split("\n")
            yield {"data": {"word": word, "name": path.stem, "notes": notes}}

    def generate(self, options: Mapping[str, str]) -> Iterable[Mapping[str, Json]]:
        check_options(self.name, options, ("count",))
        for number in range(int(options.get("count", "0"))):
            yield {"environment": "echo", "data": {"word": f"w{number}"}}


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the environment as an installed package would."""
    points = importlib.metadata.entry_points(group=GROUP)
    echo_point = importlib.metadata.EntryPoint("echo", f"{__name__}:Echo", GROUP)
    monkeypatch.setattr("rollyard.envs.registry.plugins", lambda group: [*points, echo_point])


# --- validate -----------------------------------------------------------------------------------------


async def test_every_wrong_field_of_a_task_is_reported_with_its_path(cli: Cli, tmp_path: Path):
    limits = {"max_turns": "many", "tol_s": 3}
    wrong = {"environment": 3, "data": [], "limits": limits, "sandbox": {"egress": {"hosts": [1]}}, "sampling": "hot"}
    result = await cli("tasks", "validate", lines(tmp_path / "t.jsonl", wrong))
    assert result.status == 1
    _, _, problems = result.out.rstrip().partition("t.jsonl:1: ")
    assert problems.split("; ") == [
        *("environment: expected str, got int", "data: expected object, got array"),
        *("limits.max_turns: expected int, got str", "there is no field limits.tol_s in a task"),
        *("did you mean limits.tool_s?", "sandbox.egress.hosts[0]: expected str, got int"),
        "sampling: expected object, got str",
    ]


async def test_all_problems_are_reported_by_line(cli: Cli, tmp_path: Path):
    data = {"instruction": 3}
    broken = {"environment": "shell", "data": data, "agent": {"name": "no"}, "sandbox": {"image": "nix"}}
    file = lines(tmp_path / "t.jsonl", MATH, "{x", {"environment": "nowhere"}, broken, {**MATH, "limit": {}},
                 {**MATH, "limits": {"run_s": -1, "init_s": 0}}, {**SHELL, "agent": {"options": {"tools": ["no"]}}},
                 {**SHELL, "sandbox": {"runtime": "docker"}}, {"data": {}})  # fmt: skip
    result = await cli("tasks", "validate", file, tmp_path / "none.jsonl")
    assert result.status == 1
    reported = [re.sub(r"^.*/(?=t\.jsonl|none)", "", line) for line in result.out.splitlines()]
    expected = (
        "t.jsonl:2: this is not JSON",
        "t.jsonl:3: there is no environment 'nowhere'",
        "t.jsonl:4: shell: data.instruction: a string was expected",
        "t.jsonl:4: there is no agent 'no'",
        "t.jsonl:4: image 'nix' is not on this machine",
        "t.jsonl:5: there is no field limit in a task",
        "t.jsonl:6: limits.init_s: input should be greater than 0",
        "t.jsonl:6: limits.run_s: input should be greater than 0",
        "t.jsonl:7: there is no tool 'no'",
        "t.jsonl:8: sandbox.runtime: there is no runtime 'docker'",
        "t.jsonl:9: environment: this field is required",
        "none.jsonl: cannot be read: No such file",
    )
    assert len(reported) == len(expected), reported
    for line, start in zip(reported, expected, strict=True):
        assert start in line
    assert "10 tasks, 9 with problems, 0 with warnings" in result.err


async def test_probable_mistakes_are_warnings(cli: Cli, tmp_path: Path):
    odd = {
        "limits": {"run_s": 10, "tool_s": 20, "max_context": 100},
        "sampling": {"max_tokens": 200},
        "sandbox": {"memory_bytes": 2048},
    }
    result = await cli("tasks", "validate", lines(tmp_path / "t.jsonl", {**MATH, **odd}, MATH, MATH), "--json")
    assert result.status == 0
    first, second, third = result.json
    assert first["warnings"] == [
        "limits.tool_s 20 is more than limits.run_s 10",
        "sampling.max_tokens 200 is more than limits.max_context 100",
        "sandbox.memory_bytes 2048 is very little: the unit is bytes",
    ]
    assert second["warnings"] == [] and second["ok"] is True and second["oracle"] is None
    assert third["warnings"] == [f"the same task as {tmp_path}/t.jsonl:2"]
    short = {**MATH, "limits": {"run_s": 10}}  # the default of tool_s is longer, which is no mistake
    assert (await cli("tasks", "validate", lines(tmp_path / "s.jsonl", short), "--json")).json[0]["warnings"] == []
    assert "there is no task in" in (await cli("tasks", "validate", lines(tmp_path / "e.jsonl", "// nothing"))).err


async def test_an_exception_in_a_check_is_reported_with_its_line(cli: Cli, echo: None, tmp_path: Path):
    file = lines(
        tmp_path / "t.jsonl", {"environment": "echo", "data": {}}, {"environment": "echo", "data": {"word": 3}}
    )
    result = await cli("tasks", "validate", file)
    check_line = inspect.getsourcelines(Echo.check)[1] + 1
    assert result.status == 1
    assert "t.jsonl:1: echo.check raised KeyError: 'word' (tests/cli/" in result.out
    assert [line.rpartition("/")[2] for line in result.out.splitlines()] == [
        f"test_tasks.py, line {check_line}, in check)",
        "t.jsonl:2: echo: data.word: a string was expected",
    ]


async def test_mcp_servers_of_the_settings_are_known(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = {**SHELL, "agent": {"options": {"mcp": {"search": {"server": "known"}}}}}
    file = lines(tmp_path / "t.jsonl", named)
    unknown = await cli("tasks", "validate", file)
    assert unknown.status == 1 and "'known'" in unknown.out
    monkeypatch.setenv("ROLLYARD_MCP_SERVERS", '{"known": "http://127.0.0.1:1/mcp"}')
    assert (await cli("tasks", "validate", file)).out == ""


async def test_runs_find_useless_tasks(cli: Cli, echo: None, tmp_path: Path):
    def echo_task(word: str, **data: object) -> dict[str, object]:
        return {"environment": "echo", "data": {"word": word, **data}}

    file = lines(
        tmp_path / "t.jsonl",
        echo_task("good", solution="good"),
        echo_task("low", solution="wrong"),
        echo_task("given", solution="given", least=1),
        echo_task("unsolved"),
        echo_task("unsolved and given", least=1),
        echo_task("crash", solution="crash"),
        echo_task("broken", solution="broken", setup="task"),
        echo_task("half", solution="half", least=0.5),
    )
    result = await cli("tasks", "validate", file, "--run", "--jobs", 3, "--runtime", "local", "--json")
    assert result.status == 1
    good, low, rewarded, unsolved, unsolved_rewarded, crash, broken, half = result.json
    assert good["ok"] and (good["oracle"]["reward"], good["noop"]["reward"]) == (1.0, 0.0)
    assert low["problems"] == ["the oracle scores 0, not 1", "doing nothing scores 0, and the oracle 0"]
    assert rewarded["problems"] == ["doing nothing scores 1, and the oracle 1"]
    assert unsolved["ok"] and unsolved["warnings"] == ["no oracle: the task does not contain its solution"]
    assert unsolved_rewarded["problems"] == ["doing nothing scores 1"]
    assert [problem.partition(" raised ")[0] for problem in crash["problems"]] == [
        "oracle: verifier_crashed in eval: echo.eval",
        "no-op: verifier_crashed in eval: echo.eval",
    ]
    assert [problem[:30] for problem in broken["problems"]] == [
        "oracle: task_invalid in init: ",
        "no-op: task_invalid in init: e",
    ]
    assert half["ok"] and half["noop"]["components"] == {"right": 0.0}
    assert "8 tasks, 5 with problems, 0 not tried for reasons outside the task, 2 with warnings" in result.err

    words = ("--run", "--runtime", "local", "--limit", 2, "--max-reward", 0)
    shown = await cli("tasks", "validate", file, *words)
    rows = [line.split()[1:] for line in shown.out.splitlines() if " echo " in line]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("echo", "1", "0", "ok"),
        ("echo", "0", "0", "problem"),
    ]


@pytest.mark.parametrize("runtime", ["bubblewrap", "local"])
async def test_validation_runs_in_real_sandboxes(cli: Cli, tmp_path: Path, runtime: str):
    always_passing = task(check="true")
    result = await cli("tasks", "validate", lines(tmp_path / "t.jsonl", SHELL, always_passing), "--run", "--json",
                       "--runtime", runtime)  # fmt: skip
    first, second = result.json
    assert result.status == 1 and first["ok"] and first["noop"]["reward"] == 0.0
    assert second["problems"] == ["doing nothing scores 1"]


# --- fields -------------------------------------------------------------------------------------------


async def test_fields_of_a_task_of_data_and_of_options_are_printed(cli: Cli, echo: None):
    whole = (await cli("tasks", "fields")).out
    for row in (
        r"environment +string, 1 to 256 characters +required ",
        r"limits\.run_s +number, above 0, at most 2,592,000 +1800.0 +Seconds of RUN",
        r"sandbox\.egress\.methods +list of GET, HEAD.* +\[\"GET\", \"HEAD\"\] ",
    ):
        assert re.search(row, whole), whole
    of_shell = {row["name"]: row for row in (await cli("tasks", "fields", "shell", "--json")).json}
    assert (of_shell["eval"]["default"], of_shell["instruction"]["default"]) == ('"fresh"', "required")
    assert "tool_latency_s" in (await cli("tasks", "fields", "--agent", "native")).out
    for words, status, says in (
        (("echo",), 1, "the environment echo does not describe its fields"),
        (("nowhere",), 1, "there is no environment 'nowhere'"),
        (("shell", "--agent", "native"), 2, "give an environment or --agent, not both"),
    ):
        result = await cli("tasks", "fields", *words)
        assert (result.status, result.out) == (status, "") and says in result.err and result.err.count("\n") == 1


# --- try ----------------------------------------------------------------------------------------------


async def test_try_shows_messages_and_score(cli: Cli, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", MATH, SHELL)
    result = await cli("tasks", "try", f"{file}:1", "--agent", "oracle", "--runtime", "local")
    assert result.status == 0, result.err
    for text in ("user: 2+2?", "assistant: The answer is", "reward     1", "  correct: 1", "EVAL"):
        assert text in result.out, result.out
    long = " ".join(["2+2?"] * 50)  # wider than the terminal: its lines are not broken
    wide = lines(tmp_path / "w.jsonl", {**MATH, "data": {"question": long, "answer": "4"}})
    assert f"user: {long}\n" in (await cli("tasks", "try", wide, "--agent", "noop", "--runtime", "local")).out
    (body,) = (await cli("tasks", "try", f"{file}:2", "--agent", "noop", "--json")).json
    assert (body["reward"], body["components"], body["turns"]) == (0.0, {"check_0": 0.0}, 0)
    assert [message["role"] for message in body["messages"]] == ["user"] and body["failure"] is None


async def test_try_without_a_score_shows_the_failure(cli: Cli, echo: None, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", {"environment": "echo", "data": {"word": "[bold]crash"}},
                 {"environment": "echo", "data": {"word": "crash"}})  # fmt: skip
    result = await cli("tasks", "try", f"{file}:2", "--agent", "noop", "--runtime", "local")
    assert result.status == 1 and "reward     none" in result.out
    assert "verifier_crashed (blame: infra, in eval)" in result.out and "the verifier fell over" in result.out


async def test_agents_with_a_model_need_an_engine(cli: Cli, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", SHELL)
    async with ScriptedEngine(SCRIPT, tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        words = ("--engine", engine.url, "--tokenizer", tokenizer_dir(), "--runtime", "local")
        (body,) = (await cli("tasks", "try", file, *words, "--json")).json
        shown = await cli("tasks", "try", file, "--agent", "native", *words)
    assert body["reward"] == 1.0 and body["turns"] == 2 and body["sampled_tokens"] > 0
    assert "turns      2" in shown.out and "→ shell(" in shown.out
    for words, status, expected in (
        ((), 2, "the agent native needs a model — give --engine URL, or --agent oracle"),
        (("--engine", "http://127.0.0.1:1"), 1, "--engine http://127.0.0.1:1: "),
        (("--tokenizer", "x"), 2, "--tokenizer needs --engine"),
        (("--kind", "sglang"), 2, "--kind needs --engine"),
        (("--agent", "missing"), 1, "t.jsonl:1: there is no agent 'missing'"),
        (("--runtime", "docker"), 1, "there is no runtime 'docker'"),
    ):
        result = await cli("tasks", "try", file, *words)
        assert (result.status, result.out) == (status, "") and expected in result.err, result
        assert result.err.splitlines()[-1].startswith("rollyard: ")


async def test_judges_of_the_settings_are_used(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = {"question": "Why is the sky blue?", "answer": "Rayleigh scattering", "judge": True}
    agent = {"options": {"tools": []}}
    file = lines(tmp_path / "t.jsonl", {"environment": "stem", "data": data, "agent": agent})
    async with (
        ScriptedEngine(lambda _: "\\boxed{Light scatters}", tokenizer=FolderTokenizer(tokenizer_dir())) as engine,
        ScriptedEngine(lambda _: "yes") as judge,
    ):
        words = ("tasks", "try", file, "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--runtime", "local")
        without_judge = await cli(*words)
        monkeypatch.setenv("ROLLYARD_ENGINES", json.dumps([{"url": judge.url, "kind": "openai", "role": "judge"}]))
        with_judge = await cli(*words)
    assert without_judge.status == 1 and "judge_unreachable (blame: infra, in eval)" in without_judge.out
    assert with_judge.status == 0 and "reward     1" in with_judge.out, with_judge


async def test_agent_programs_can_be_tried_on_a_task(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "data"
    (folder / "agents").mkdir(parents=True)
    (folder / "agents/tiny.toml").write_text(TINY)
    (CACHE / "python").mkdir(parents=True, exist_ok=True)
    (folder / "python").symlink_to(CACHE / "python")  # building one takes seconds
    monkeypatch.setenv("ROLLYARD_DATA_DIR", str(folder))
    wheel(tmp_path / "wheels", code=PROGRAM)
    file = lines(tmp_path / "t.jsonl", SHELL)
    missing = await cli("tasks", "validate", lines(tmp_path / "m.jsonl", {**SHELL, "agent": {"name": "tiny"}}))
    assert missing.status == 1 and "the agent tiny 1.0 is not installed" in missing.out
    assert (await cli("agents", "install", "tiny", "--from", tmp_path / "wheels")).status == 0
    bare = await cli("tasks", "validate", tmp_path / "m.jsonl", "--runtime", "local")
    assert bare.status == 1 and "the runtime local provides none: choose another" in bare.out
    async with ScriptedEngine(lambda _: "Done.", tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        words = ("--agent", "tiny", "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--json")
        (body,) = (await cli("tasks", "try", file, *words)).json
    assert (body["reward"], body["turns"], body["failure"]) == (0.0, 1, None)
    assert [message["content"] for message in body["messages"]] == ["Write done.", "Done."]


# --- import -------------------------------------------------------------------------------------------


def bodies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_rows_of_every_format_become_tasks(cli: Cli, echo: None, tmp_path: Path):
    lines(tmp_path / "a.jsonl", {"word": "a"})
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"word": "b"}\n'))
    (tmp_path / "c.json").write_text('[{"word": "c"}, {"word": "ç"}]')
    (tmp_path / "d/data").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(pa.table({"word": [split]}), tmp_path / f"d/data/{split}-00000-of-00001.parquet")
    out = tmp_path / "out.jsonl"
    result = await cli("tasks", "import", "echo", "a.jsonl", "b.jsonl.gz", "c.json", "--set", "prefix=x", "--out", out)
    assert (result.status, result.out) == (0, "") and "4 tasks are in " in result.err
    assert [body["data"]["word"] for body in bodies(out)] == ["xa", "xb", "xc", "xç"]
    assert {body["environment"] for body in bodies(out)} == {"echo"}
    result = await cli("tasks", "import", "echo", "d", "--split", "test")
    assert result.json == [{"environment": "echo", "data": {"word": "test"}}] and result.err == "1 tasks\n"
    assert (await cli("tasks", "validate", out)).status == 0
    assert [path.name for path in tmp_path.glob(".*")] == []


async def test_folders_and_generated_tasks_are_imported(cli: Cli, echo: None, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for word in ("b", "a"):
        (tmp_path / f"folder/{word}.txt").write_text(word)
    result = await cli("tasks", "import", "echo", "folder")
    assert [body["data"]["word"] for body in result.json] == ["a", "b"]
    words = ("--set", "count=9", "--limit", 2, "--out", "o.jsonl", "--json")
    (summary,) = (await cli("tasks", "import", "echo", *words)).json
    assert summary == {"environment": "echo", "tasks": 2, "skipped": 0, "out": "o.jsonl"}
    assert [body["data"]["word"] for body in bodies(tmp_path / "o.jsonl")] == ["w0", "w1"]


async def test_one_bad_row_means_that_nothing_is_written(cli: Cli, echo: None, tmp_path: Path):
    file = lines(tmp_path / "rows.jsonl", {"word": "a"}, "{", {"wort": "b"}, "7", {"word": "NaN"}, {"word": None},
                 '{"word": "\\ud800"}', {"word": "c"})  # fmt: skip
    out = lines(tmp_path / "out.jsonl", "before")
    for words in (("--out", out), ()):
        result = await cli("tasks", "import", "echo", file, *words)
        assert (result.status, result.out) == (1, "")
        errors = [line.removeprefix(f"{tmp_path}/") for line in result.err.splitlines()]
        assert errors[0].startswith("rows.jsonl:2: this is not JSON")
        assert errors[1].startswith("rows.jsonl:3: KeyError: 'word' (tests/cli/test_tasks.py, line ")
        assert errors[2] == "rows.jsonl:4: a row is an object, not a number"
        assert errors[3].startswith("rows.jsonl:5: ValueError: Out of range float")
        assert errors[4].startswith("rows.jsonl:6: AttributeError: 'NoneType'")
        assert errors[5].startswith("rows.jsonl:7: UnicodeEncodeError: ")
        assert "6 of 8 rows cannot be imported — nothing was written; --skip-bad skips them" in errors[6]
    assert out.read_text() == "before\n" and [path.name for path in tmp_path.glob(".*")] == []
    result = await cli("tasks", "import", "echo", file, "--out", out, "--skip-bad")
    assert result.status == 0 and "2 tasks are in " in result.err and "; 6 bad ones were skipped" in result.err
    assert [body["data"]["word"] for body in bodies(out)] == ["a", "c"]


async def test_links_and_pipes_are_written_into_and_not_replaced(cli: Cli, echo: None, tmp_path: Path):
    file = lines(tmp_path / "rows.jsonl", {"word": "a"})
    (tmp_path / "link").symlink_to(tmp_path / "real.jsonl")
    assert (await cli("tasks", "import", "echo", file, "--out", "link")).status == 0
    assert (tmp_path / "link").is_symlink() and len(bodies(tmp_path / "real.jsonl")) == 1
    os.mkfifo(tmp_path / "pipe")
    reading = asyncio.create_task(asyncio.to_thread((tmp_path / "pipe").read_text))
    assert (await cli("tasks", "import", "echo", file, "--out", "pipe")).status == 0
    assert (tmp_path / "pipe").is_fifo() and json.loads(await reading)["data"] == {"word": "a"}
    result = await cli("tasks", "import", "echo", file, "--out", "-")
    assert len(result.json) == 1 and result.err == "1 tasks\n" and not (tmp_path / "-").exists()


async def test_notes_of_a_harbor_task_are_printed_with_its_name(cli: Cli, tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / "all" / name / "tests").mkdir(parents=True)
        (tmp_path / "all" / name / "task.toml").write_text('[environment]\ndocker_image = "some/image:1"\n')
        (tmp_path / "all" / name / "instruction.md").write_text("Do it.")
        (tmp_path / "all" / name / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    result = await cli("tasks", "import", "harbor", "all", "--out", "o.jsonl")
    assert result.status == 0, result.err
    datas = [body["data"] for body in bodies(tmp_path / "o.jsonl")]
    notes = [f"all: {data['name']}: {text}" for data in datas for text in data["notes"]]
    assert len(notes) >= 2 and result.err.splitlines() == [*notes, "2 tasks are in o.jsonl"]
    (words,) = (await cli("tasks", "import", "harbor", "all/one", "--out", "o.jsonl", "--json")).json  # stdout is JSON
    assert words["tasks"] == 1


async def test_notes_are_printed_up_to_a_limit(cli: Cli, echo: None, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for number in range(30):
        (tmp_path / f"folder/{number:02d}.txt").write_text(f"word\nthe same\nof {number}")
    result = await cli("tasks", "import", "echo", "folder", "--out", "o.jsonl")
    *notes, omitted, last = result.err.splitlines()
    assert notes[:3] == ["folder: 00: the same", "folder: 00: of 0", "folder: 01: the same"]
    assert sum("the same" in line for line in notes) == 3 and len(notes) == 20
    assert omitted == "… and 40 more notes, which are in data.notes of the tasks" and last == "30 tasks are in o.jsonl"


async def test_the_same_error_in_all_rows_is_printed_three_times(cli: Cli, echo: None, tmp_path: Path):
    file = lines(tmp_path / "rows.jsonl", *[{"word": "a"}] * 30)
    result = await cli("tasks", "import", "echo", file, "--set", "postfix=x", "--skip-bad")
    assert result.status == 1 and result.err.count("unknown option 'postfix' of its importer; there are prefix") == 3
    assert "there is no task to import" in result.err
    many = lines(tmp_path / "many.jsonl", *[f"{{{number}" for number in range(10, 60)])
    result = await cli("tasks", "import", "echo", many)
    assert "50 of 50 rows cannot be imported" in result.err and len(result.err.splitlines()) <= 21


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("nowhere", "a.jsonl"), 1, "there is no environment 'nowhere'"),
        (("echo", "none.jsonl"), 1, "none.jsonl does not exist"),
        (("echo", "a.csv"), 1, "a.csv is not a file of rows"),
        (("echo", "a.jsonl", "--set", "x"), 2, "--set x: expected NAME=VALUE"),
        (("echo", "a.jsonl", "--set", "x=1", "--set", "x=2"), 2, "--set x was given twice"),
        (("echo", "a.jsonl", "--json"), 2, "give --out"),
        (("echo", "a.jsonl", "--out", "no/where.jsonl"), 1, "no/where.jsonl cannot be written"),
        (("echo", "a.jsonl", "--out", "a.csv/o.jsonl"), 1, "a.csv/o.jsonl cannot be written"),
        (("echo", "a.jsonl", "--out", "folder"), 1, "folder cannot be written: Is a directory"),
        (("echo", "odd", "--out", "o.jsonl"), 1, "odd cannot be read: "),
        (("echo", "--split", "train"), 2, "--split needs a dataset"),
        (("echo", "a.jsonl", "--split", "train"), 1, "is a file: only folders have splits"),
        (("echo", "folder", "--split", "train"), 2, "folder is not a dataset of rows"),
        (("echo", "--set", "size=3"), 1, "unknown option 'size' of its importer; there are count\n"),
        (("math",), 1, "math generates no tasks"),
        (("shell", "a.jsonl"), 1, "shell has no importer for rows — write its tasks yourself"),
        (("harbor", "a.jsonl"), 1, "harbor has no importer for rows — give a folder"),
    ],
)
async def test_errors_of_an_import_are_reported(
    cli: Cli, echo: None, tmp_path: Path, words: tuple[str, ...], status: int, says: str
):
    lines(tmp_path / "a.jsonl", {"word": "a"})
    (tmp_path / "a.csv").write_text("word\na\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd/x.txt").mkdir(parents=True)
    result = await cli("tasks", "import", *words)
    assert (result.status, result.out) == (status, ""), result
    assert says in result.err and result.err.splitlines()[-1].startswith("rollyard: ")
