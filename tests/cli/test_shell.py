"""`rollyard shell`: a person in the task's sandbox, from a pipe and from a real terminal."""

import asyncio
import json
import os
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.client.served import task

pytestmark = pytest.mark.slow

TASK = {
    "environment": "shell",
    "data": {
        "instruction": "Write 42 into answer.txt.",
        "files": {"hint.txt": "forty-two\n"},
        "checks": ["grep -qx 42 answer.txt", {"command": "test ! -e junk", "name": "tidy"}],
    },
}


async def shell(folder: Path, *argv: str, stdin: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "shell", *argv, cwd=folder, env={**os.environ, "HOME": str(folder)},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 50)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "task.json").write_text(json.dumps(TASK, indent=2))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task()) + "\n\n" + json.dumps(TASK) + "\n")
    return tmp_path


@pytest.mark.parametrize("runtime", ["bubblewrap", "local"])
async def test_lines_of_a_pipe_are_commands_and_the_last_status_is_returned(folder: Path, runtime: str):
    status, out, err = await shell(folder, "task.json", "--runtime", runtime, stdin="cat hint.txt\ncd /\n(exit 7)\n")
    assert (status, out) == (7, "forty-two\n")
    assert "Write 42 into answer.txt." in err


async def test_eval_scores_the_result(folder: Path):
    status, out, _ = await shell(
        folder, "tasks.jsonl:3", "--eval", "--json", stdin="echo 42 > answer.txt; touch junk\n"
    )
    assert status == 0
    assert json.loads(out)["reward"] == 0.5
    status, _, err = await shell(folder, "task.json", "--eval", stdin="echo 42 > answer.txt\n")
    assert status == 0 and "reward 1\n" in err and "tidy: 1" in err


@pytest.mark.parametrize("runtime", ["bubblewrap", "local"])
async def test_eval_scores_the_result_in_the_same_sandbox(folder: Path, runtime: str):
    data = {**TASK["data"], "eval": "same", "checks": ["grep -qx 42 answer.txt && grep -q forty hint.txt"]}
    (folder / "same.json").write_text(json.dumps({**TASK, "data": data}))
    argv = ("same.json", "--eval", "--json", "--runtime", runtime)
    status, out, err = await shell(folder, *argv, stdin="echo 42 > answer.txt\n")
    assert status == 0, err
    assert json.loads(out)["reward"] == 1.0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere.json"], "nowhere.json cannot be read"),
        (["tasks.jsonl"], "tasks.jsonl holds more than one task — give its line, e.g. tasks.jsonl:3"),
        (["tasks.jsonl:2"], "tasks.jsonl:2: there is no task on that line"),
        (["task.json", "--runtime", "moon"], "there is no runtime 'moon'"),
        (["bad.json"], "bad.json:1: "),
        (["broken.json"], "exit 3"),
    ],
)
async def test_errors_are_one_line(folder: Path, cli: Cli, argv: list[str], says: str):
    (folder / "bad.json").write_text('{"environment": "shell", "data": {"instruction": 1}}')
    (folder / "broken.json").write_text(json.dumps({**TASK, "data": {**TASK["data"], "setup": ["exit 3"]}}))
    result = await cli("shell", *argv)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("rollyard: ") and says in result.err and "Traceback" not in result.err


async def test_a_terminal_is_connected_to_the_sandbox_and_restored(folder: Path):
    master, slave = os.openpty()
    before = termios.tcgetattr(slave)
    termios.tcsetwinsize(slave, (33, 77))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "shell", "task.json", cwd=folder, stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "HOME": str(folder), "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    output, output_changed = bytearray(), asyncio.Event()

    def read() -> None:
        output.extend(os.read(master, 65_536))
        output_changed.set()

    async def until(text: bytes) -> None:
        while text not in output:
            output_changed.clear()
            await output_changed.wait()

    loop.add_reader(master, read)
    try:
        async with asyncio.timeout(90):
            await until(b"Write 42")
            os.write(master, b"stty size; echo $((6 * 7))-$TERM\n")
            await until(b"33 77")
            await until(b"42-dumb")
            os.write(master, b"exit 5\n")
            assert await process.wait() == 5
        assert termios.tcgetattr(slave) == before
    finally:
        loop.remove_reader(master)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)
        os.close(slave)
