"""A sandbox that ends at a limit: a policy failure with its own code and the failing score; in a set-up, a task
failure."""

from dataclasses import replace
from pathlib import Path

from rollyard.core import Blame, SandboxOptions, Score, Task
from tests.pipeline.site import finish, open_site, says, shell, shell_task

MIB = 1 << 20
FILL = "head -c 200M /dev/zero > big; sleep 20"
LIMITED = SandboxOptions(disk_bytes=20 * MIB)


def limited(task: Task, options: SandboxOptions = LIMITED) -> Task:
    return replace(task, sandbox=options)


async def test_a_disk_filled_in_run_is_a_policy_failure_with_the_failing_score(tmp_path: Path):
    async with open_site(tmp_path, says(shell(FILL), finish())) as site:
        rollout = await site.rolled(limited(shell_task(checks=["true"])))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("disk_limit", Blame.POLICY)
        assert rollout.ending.score == Score(0.0)
        assert rollout.ending.is_trainable
        assert rollout.attempt == 1
        site.nothing_left()


async def test_a_disk_filled_in_eval_gets_the_failing_score_after_a_second_try(tmp_path: Path):
    async with open_site(tmp_path, says(shell("touch done"), finish())) as site:
        rollout = await site.rolled(limited(shell_task(checks=[FILL])))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.stage) == ("disk_limit", "eval")
        assert rollout.ending.score == Score(0.0)
        assert any("tried again" in note for note in rollout.ending.summary.notes)


async def test_a_disk_filled_by_the_set_up_has_blame_task_and_is_tried_once(tmp_path: Path):
    async with open_site(tmp_path, says(finish())) as site:
        task = limited(shell_task(setup=[FILL]))
        for _ in range(3):
            rollout = await site.rolled(task)
            assert rollout.ending is not None
            failure = rollout.ending.failure
            assert failure is not None
            assert (failure.code, failure.blame, failure.data["code"]) == ("setup_failed", Blame.TASK, "disk_limit")
        assert site.pipeline.resources.layers["bubblewrap"].failed == 1


async def test_too_many_files_created_in_run_are_a_policy_failure(tmp_path: Path):
    fill = "mkdir d; cd d; for n in $(seq 3000); do : > $n; done; sleep 20"
    async with open_site(tmp_path, says(shell(fill), finish())) as site:
        rollout = await site.rolled(limited(shell_task(checks=["true"]), SandboxOptions(files=1000)))
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("file_limit", Blame.POLICY)
        assert "of 1000 files" in rollout.ending.failure.detail
        assert (rollout.ending.score, rollout.ending.summary.limits_in_force["files"]) == (Score(0.0), "watchdog")
        site.nothing_left()
