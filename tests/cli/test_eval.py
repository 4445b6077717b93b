"""Evaluates a policy of known skill: the results agree with it exactly, and missing samples are reported."""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from math import comb
from pathlib import Path

import pytest

from rollyard.envs import EnvContext, Environments
from rollyard.service.schemas.task import to_task
from rollyard.service.settings import load_settings
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.conftest import Cli, command
from tests.cli.test_submit import lines
from tests.client.served import RunningService, served, task

pytestmark = pytest.mark.slow

ANSWERS = {"What is 6 times 7?": "42", "What is 3 plus 4?": "7", "What is 9 minus 1?": "8"}
SKILL = (2, 4, 0)
"""How many of four samples of each task are right: the first ones, by the index in the rollout's id."""

TASKS = [{"environment": "math", "data": {"question": question, "answer": it}} for question, it in ANSWERS.items()]


def known_skill(turn: Turn) -> Reply:
    for question, skill in zip(ANSWERS, SKILL, strict=True):
        if question in turn.text:
            is_right = int(turn.session_id.rpartition("-")[2]) < skill
            return Reply(f"It is \\boxed{{{ANSWERS[question] if is_right else '-1'}}}.")
    return Reply("I do not know.")


@pytest.fixture
async def engine() -> AsyncGenerator[ScriptedEngine, None]:
    async with ScriptedEngine(known_skill, tokenizer=FolderTokenizer(tokenizer_dir())) as running:
        yield running


@pytest.fixture
async def skilled_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine
) -> AsyncGenerator[RunningService, None]:
    """A service whose only engine has the known skill."""
    engines = [{"url": engine.url, "id": "e0", "tokenizer": str(tokenizer_dir())}]
    async with served(tmp_path / "service", engines=engines, max_attempts=1) as running:
        for name, value in running.environ().items():
            monkeypatch.setenv(name, value)
        yield running


def by_hand(n: int, skills: tuple[int, ...], k: int) -> float:
    return sum(1 - comb(n - c, k) / comb(n, k) for c in skills) / len(skills)


async def test_pass_at_k_agrees_with_the_policys_skill(cli: Cli, skilled_service: RunningService, tmp_path: Path):
    result = await cli("eval", lines(tmp_path / "t.jsonl", *TASKS), "--k", 4, "--run", "known", "--seed", 3, "--json")
    assert result.status == 0, result.err
    (body,) = result.json
    assert {k: it["mean"] for k, it in body["all"]["pass_at"].items()} == pytest.approx(
        {str(k): by_hand(4, SKILL, k) for k in (1, 2, 3, 4)}, abs=1e-12
    )
    assert body["all"]["pass_at"]["1"]["mean"] == 0.5 and body["all"]["reward"]["mean"] == 0.5
    assert all(it["low"] <= it["mean"] <= it["high"] for it in body["all"]["pass_at"].values())
    assert body["environments"] == {"math": body["all"]}
    assert [task["correct"] for task in body["tasks"]] == list(SKILL)
    assert [task["place"].rpartition("/")[2] for task in body["tasks"]] == ["t.jsonl:1", "t.jsonl:2", "t.jsonl:3"]
    assert (body["run"], body["policy"], body["seed"], body["missing"]) == ("known", "default", 3, {})
    assert body["all"]["samples"] == 12 and body["all"]["turns"] == 1.0 and body["all"]["sampled_tokens"] > 0

    (created,) = [run for run in (await cli("runs", "list", "--json")).json if run["id"] == "known"]
    assert (created["mode"], created["seed"]) == ("eval", 3)
    again = await cli("eval", tmp_path / "t.jsonl", "--k", 4, "--run", "known", "--seed", 3, "--json")
    assert again.json[0]["tasks"] == body["tasks"] and again.json[0]["all"] == body["all"]
    changed = lines(tmp_path / "c.jsonl", *reversed(TASKS))
    for words in ((tmp_path / "t.jsonl", "--seed", 4), (changed, "--seed", 3)):
        other = await cli("eval", *words, "--run", "known")
        assert other.status == 1 and "evaluation 'known' already exists, with other settings" in other.err
        assert "repeat the original command, or give another --run" in other.err


async def test_families_of_reasoning_gym_agree_with_the_policys_skill(cli: Cli, tmp_path: Path):
    skills = (2, 1, 4, 0, 3, 4)  # of four samples: three items of each family
    words = ("--set", "family=leg_counting,gcd", "--set", "count=3", "--set", "seed=7", "--out", "t.jsonl")
    assert (await cli("tasks", "import", "reasoning_gym", *words)).status == 0
    solutions: dict[str, tuple[str, int]] = {}
    async with Environments() as environments:
        for line, skill in zip((tmp_path / "t.jsonl").read_text().splitlines(), skills, strict=True):
            context = EnvContext(to_task(json.loads(line), {}), "known", None)
            environment = environments.get("reasoning_gym")
            question = str((await environment.init(context)).messages[0]["content"])
            solutions[question] = str((await environment.solve(context, {})).messages[0]["content"]), skill

    def script(turn: Turn) -> str:
        for question, (answer, skill) in solutions.items():
            if question in turn.text:
                return answer if int(turn.session_id.rpartition("-")[2]) < skill else "<answer>?</answer>"
        return "ok"

    async with ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        words = ("--k", 4, "--by", "family", "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--json")
        result = await cli("eval", "t.jsonl", *words)
    assert result.status == 0, result.err
    (body,) = result.json
    assert [task["correct"] for task in body["tasks"]] == list(skills)
    families = {"leg_counting": skills[:3], "gcd": skills[3:]}
    assert {name: it["pass_at"]["2"]["mean"] for name, it in body["by"].items()} == pytest.approx(
        {name: by_hand(4, part, 2) for name, part in families.items()}
    )
    assert {k: it["mean"] for k, it in body["environments"]["reasoning_gym"]["pass_at"].items()} == pytest.approx(
        {str(k): by_hand(4, skills, k) for k in (1, 2, 3, 4)}, abs=1e-12
    )


async def test_more_samples_than_k_are_shown_and_their_trajectories_written(
    cli: Cli, skilled_service: RunningService, tmp_path: Path
):
    tasks = lines(tmp_path / "t.jsonl", *TASKS)
    words = ("--k", 2, "--n", 4, "--limit", 2, "--by", "answer", "--out", tmp_path / "o.jsonl")
    result = await cli("eval", tasks, *words)
    assert result.status == 0, result.err
    rows = {line.split()[0]: line.split() for line in result.out.splitlines() if line.strip()}
    assert rows["tasks"] == ["tasks", "2"] and rows["samples"] == ["samples", "8"]
    assert rows["pass@1"][1] == "0.750" and rows["pass@2"][1] == f"{by_hand(4, SKILL[:2], 2):.3f}"
    assert "pass@3" not in rows
    assert rows["42"][1:3] == ["1", "0"] and rows["7"][1:3] == ["1", "0"]  # by answer: tasks, missing
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 8


async def test_partial_rewards_count_from_the_threshold(cli: Cli, service: RunningService, tmp_path: Path):
    data = {"instruction": "Write done.", "checks": ["test -f done", "false"]}
    tasks = lines(tmp_path / "t.jsonl", {"environment": "shell", "data": data}, TASKS[0])
    for threshold, passed in ((0.5, 0.5), (0.6, 0.0)):
        result = await cli("eval", tasks, "--k", 1, "--threshold", threshold, "--json")
        (body,) = result.json
        assert body["all"]["pass_at"]["1"]["mean"] == passed and body["all"]["reward"]["mean"] == 0.25
        assert {name: it["reward"]["mean"] for name, it in body["environments"].items()} == {"shell": 0.5, "math": 0.0}
    table = (await cli("eval", tasks, "--k", 1)).out
    assert table.split()[:3] == ["shell", "math", "all"]


async def test_missing_samples_are_not_counted_and_are_reported(
    cli: Cli, skilled_service: RunningService, tmp_path: Path
):
    broken = {"environment": "shell", "data": {"instruction": "x", "checks": ["true"], "setup": ["exit 3"]}}
    tasks = lines(tmp_path / "t.jsonl", *TASKS, broken)
    result = await cli("eval", tasks, "--k", 2, "--json")
    assert result.status == 1
    (body,) = result.json
    assert body["all"]["pass_at"]["1"] == {**body["all"]["pass_at"]["1"], "tasks": 3, "missing": 1}
    assert body["all"]["missing"] == 2 and body["missing"] == {"setup_failed": 2}
    assert body["environments"]["shell"]["reward"] is None
    assert "2 samples have no score and are not counted: 2 setup_failed" in result.err
    assert "t.jsonl:4: no scored sample" in result.err and "25.0% of the samples have no score" in result.err
    assert (await cli("eval", tasks, "--k", 2, "--max-missing", 0.25)).status == 0


async def test_defaults_apply_to_the_tasks(cli: Cli, skilled_service: RunningService, tmp_path: Path):
    bare = {"data": TASKS[1]["data"]}
    defaults = {"environment": "math", "sampling": {"temperature": 0.25}}
    tasks, out = lines(tmp_path / "t.jsonl", bare), tmp_path / "o.jsonl"
    result = await cli("eval", tasks, "--k", 1, "--defaults", json.dumps(defaults), "--out", out, "--json")
    assert result.status == 0 and list(result.json[0]["environments"]) == ["math"]
    assert json.loads(out.read_text())["task"]["sampling"]["temperature"] == 0.25


async def test_eval_with_an_engine_needs_no_service(cli: Cli, engine: ScriptedEngine, tmp_path: Path):
    tasks = lines(tmp_path / "t.jsonl", *TASKS)
    words = ("--k", 2, "--n", 4, "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--policy", "mine", "--json")
    result = await cli("eval", tasks, *words)
    assert result.status == 0, result.err
    (body,) = result.json
    assert {k: it["mean"] for k, it in body["all"]["pass_at"].items()} == pytest.approx(
        {str(k): by_hand(4, SKILL, k) for k in (1, 2)}, abs=1e-12
    )
    assert body["policy"] == "mine"


async def test_an_engine_of_another_kind_is_used_if_its_kind_is_given(cli: Cli, tmp_path: Path):
    tasks = lines(tmp_path / "t.jsonl", TASKS[0])
    async with ScriptedEngine(known_skill, tokenizer=FolderTokenizer(tokenizer_dir()), dialect="sglang") as engine:
        words = ("--k", 1, "--engine", engine.url, "--tokenizer", tokenizer_dir(), "--json")
        refused = await cli("eval", tasks, *words)
        result = await cli("eval", tasks, *words, "--kind", "sglang")
    assert refused.status == 1 and "its kind is sglang for SGLang" in refused.err, refused.err
    assert result.status == 0 and list(result.json[0]["all"]["pass_at"]) == ["1"], result.err


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("--k", 4, "--n", 2), 2, "pass@4 cannot be computed from 2 samples"),
        (("--engine", "http://127.0.0.1:1", "--url", "http://127.0.0.1:2"), 2, "omit --url and --token"),
        (("--tokenizer", "x"), 2, "--tokenizer needs --engine"),
        (("--kind", "sglang"), 2, "--kind needs --engine"),
        (("--engine", "http://127.0.0.1:1", "--kind", "sgl"), 2, "there is no such kind of engine — give vllm, sglang"),
        (("--defaults", "{"), 2, "--defaults is not JSON"),
        (("--defaults", "3"), 2, "--defaults: expected a JSON object"),
        (("--out", "o.txt"), 2, "use a name that ends in .jsonl or .arrow"),
        (("--engine", "http://127.0.0.1:1"), 1, "--engine http://127.0.0.1:1: "),
        (("--engine", "gpu"), 2, "'gpu' is not a URL: it has no http:// or https:// — write it as http://gpu"),
        (("--url", "http://127.0.0.1:1", "--token", "x"), 1, "127.0.0.1:1"),
    ],
)
async def test_errors_are_one_line(cli: Cli, tmp_path: Path, words: tuple[object, ...], status: int, says: str):
    result = await cli("eval", lines(tmp_path / "t.jsonl", TASKS[0]), *words)
    assert (result.status, result.out) == (status, ""), result
    assert says in result.err and result.err.splitlines()[-1].startswith("rollyard: ")


async def test_a_task_that_the_service_refuses_is_reported_with_its_line(
    cli: Cli, skilled_service: RunningService, tmp_path: Path
):
    result = await cli("eval", lines(tmp_path / "t.jsonl", TASKS[0], {"environment": "math", "data": {}}), "--k", 3)
    assert result.status == 1 and "t.jsonl:2: " in result.err and "question" in result.err
    assert "there is no task in" in (await cli("eval", lines(tmp_path / "e.jsonl", "// nothing"))).err


def test_a_large_k_is_shown_by_powers_of_two():
    from rollyard.cli._evaluation import shown_ks

    assert shown_ks(3) == [1, 2, 3] and shown_ks(10) == [1, 2, 4, 8, 10] and shown_ks(16) == [1, 2, 4, 8, 16]


async def test_an_interrupt_prints_how_to_continue(service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task("NEVER"))
    async with asyncio.timeout(90), command(service, "eval", file, "--k", 1, "--run", "stopped") as process:
        assert process.stderr is not None
        assert b"1 rollout submitted to run stopped" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        remaining_stderr = (await process.stderr.read()).decode()
        assert await process.wait() == 130
    assert "--run stopped" in remaining_stderr and "Traceback" not in remaining_stderr


def test_a_temporary_service_shares_only_installed_files(tmp_path: Path):
    from rollyard.cli.commands.evaluate import _in_folder

    engines = [{"url": "http://127.0.0.1:1", "role": "judge"}, {"url": "http://127.0.0.1:2"}]
    flags = {"data_dir": tmp_path / "data", "engines": engines, "admin_tokens": ["x" * 40], "store": "elsewhere.db"}
    (tmp_path / "own").mkdir()
    own = _in_folder(load_settings(flags, {"HOME": str(tmp_path)}).settings, tmp_path / "own")
    assert [engine.url for engine in own.engines] == ["http://127.0.0.1:1"]
    assert own.store_path.parent == own.token_path.parent == own.data_dir == tmp_path / "own"
    assert (own.admin_tokens, own.port) == ((), 0)
    for name in ("images", "agents", "python"):
        assert (own.data_dir / name).resolve() == tmp_path / "data" / name
