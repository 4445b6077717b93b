"""Commands that show and change a service."""

import asyncio
from pathlib import Path

import orjson
import pytest

from rollyard.cli.commands.engines import engine_problems
from rollyard.cli.commands.rollouts import _text_of
from rollyard.client import AsyncClient
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.conftest import Cli
from tests.client.served import RunningService, task

pytestmark = pytest.mark.slow


@pytest.fixture
async def ended(service: RunningService) -> str:
    """A rollout that has ended, with reward 1."""
    async with AsyncClient(service.url, service.token) as client:
        await client.submit([task()], ids=["one"])
        await client.wait("one", timeout_s=30)
    return "one"


async def test_rollouts_are_listed_newest_first(cli: Cli, service: RunningService, ended: str):
    result = await cli("rollouts", "list", "--state", "ended", "--json")
    assert [record["id"] for record in result.json] == [ended]
    assert "completed" in (await cli("rollouts", "list")).out
    async with AsyncClient(service.url, service.token) as client:
        await client.submit([task()], ids=["two"])
        await client.wait("two", timeout_s=30)
    first = await cli("rollouts", "list", "--state", "ended", "--limit", "1")
    assert first.out.splitlines()[0].split() == [
        *("id", "run", "task", "state"),
        *("reward", "turns", "tokens", "time"),
    ]
    assert first.out.splitlines()[1].split()[:6] == ["two", "default", "shell:", "Write", "done.", "completed"]
    assert "there may be more: --after en:2" in first.err
    second = await cli("rollouts", "list", "--state", "ended", "--after", "en:2", "--json")
    assert [record["id"] for record in second.json] == [ended]
    oldest = await cli("rollouts", "list", "--oldest", "--json")
    assert [record["id"] for record in oldest.json] == [ended, "two"]
    assert all(line == line.rstrip() for line in first.out.splitlines()), "a table in a pipe is not padded"
    assert (await cli("rollouts", "list", "--state", "lost")).status == 1


async def test_a_submit_without_an_engine_says_so_at_once(cli: Cli, service: RunningService, tmp_path: Path):
    assert (await cli("engines", "clear")).status == 0
    (tmp_path / "task.json").write_text(orjson.dumps(task()).decode())
    result = await cli("submit", tmp_path / "task.json", "--no-wait")
    assert "no engine serves policy default: add one with `rollyard engines add URL`; the rollouts wait" in result.err
    shown = await cli("top", "--once")
    assert "no engine serves policy default: add one with" in shown.out


async def test_the_error_of_an_engine_is_shown_until_it_is_up_again(cli: Cli, service: RunningService):
    async with AsyncClient(service.url, service.token) as client:
        service.engine.is_healthy = False
        async with asyncio.timeout(60):
            while (await client.engines())[0]["state"] == "up":
                await asyncio.sleep(0.05)
        down = await cli("engines", "list")
        assert [line for line in down.out.splitlines() if line.startswith("engine e0: ")], down.out
        service.engine.is_healthy = True
        async with asyncio.timeout(60):
            while (engine := (await client.engines())[0])["state"] != "up":
                await asyncio.sleep(0.05)
    assert engine["last_error"], "it is kept for the record"
    assert "engine e0: " not in (await cli("engines", "list")).out


@pytest.mark.parametrize("calls", ["ls", ["ls"], {"name": "ls"}, [{"function": "ls"}], [{"function": {}}], 7])
def test_tool_calls_of_any_format_are_shown(calls: object):
    assert _text_of({"role": "assistant", "content": None, "tool_calls": calls}).startswith("→ ")


def test_an_error_that_names_its_engine_is_shown_as_it_is():
    down = {"state": "down", "last_error": "engine e0 cannot be reached: Connection refused"}
    assert engine_problems([{"id": "e0", **down}]) == [down["last_error"]]
    assert engine_problems([{"id": "e1", **down}]) == [f"engine e1: {down['last_error']}"]


async def test_pools_are_listed_and_resized(cli: Cli, service: RunningService):
    result = await cli("pools", "resize", "--run", "7", "--json")
    assert result.status == 0 and result.json[0]["run"]["size"] == 7
    listed = await cli("pools", "list")
    assert [line.split()[:2] for line in listed.out.splitlines() if "run" in line] == [["run", "7"]]
    without_size = await cli("pools", "resize")
    assert without_size.status == 2 and "give --init, --ready, --run, --eval or --live" in without_size.err
    assert (await cli("pools", "resize", "--run", "-1")).status == 2


async def test_a_rollout_is_shown_with_its_messages(cli: Cli, ended: str):
    result = await cli("rollouts", "show", ended, "--messages")
    assert "→ ()" not in result.out  # of messages without a call
    assert result.status == 0 and "Write done." in result.out and "completed" in result.out
    assert "limits_in_force (memory " in result.out and "{'" not in result.out
    assert '→ shell {"command": "echo hello > done"}' in result.out
    assert (await cli("rollouts", "show", ended, "--json")).json[0]["reward"] == 1.0
    missing = await cli("rollouts", "show", "nowhere")
    assert missing.status == 1 and "nowhere" in missing.err


async def test_control_characters_of_a_model_do_not_reach_the_terminal(cli: Cli, service: RunningService):
    service.engine.script = lambda turn: "\x1b]52;c;ZXZpbA==\x07 and \u202etxt.exe \x9b2J"
    async with AsyncClient(service.url, service.token) as client:
        await client.submit([{**task(), "limits": {"max_turns": 1}}], ids=["one"])
        await client.wait("one", timeout_s=30)
    result = await cli("rollouts", "show", "one", "--messages")
    assert not set("\x1b\x07\u202e\x9b") & set(result.out)
    assert "\\x1b]52;c;ZXZpbA==\\x07 and \\u202etxt.exe \\x9b2J" in result.out


async def test_traces_are_shown_and_written(cli: Cli, ended: str, tmp_path: Path):
    result = await cli("rollouts", "traces", ended)
    assert result.status == 0 and "yes" in result.out
    (trace,) = (await cli("rollouts", "traces", ended, "--json")).json
    assert len(trace["token_ids"]) == len(trace["mask"])
    assert (await cli("rollouts", "traces", ended, "--out", tmp_path / "t.arrow")).status == 0
    assert (tmp_path / "t.arrow").stat().st_size > 0


async def test_rollouts_are_rescored_and_cancelled(cli: Cli, ended: str):
    assert (await cli("rollouts", "rescore", ended)).out == "one: 1 (originally: 1)\n"
    result = await cli("rollouts", "cancel", ended, "never-was", "--json")
    assert result.json == [{"id": "one", "state": "ended"}, {"id": "never-was", "state": "cancelled_before_submit"}]


async def test_engines_are_added_and_removed(cli: Cli, service: RunningService):
    assert "e0" in (await cli("engines", "list")).out
    added = await cli("engines", "add", service.engine.url, "--id", "e1", "--tokenizer", tokenizer_dir(), "--json")
    assert (added.json[0]["id"], added.json[0]["state"]) == ("e1", "up")
    again = await cli("engines", "add", service.engine.url, "--id", "e1", "--tokenizer", tokenizer_dir())
    assert again.status == 1 and "e1" in again.err
    assert (await cli("engines", "remove", "e1")).status == 0
    assert (await cli("engines", "remove", "e1")).status == 1
    assert (await cli("engines", "clear", "--json")).json == [{"cleared": True}]
    assert "there is no engine" in (await cli("engines", "list")).err


async def test_runs_are_created_listed_and_deleted(cli: Cli, service: RunningService):
    masked = await cli("runs", "create", "m", "--mask-truncated", "--overlong-penalty", "10:20:0.5", "--json")
    assert masked.json[0]["mask_truncated"] is True
    assert masked.json[0]["overlong_penalty"] == {"from_tokens": 10, "to_tokens": 20, "most": 0.5}
    await cli("runs", "delete", "m")
    result = await cli("runs", "create", "r", "--seed", "7", "--defaults", '{"limits": {"max_turns": 3}}', "--json")
    assert (result.json[0]["seed"], result.json[0]["defaults"]) == (7, {"limits": {"max_turns": 3}})
    assert "r " in (await cli("runs", "list")).out
    assert (await cli("runs", "delete", "r")).err == "r is deleted\n"
    assert (await cli("runs", "delete", "r")).status == 1


async def test_top_shows_one_frame(cli: Cli, service: RunningService, ended: str):
    result = await cli("top", "--once")
    assert result.status == 0
    for word in ("queue", "init", "ready", "run", "eval", "ended 1", "e0", "turns/s", service.url):
        assert word in result.out, word
    (status,) = (await cli("top", "--once", "--json")).json
    assert status["states"]["ended"] == 1 and set(status["rates"]) == {"turns_per_s", "tokens_per_s", "rollouts_per_s"}


async def test_top_runs_until_it_is_interrupted(service: RunningService):
    import json
    import os
    import signal
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "top", "--json", "--interval", "0.1",
        env={**os.environ, **service.environ()}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(90):
        await process.stdout.readline()
        async with AsyncClient(service.url, service.token) as client:
            rate, shown, count = None, 0, 0
            while not rate:  # `top` forgets its counts when an answer takes a second: the next rollout shows a rate
                (record,) = await client.submit([task()])
                await client.wait(record.id)
                count += 1
                while not rate and shown < count:
                    frame = json.loads(await process.stdout.readline())
                    rate, shown = frame["rates"]["rollouts_per_s"], frame["states"].get("ended", 0)
        process.send_signal(signal.SIGINT)
        await process.stdout.read()
        assert await process.wait() == 0
