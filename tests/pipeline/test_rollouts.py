"""The way of one rollout, and every way it can end, with real parts."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.core import Blame, Mode, Outcome, Run, State
from rollyard.core.failure import QueueFull
from rollyard.engines import RouterSettings
from rollyard.testing.script import Reply
from rollyard.tokens import verify
from tests.pipeline.site import SETTINGS, finish, quick, says, shell, shell_task, site

DO_IT = says(shell("touch done"), finish())


async def test_a_rollout_goes_through_all_stages_and_leaves_a_proven_trajectory(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        rollout = await yard.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0
        assert rollout.ending.is_trainable
        assert rollout.ending.summary.turns == 2
        assert rollout.ending.summary.ended_by == "finish"
        trajectory = await yard.store.trajectory(rollout.id)
        assert trajectory is not None
        verify(trajectory)
        (trace,) = trajectory.traces
        assert len(trace.spans) == 2
        assert trace.sampled_tokens == rollout.ending.summary.sampled_tokens
        sent = [call.prompt_ids for call in yard.engines[0].requests if call.session_id == rollout.id]
        assert [list(prompt) for prompt in sent] == [list(trace.token_ids[: span.start]) for span in trace.spans]
        yard.nothing_left()


async def test_what_the_agent_did_not_do_scores_less_and_is_still_completed(tmp_path: Path):
    async with site(tmp_path, says(finish())) as yard:
        rollout = await yard.rolled(shell_task(checks=["test -f done", "true"]))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 0.5


async def test_eval_sees_the_workspace_but_no_process_of_run(tmp_path: Path):
    daemon = "touch done; setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 & echo started"
    async with site(tmp_path, says(shell(daemon), finish())) as yard:
        checks = ["test -f done", "! ps ax | grep -v grep | grep -q 'while :'"]
        rollout = await yard.rolled(shell_task(checks=checks))
        assert rollout.ending is not None
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0, rollout.ending


async def test_a_malformed_tool_call_is_an_observation_not_an_end(tmp_path: Path):
    script = says("<tool_call>\n{nonsense\n</tool_call>", shell("touch done"), finish())
    async with site(tmp_path, script) as yard:
        rollout = await yard.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.summary.turns == 3


async def test_a_turn_limit_truncates_and_is_scored_and_trained_on(tmp_path: Path):
    async with site(tmp_path, says(shell("touch done"))) as yard:
        rollout = await yard.rolled(quick(shell_task(), max_turns=3))
        ending = rollout.ending
        assert ending is not None
        assert (ending.outcome, ending.is_trainable) == (Outcome.TRUNCATED, True)
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("turn_limit", Blame.POLICY)
        assert ending.score is not None
        assert ending.score.reward == 1.0


@pytest.mark.parametrize("may_train", [False, True])
async def test_when_runs_deadline_fires_the_tokens_are_kept_and_eval_still_runs(tmp_path: Path, may_train: bool):
    script = says(shell("touch done"), shell("sleep 60"))
    run = Run("run", trainable_on_deadline=may_train)
    async with site(tmp_path, script, run=run) as yard:
        rollout = await yard.rolled(quick(shell_task(), run_s=1.5, tool_s=30))
        ending = rollout.ending
        assert ending is not None
        assert ending.outcome is Outcome.TRUNCATED
        assert ending.failure is not None
        assert ending.failure.code == "run_deadline"
        assert ending.is_trainable is may_train
        assert ending.score is not None
        assert ending.score.reward == 1.0
        trajectory = await yard.store.trajectory(rollout.id)
        assert trajectory is not None
        assert len(trajectory.traces[0].spans) == 2
        yard.nothing_left()


async def test_tokens_of_the_call_that_the_deadline_cut_are_in_the_trace(tmp_path: Path):
    script = says(Reply(text="word " * 200, stall_after=7))
    async with site(tmp_path, script) as yard:
        rollout = await yard.rolled(quick(shell_task(), run_s=1.0))
        trajectory = await yard.store.trajectory(rollout.id)
        assert trajectory is not None
        (span,) = trajectory.traces[0].spans
        assert span.end - span.start == 7
        assert span.finish_reason == "abort"


async def test_a_check_that_never_ends_is_tried_twice_then_scores_as_failing(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        rollout = await yard.rolled(quick(shell_task(checks=["sleep 1000"]), eval_s=0.5))
        ending = rollout.ending
        assert ending is not None
        assert ending.outcome is Outcome.FAILED
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("eval_deadline", Blame.POLICY)
        assert ending.score is not None
        assert ending.score.reward == 0.0
        assert any("tried again" in note for note in ending.summary.notes)
        yard.nothing_left()


async def test_a_task_whose_setup_fails_ends_once_with_blame_task_and_no_reward(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        rollout = await yard.rolled(shell_task(setup=["echo broken >&2; exit 3"]))
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("setup_failed", Blame.TASK)
        assert "broken" in ending.failure.detail
        assert ending.score is None
        assert rollout.attempt == 1
        yard.nothing_left()


async def test_a_setup_that_never_ends_is_the_tasks_fault(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        rollout = await yard.rolled(quick(shell_task(setup=["sleep 1000"]), init_s=0.5))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert rollout.ending.failure.code == "setup_deadline"
        yard.nothing_left()


async def test_an_engine_that_lies_about_logprobs_fails_the_rollout_without_a_reward(tmp_path: Path):
    script = says(Reply(text="hello", fault="fewer_logprobs"))
    settings = replace(SETTINGS, max_attempts=2)
    async with site(tmp_path, script, settings=settings, router_settings=RouterSettings(engine_wait_s=0.5)) as yard:
        rollout = await yard.rolled(shell_task())
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert ending.failure.blame is Blame.INFRA
        assert ending.score is None
        assert not ending.is_trainable
        assert rollout.attempt == 2
        assert [lost.code for lost in rollout.lost] == ["engine_broken"]
        yard.nothing_left()


async def test_a_sandbox_that_is_killed_from_outside_costs_an_attempt_not_a_reward(tmp_path: Path):
    script = says(shell("test -f /workspace/first || sleep 30; touch done"), finish())
    async with site(tmp_path, script) as yard:
        rollout_id = await yard.submit(shell_task(setup=["true"]))
        await yard.until(rollout_id, State.RUN)
        (keeper,) = yard.runtime._keepers.values()
        os.kill(keeper.pid, signal.SIGKILL)
        await yard.until(rollout_id, State.QUEUED, attempt=2)
        lost = (await yard.store.get(rollout_id)).lost
        assert [entry.code for entry in lost] == ["sandbox_lost"]
        await yard.yard.cancel(rollout_id)
        await yard.ended(rollout_id)


async def test_a_policy_that_ends_its_own_sandbox_gets_the_failing_score(tmp_path: Path):
    script = says(shell("touch done"), shell("kill -9 -1"), finish())
    async with site(tmp_path, script) as yard:
        rollout = await yard.rolled(shell_task())
        ending = rollout.ending
        assert ending is not None
        assert rollout.attempt == 1
        assert ending.score is not None
        if ending.failure is not None:  # where kill -9 -1 reaches the idle process, the sandbox is gone
            assert ending.failure.blame is Blame.POLICY
        yard.nothing_left()


async def test_an_eval_run_is_never_trained_on(tmp_path: Path):
    async with site(tmp_path, DO_IT, run=Run("run", mode=Mode.EVAL)) as yard:
        rollout = await yard.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.score is not None
        assert not rollout.ending.is_trainable


async def test_a_stalled_rollout_is_ended_by_the_watch(tmp_path: Path):
    settings = replace(SETTINGS, max_attempts=1)
    async with site(tmp_path, says(shell("sleep 60")), settings=settings) as yard:
        rollout = await yard.rolled(quick(shell_task(), stall_s=0.5, tool_s=60))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.score) == ("stalled", None)
        yard.nothing_left()


async def test_time_while_the_policy_is_paused_does_not_count(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        await yard.router.pause("default")
        rollout_id = await yard.submit(quick(shell_task(), run_s=1.0, stall_s=1.0))
        await yard.until(rollout_id, State.RUN)
        await asyncio.sleep(1.5)
        assert rollout_id in yard.yard.live
        yard.router.resume("default")
        rollout = await yard.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED


async def test_a_full_queue_refuses_and_keeps_nothing_of_the_call(tmp_path: Path):
    async with site(tmp_path, DO_IT, settings=replace(SETTINGS, init_slots=0, max_queued=2)) as yard:
        first = await yard.submit(shell_task())
        await yard.submit(shell_task())
        with pytest.raises(QueueFull):
            await yard.submit(shell_task(), "third")
        await yard.yard.cancel(first)
        await yard.submit(shell_task(), "third")


async def test_rescoring_appends_and_leaves_the_terminal_record_alone(tmp_path: Path):
    async with site(tmp_path, DO_IT) as yard:
        rollout = await yard.rolled(shell_task())
        again = await yard.yard.rescore(rollout.id)
        assert again.ending == rollout.ending
        assert [score["reward"] for score in again.scores] == [1.0]
        yard.nothing_left()
