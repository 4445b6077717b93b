"""The wheel without extras, in an empty environment: the client and the remote commands, with few dependencies.

The wheel is built from the source distribution, and compared with the one built from the checkout.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from rollyard import __version__
from tests.client.served import RunningService, task

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
MOST_DISTRIBUTIONS = 24

INSTALL = """
set -eu
program=test
. scripts/common.sh
use_pip_configuration "$1"
uv=$(dirname "$1")/uv
"$1" -m hatchling build -t sdist -t wheel -d "$2/dist" >/dev/null
mkdir "$2/source"
tar -C "$2/source" --strip-components 1 -xf "$2"/dist/*.tar.gz
cd "$2/source"
"$1" -m hatchling build -t wheel -d "$2/again" >/dev/null
cd - >/dev/null
"$uv" venv -q --python "$1" "$2/bare"
"$uv" pip install -q --python "$2/bare/bin/python" -c requirements.lock "$2"/again/*.whl
"""

SYNC = """
import json, sys, rollyard
with rollyard.Client() as client:
    record = client.wait(client.submit([json.loads(sys.argv[1])])[0].id, timeout_s=60)
    (trace,) = client.traces(record.id)
    print(record.reward, len(trace.token_ids) == len(trace.logprobs))
"""

ASYNC = """
import asyncio, json, sys, rollyard
async def main():
    async with rollyard.AsyncClient() as client:
        group = await client.group(json.loads(sys.argv[1]), size=2)
        group = await client.get_group(group.id, wait_s=60, traces=True)
        print(sorted(rollout.reward for rollout in group.rollouts))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which only the wheel is installed."""
    folder = tmp_path_factory.mktemp("bare")
    completed = subprocess.run(
        ["bash", "-c", INSTALL, "-", sys.executable, str(folder)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    return folder / "bare" / "bin" / "python"


async def run(python: Path, *arguments: str, env: dict[str, str] | None = None, home: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        str(python), *arguments, cwd=home, env={"PATH": os.environ["PATH"], "HOME": str(home), **(env or {})},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.timeout(400)
def test_checkout_and_source_distribution_build_the_same_wheel(python: Path):
    folder = python.parents[2]
    (wheel,), (again,) = folder.glob("dist/*.whl"), folder.glob("again/*.whl")
    with ZipFile(wheel) as one, ZipFile(again) as other:
        (record,) = (name for name in one.namelist() if name.endswith(".dist-info/RECORD"))
        assert sorted(one.read(record).split()) == sorted(other.read(record).split()), "files and their digests"
        assert "rollyard/_commit.txt" in one.namelist()
        tracked = subprocess.run(
            ["git", "ls-files", "src/rollyard/web"], cwd=CHECKOUT, capture_output=True, text=True, check=True
        ).stdout.split()
        assert {name.removeprefix("src/") for name in tracked} <= {*one.namelist()}, "the dashboard's files"
        assert {f"src/rollyard/web/{name}" for name in ("index.html", "app.css", "js/main.js")} <= {*tracked}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    argv = [str(python), "-m", "rollyard", "--version"]
    printed = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout
    assert printed == f"rollyard {__version__} (commit {head.stdout[:12]})\n"


@pytest.mark.timeout(400)
def test_the_client_brings_few_distributions(python: Path):
    code = "from importlib.metadata import distributions as d; print(*sorted(each.name for each in d()))"
    names = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rollyard" in names and len(names) <= MOST_DISTRIBUTIONS + 1, names


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("program", "printed"), [(SYNC, "1.0 True\n"), (ASYNC, "[1.0, 1.0]\n")])
async def test_the_client_works_against_a_service(
    python: Path, service: RunningService, tmp_path: Path, program: str, printed: str
):
    result = await run(python, "-c", program, json.dumps(task()), env=service.environ(), home=tmp_path)
    assert result == (0, printed, "")


@pytest.mark.timeout(400)
async def test_remote_commands_work_and_the_others_name_their_extra(
    python: Path, service: RunningService, tmp_path: Path
):
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task()))
    arguments = ("-m", "rollyard", "submit", "tasks.jsonl", "--json")
    status, out, err = await run(python, *arguments, env=service.environ(), home=tmp_path)
    assert status == 0 and json.loads(out)["reward"] == 1.0, err
    (tmp_path / "chat.json").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    status, out, err = await run(
        python, "-m", "rollyard", "view", "chat.json", "--out", "page.html", "--print", home=tmp_path
    )
    assert (status, err) == (0, "") and "hi" in (tmp_path / "page.html").read_text()
    for command in ("serve", "demo --scripted"):
        status, out, err = await run(python, "-m", "rollyard", *command.split(), home=tmp_path)
        assert (status, out) == (1, "") and len(err.splitlines()) == 1
        assert "is not installed — pip install 'rollyard[server]'" in err
    status, out, err = await run(python, "-m", "rollyard", "bench", "shell", home=tmp_path)
    assert (status, out) == (1, "") and "the benchmarks are not part of the installed package" in err
