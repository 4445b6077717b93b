"""The blame for killed processes: a kill by the host costs a try, never a reward."""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest

from rollyard.core import Outcome
from rollyard.core.failure import ArtifactLost
from rollyard.envs.base import ArtifactRule
from rollyard.pipeline.artifacts import ArtifactFolder
from rollyard.sandbox import BubblewrapRuntime, SandboxSpec
from rollyard.sandbox.launched_sandbox import LaunchedSandbox
from rollyard.testing.sandbox_conformance import alive, eventually, marked
from tests.pipeline.site import finish, open_site, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


def waits(mark: str) -> str:
    """A command that waits for a signal of the host and ends with status 0 at SIGTERM."""
    return f"sh -c 'trap \"exit 0\" TERM; while :; do sleep 0.05; done' {mark}"


def ready(mark: str) -> list[int]:
    """Returns the processes with this mark that have set their trap; before that, SIGTERM just ends them."""
    return [pid for pid in alive(mark) if caught(pid) >> (signal.SIGTERM - 1) & 1]


def caught(pid: int) -> int:
    """Returns the mask of the signals that a process handles; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return 0


async def sent(mark: str, number: signal.Signals) -> None:
    """Sends the signal to the process with this mark, once it runs."""
    await eventually(lambda: bool(ready(mark)), f"{mark} runs")
    for pid in ready(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    await eventually(lambda: not alive(mark), f"{mark} is gone")


@pytest.mark.parametrize("rest", ["", "; exit $?"], ids=["the command", "what its shell ran"])
async def test_a_check_that_the_host_kills_is_run_again(tmp_path: Path, rest: str):
    mark = marked()
    async with open_site(tmp_path, DO_IT) as site:
        rollout_id = await site.submit(shell_task(checks=["test -f done", waits(mark) + rest]))
        await sent(mark, signal.SIGKILL)
        await sent(mark, signal.SIGTERM)
        ending = (await site.ended(rollout_id)).ending
        assert ending is not None and ending.score is not None
        assert (ending.outcome, ending.score.reward) == (Outcome.COMPLETED, 1.0)
        assert any("EVAL was tried again: a verifier command was killed" in note for note in ending.summary.notes)


async def test_a_check_killed_while_rescoring_is_run_again(tmp_path: Path):
    mark = marked()
    async with open_site(tmp_path, DO_IT) as site:
        rollout_id = await site.submit(shell_task(checks=["test -f done", waits(mark)]))
        await sent(mark, signal.SIGTERM)
        await site.ended(rollout_id)
        again = asyncio.ensure_future(site.pipeline.rescore(rollout_id))
        await sent(mark, signal.SIGKILL)
        await sent(mark, signal.SIGTERM)
        assert [score["reward"] for score in (await again).scores] == [1.0]


async def test_a_check_that_is_killed_in_every_try_counts(tmp_path: Path):
    """Otherwise a policy whose code kills the checks would have no reward instead of a bad one."""
    async with open_site(tmp_path, DO_IT) as site:
        ending = (await site.rolled(shell_task(checks=["test -f done", "kill -9 $$"]))).ending
        assert ending is not None and ending.score is not None
        assert (ending.outcome, ending.score.reward) == (Outcome.COMPLETED, 0.5)
        assert ending.is_trainable


@pytest.mark.parametrize("files", [{}, {"shared.txt": "by a layer"}], ids=["own", "shared"])
async def test_a_set_up_that_the_host_kills_is_retried_and_its_failure_is_not_remembered(
    tmp_path: Path, files: dict[str, str]
):
    mark = marked()
    async with open_site(tmp_path, DO_IT) as site:
        rollout_id = await site.submit(shell_task(setup=[waits(mark)], files=files))
        await sent(mark, signal.SIGKILL)
        await sent(mark, signal.SIGTERM)
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED, rollout.ending
        assert [(lost.code, lost.stage) for lost in rollout.lost] == [("sandbox_lost", "init")]
        assert "killed from outside" in rollout.lost[0].detail


async def test_a_process_killed_by_the_hosts_oom_killer_fails_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In RUN, whatever the model did next, and in EVAL, whatever the check returned."""
    looks: dict[str, int] = {}  # reads by sandbox, in order of start

    def host_kills(sandbox: LaunchedSandbox) -> int:
        looks[sandbox.id] = looks.get(sandbox.id, 0) + 1
        number = list(looks).index(sandbox.id)
        return int((number == 0 and looks[sandbox.id] > 2) or number == 2)  # in RUN, after its INIT; in the first EVAL

    monkeypatch.setattr(LaunchedSandbox, "host_kills", property(host_kills))
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task(checks=["test -f done"]))
        assert rollout.ending is not None and rollout.ending.score is not None, rollout.ending
        assert (rollout.attempt, rollout.ending.score.reward) == (2, 1.0)
        assert [(lost.code, lost.stage) for lost in rollout.lost] == [("sandbox_lost", "run")]
        assert "short of memory" in rollout.lost[0].detail
        assert any("EVAL was tried again: sandbox_lost" in note for note in rollout.ending.summary.notes)


async def test_a_deleted_artifacts_folder_is_not_a_missing_file_of_the_agent(tmp_path: Path):
    folder = ArtifactFolder(tmp_path / "artifacts")
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
        download = sandbox.download

        async def delete_and_download(path: str, target: Path, *, limit_bytes: int) -> object:
            shutil.rmtree(folder.root)
            return await download(path, target, limit_bytes=limit_bytes)

        sandbox.download = delete_and_download  # type: ignore[method-assign, assignment]
        with pytest.raises(ArtifactLost, match="the folder to download to is gone"):
            await folder.save(sandbox, [ArtifactRule("workspace", "/workspace")], "r1", 1)
