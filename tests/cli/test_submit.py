"""`rollyard submit`: from lines to a table; errors are reported with their line before anything is sent."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from rollyard.cli._tasks import read_tasks
from rollyard.client import AsyncClient
from tests.cli.conftest import Cli, command
from tests.client.served import RunningService, served, task
from tests.worker import free_port

pytestmark = pytest.mark.slow


def lines(path: Path, *tasks: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in tasks))
    return path


async def test_tasks_are_submitted_and_shown_as_a_table(cli: Cli, service: RunningService, tmp_path: Path):
    result = await cli("submit", lines(tmp_path / "t.jsonl", task(), "", task(check="false")), "--id-prefix", "p")
    assert result.status == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if line.strip().startswith("p-")]
    assert [row[:4] for row in rows] == [["p-0", "completed", "1", "2"], ["p-1", "completed", "0", "2"]]
    assert "2 completed, mean reward 0.500 of 2" in result.err


async def test_json_is_one_record_per_line_without_notes(cli: Cli, service: RunningService):
    result = await cli("submit", "-", "--json", "--group-size", "2", "--id-prefix", "g", stdin=json.dumps(task()))
    assert result.status == 0, result.err
    assert [(r["id"], r["group"], r["reward"]) for r in result.json] == [("g-0-0", "g-0", 1.0), ("g-0-1", "g-0", 1.0)]


async def test_the_same_prefix_names_the_same_rollouts(cli: Cli, service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task(), task("Another."), task("A third."))
    first = await cli("submit", file, "--json", "--id-prefix", "again", "--limit", "2")
    second = await cli("submit", file, "--json", "--id-prefix", "again")
    assert [r["id"] for r in second.json] == ["again-0", "again-1", "again-2"]
    assert [r["created_at"] for r in second.json[:2]] == [r["created_at"] for r in first.json]


async def test_no_wait_returns_when_the_rollouts_are_durable(cli: Cli, service: RunningService, tmp_path: Path):
    result = await cli("submit", lines(tmp_path / "t.jsonl", task("NEVER")), "--no-wait", "--json", "--run", "later")
    assert result.status == 0 and result.json[0]["run"] == "later" and result.json[0]["outcome"] is None


async def test_trajectories_are_written_as_lines_and_as_arrow(cli: Cli, service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task(), task("Another."))
    out = tmp_path / "out.jsonl"
    assert (await cli("submit", file, "--id-prefix", "o", "--out", out)).status == 0
    bodies = [json.loads(line) for line in out.read_text().splitlines()]
    assert [body["id"] for body in bodies] == ["o-0", "o-1"]
    trace = bodies[0]["trajectory"]["traces"][0]
    assert len(trace["token_ids"]) == len(trace["mask"]) == len(trace["logprobs"])
    arrow = tmp_path / "out.arrow"
    assert (await cli("submit", file, "--id-prefix", "o", "--out", arrow)).status == 0
    with pa.OSFile(str(arrow)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.column("rollout_id").to_pylist() == ["o-0", "o-1"]
    assert table.column("token_ids")[0].as_py() == trace["token_ids"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"environment": ', "this is not JSON"),
        ('{"environment": "shell", "data": {"x": ' + "[" * 100_000, "this is not JSON (maximum recursion"),
        ('{"environment": "shell", "data": {"x": NaN}}', "this is not JSON (NaN"),
        ("[1]", "a task is a JSON object, not list"),
        ('{"environment": "shell", "limit": {}}', "there is no field limit in a task"),
        ('{"environment": "shell", "limits": {"max_turn": 1}}', "there is no field limits.max_turn"),
        ('{"environment": "shell", "limits": {"max_turns": "many"}}', "limits.max_turns: expected int, got str"),
        ('{"environment": "shell", "data": {"instruction": 3}}', "instruction"),
        ('{"environment": "nowhere"}', "there is no environment 'nowhere'"),
        ('{"environment": "shell", "data": {"instruction": "x"}, "limits": {"run_s": -1}}', "limits.run_s"),
        (
            '{"environment": "shell", "data": {"instruction": "x", "checks": ["true"]}, "agent": {"name": "no"}}',
            "agent",
        ),
    ],
)
async def test_an_error_is_reported_with_file_and_line_and_nothing_is_submitted(
    cli: Cli, service: RunningService, tmp_path: Path, bad: str, says: str
):
    result = await cli("submit", lines(tmp_path / "t.jsonl", task(), "", bad, task()), "--id-prefix", "x")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("rollyard: ") and says in result.err and result.err.count("\n") == 1
    assert "t.jsonl:3: " in result.err or "agent" in says
    async with AsyncClient(service.url, service.token) as client:
        assert (await client.list()).rollouts == ()


async def test_all_mistakes_are_listed_by_line_before_anything_is_submitted(
    cli: Cli, service: RunningService, tmp_path: Path
):
    bad = {"environment": "shell", "data": {"instruction": "x"}, "limits": {"run_s": -1, "max_turns": 0}}
    file = lines(tmp_path / "t.jsonl", task(), '{"environment": "shell",}', bad, {**task(), "limit": {}, "sandbox": {
        "egress": {"host": []}}}, {"environment": "nowhere"}, {"environment": "math", "data": {}}, task())  # fmt: skip
    result = await cli("submit", file, "--run", "another")
    listed = [line.removeprefix(f"{tmp_path}/") for line in result.err.splitlines()]
    assert (result.status, result.out) == (1, "")
    assert listed[0].startswith("t.jsonl:2: this is not JSON (") and ", at character 2" in listed[0]
    assert listed[1:3] == [
        "t.jsonl:3: limits.run_s: input should be greater than 0",
        "t.jsonl:3: limits.max_turns: input should be greater than or equal to 1",
    ]
    assert listed[3] == (
        "t.jsonl:4: there is no field limit in a task; did you mean limits?;"
        " there is no field sandbox.egress.host in a task; did you mean sandbox.egress.hosts?"
    )
    assert listed[4].startswith("t.jsonl:5: there is no environment 'nowhere'; there are: ")
    assert listed[5] == "t.jsonl:6: math: data.question: a string was expected"
    assert len(listed) == 7 and listed[6].startswith("rollyard: 5 of 7 tasks cannot be used — nothing was submitted. ")
    assert "`rollyard tasks fields` lists the fields of a task (docs/reference/task.md)." in listed[6]
    async with AsyncClient(service.url, service.token) as client:
        assert (await client.list()).rollouts == ()


async def test_only_the_first_mistakes_are_listed_and_the_others_are_counted(
    cli: Cli, service: RunningService, tmp_path: Path
):
    unreadable = lines(tmp_path / "t.jsonl", *['{"x'] * 13, task(), *[{"environment": "math", "data": {}}] * 109)
    result = await cli("submit", unreadable)
    listed = result.err.splitlines()
    assert len(listed) == 22 and listed[20:] == ["… and 102 more", listed[21]]
    assert listed[21].startswith("rollyard: 122 of 123 tasks cannot be used — ")
    refused = await cli("submit", lines(tmp_path / "m.jsonl", *[{"environment": "math", "data": {}}] * 3))
    assert refused.err.count("data.question: a string was expected") == 3
    assert "3 of 3 tasks cannot be used" in refused.err and "rollyard tasks fields ENVIRONMENT" in refused.err


async def test_unreadable_lines_are_listed_without_a_service(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLYARD_URL", "http://127.0.0.1:9")
    result = await cli("submit", lines(tmp_path / "t.jsonl", "{x", task(), "[1]"))
    assert result.status == 1 and "2 of 3 tasks cannot be used" in result.err and result.err.count("\n") == 4
    assert result.err.startswith("the service did not answer: of the other tasks only the text was checked\n")
    result = await cli("submit", lines(tmp_path / "p.jsonl", '{\n  "environment": "shell",\n  "data": {},\n}'))
    assert result.err.startswith(f"rollyard: {tmp_path}/p.jsonl:4: this is not JSON (") and result.err.count("\n") == 1
    result = await cli("submit", lines(tmp_path / "l.jsonl", "[", '{"environment": "shell"}', "]"))
    assert "l.jsonl:1: this is a list — nothing was submitted. Write one task per line: jq -c '.[]' " in result.err
    result = await cli("submit", lines(tmp_path / "o.jsonl", '[{"environment": "shell"}, {"environment": "math"}]'))
    assert "o.jsonl:1: this is a list — nothing was submitted. Write one task per line: jq -c '.[]' " in result.err


async def test_a_missing_or_empty_file_is_reported(cli: Cli, tmp_path: Path):
    result = await cli("submit", tmp_path / "nowhere.jsonl")
    assert result.status == 1 and "nowhere.jsonl cannot be read: No such file" in result.err
    assert "there is no task in" in (await cli("submit", lines(tmp_path / "e.jsonl", "// nothing"))).err


async def test_a_rollout_without_a_reward_gives_status_1(cli: Cli, service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task(), {**task(), "data": {**task()["data"], "setup": ["echo [/x]; exit 3"]}})
    result = await cli("submit", file, "--id-prefix", "bad")
    assert result.status == 1
    assert "failed (setup_failed)" in result.out
    shown = await cli("rollouts", "show", "bad-1")  # its detail looks like markup
    assert shown.status == 0 and "blame: task" in shown.out


async def test_a_policy_creates_a_run_of_its_name(cli: Cli, service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task())
    result = await cli("submit", file, "--policy", "actor", "--no-wait", "--json")
    assert result.json[0]["run"] == "actor"
    again = await cli("submit", file, "--run", "actor", "--policy", "critic", "--no-wait")
    assert again.status == 1 and "run actor has policy actor, not critic" in again.err


async def test_an_interrupt_prints_how_to_continue(service: RunningService, tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task("NEVER"))
    async with asyncio.timeout(90), command(service, "submit", file, "--id-prefix", "stopped") as process:
        assert process.stderr is not None
        assert b"1 rollout submitted" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stderr = (await process.stderr.read()).decode()
        assert await process.wait() == 130
    assert "--id-prefix stopped" in stderr and "Traceback" not in stderr


def test_a_byte_order_mark_is_not_part_of_a_task(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(task()) + "\n" + json.dumps(task()) + "\n", "utf-8-sig")
    assert [line.task for line in read_tasks([str(file)])] == [task(), task()]


async def test_a_stage_without_slots_is_reported(tmp_path: Path):
    file = lines(tmp_path / "t.jsonl", task())
    async with served(tmp_path) as service, AsyncClient(service.url, service.token) as client, asyncio.timeout(120):
        await client.resize_pools(init=0)
        async with command(service, "submit", file) as process:
            assert process.stderr is not None
            said = b""
            while b"no slots" not in said:
                said = await process.stderr.readline()
            assert said.startswith(
                b"rollyard: the service has no slots for init: rollouts wait there until `rollyard po"
            )
            await client.resize_pools(init=4)
            assert await process.wait() == 0


async def test_progress_shows_the_states_and_a_service_that_is_gone_and_back(tmp_path: Path):
    port, file = free_port(), lines(tmp_path / "t.jsonl", task("NEVER"))
    async with AsyncExitStack() as stack, asyncio.timeout(120):
        async with served(tmp_path / "service", port=port, drain_s=0.0) as service:
            process = await stack.enter_async_context(command(service, "submit", file))
            assert process.stderr is not None
            assert b"1 rollout submitted" in await process.stderr.readline()
            assert await process.stderr.readline() == b"0 of 1 ended; run 1\n", "as the service lists it"
        assert await process.stderr.readline() == b"rollyard: the service does not answer; waiting for it\n"
        await stack.enter_async_context(served(tmp_path / "service", port=port, drain_s=0.0))
        assert await process.stderr.readline() == b"rollyard: the service answers again\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
