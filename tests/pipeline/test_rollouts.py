"""One rollout through the stages, and every way in which it can end, with real parts."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.agents.base import AgentContext
from rollyard.core import AgentSpec, Blame, Message, Mode, Outcome, Run, Score, State, Task, Trajectory
from rollyard.core.failure import Gone, JudgeUnreachable, QueueFull
from rollyard.engines import EngineSpec, Kind, RouterSettings
from rollyard.envs.base import EnvContext, Environment, Evidence, Plan, Start
from rollyard.envs.registry import Environments
from rollyard.pipeline import Handler
from rollyard.pipeline.attempts import stages
from rollyard.sandbox.breaker import FAILURES
from rollyard.store.sql import sql_store
from rollyard.testing.script import FolderTokenizer, Reply
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import verify
from tests.pipeline.site import SETTINGS, finish, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def test_a_rollout_goes_through_all_stages_and_leaves_a_verified_trajectory(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0
        assert rollout.ending.is_trainable
        assert rollout.ending.summary.turns == 2
        assert rollout.ending.summary.ended_by == "finish"
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        verify(trajectory)
        (trace,) = trajectory.traces
        assert len(trace.spans) == 2
        assert trace.sampled_tokens == rollout.ending.summary.sampled_tokens
        sent = [call.prompt_ids for call in site.engines[0].requests if call.session_id == rollout.id]
        assert [list(prompt) for prompt in sent] == [list(trace.token_ids[: span.start]) for span in trace.spans]
        site.nothing_left()


async def test_a_trajectory_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    encode, written = sql_store.encode_trajectory, list[str]()

    def counted(trajectory: Trajectory) -> bytearray:
        written.append(trajectory.rollout_id)
        return encode(trajectory)

    monkeypatch.setattr(sql_store, "encode_trajectory", counted)
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED
        assert await site.store.trajectory(rollout.id) is not None
        assert written == [rollout.id]  # at the end of RUN, and not again with the terminal record


async def test_an_unsolved_task_scores_less_and_is_still_completed(tmp_path: Path):
    async with open_site(tmp_path, says(finish())) as site:
        rollout = await site.rolled(shell_task(checks=["test -f done", "true"]))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 0.5


async def test_eval_sees_the_workspace_but_no_process_of_run(tmp_path: Path):
    daemon = "touch done; setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 & echo started"
    async with open_site(tmp_path, says(shell(daemon), finish())) as site:
        checks = ["test -f done", "! ps ax | grep -v grep | grep -q 'while :'"]
        rollout = await site.rolled(shell_task(checks=checks))
        assert rollout.ending is not None
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0, rollout.ending


async def test_a_malformed_tool_call_is_an_observation_not_an_end(tmp_path: Path):
    script = says("<tool_call>\n{nonsense\n</tool_call>", shell("touch done"), finish())
    async with open_site(tmp_path, script) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.summary.turns == 3


async def test_a_turn_limit_truncates_and_is_scored_and_trained_on(tmp_path: Path):
    async with open_site(tmp_path, says(shell("touch done"))) as site:
        rollout = await site.rolled(quick(shell_task(), max_turns=3))
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
    async with open_site(tmp_path, script, run=run) as site:
        rollout = await site.rolled(quick(shell_task(), run_s=4.0, tool_s=30))
        ending = rollout.ending
        assert ending is not None
        assert ending.outcome is Outcome.TRUNCATED
        assert ending.failure is not None
        assert ending.failure.code == "run_deadline"
        assert ending.is_trainable is may_train
        assert ending.score is not None
        assert ending.score.reward == 1.0
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        assert len(trajectory.traces[0].spans) == 2
        site.nothing_left()


async def test_tokens_of_the_call_that_the_deadline_cut_are_in_the_trace(tmp_path: Path):
    script = says(Reply(text="word " * 200, stall_after=7))
    async with open_site(tmp_path, script) as site:
        rollout = await site.rolled(quick(shell_task(), run_s=3.0))
        trajectory = await site.store.trajectory(rollout.id)
        assert trajectory is not None
        (span,) = trajectory.traces[0].spans
        assert span.end - span.start == 7
        assert span.finish_reason == "abort"


async def test_a_model_that_samples_nothing_in_run_is_an_infrastructure_failure(tmp_path: Path):
    script = says(Reply(text="x", latency_s=60.0))
    async with open_site(tmp_path, script, settings=replace(SETTINGS, max_attempts=1)) as site:
        rollout = await site.rolled(quick(shell_task(), run_s=0.5))
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("engine_timeout", Blame.INFRA)
        assert ending.score is None
        site.nothing_left()


async def test_a_check_that_never_ends_is_tried_twice_and_then_gets_the_failing_score(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(quick(shell_task(checks=["sleep 1000"]), eval_s=3.0))
        ending = rollout.ending
        assert ending is not None
        assert ending.outcome is Outcome.FAILED
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("eval_deadline", Blame.POLICY)
        assert ending.score is not None
        assert ending.score.reward == 0.0
        assert any("tried again" in note for note in ending.summary.notes)
        site.nothing_left()


async def test_a_task_whose_setup_fails_ends_once_with_blame_task_and_no_reward(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task(setup=["echo broken >&2; exit 3"]))
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("setup_failed", Blame.TASK)
        assert "broken" in ending.failure.detail
        assert ending.score is None
        assert rollout.attempt == 1
        site.nothing_left()


async def test_a_setup_that_never_ends_has_blame_task(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(quick(shell_task(setup=["sleep 1000"]), init_s=3.0))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert rollout.ending.failure.code == "setup_deadline"
        site.nothing_left()


async def test_an_engine_that_lies_about_logprobs_fails_the_rollout_without_a_reward(tmp_path: Path):
    script = says(Reply(text="hello", fault="fewer_logprobs"))
    settings = replace(SETTINGS, max_attempts=2)
    async with open_site(
        tmp_path, script, settings=settings, router_settings=RouterSettings(engine_wait_s=0.5)
    ) as site:
        rollout = await site.rolled(shell_task())
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert ending.failure.blame is Blame.INFRA
        assert ending.score is None
        assert not ending.is_trainable
        assert rollout.attempt == 2
        assert [lost.code for lost in rollout.lost] == ["engine_broken"]
        site.nothing_left()


async def test_a_broken_engine_is_not_tried_again_and_another_one_is_used(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, engines=2) as site:
        site.engines[0].script = lambda _: Reply(fault=500)
        for _ in range(2):  # the least loaded of two idle engines is either
            rollout = await site.rolled(shell_task())
            assert rollout.ending is not None
            assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
            assert rollout.ending.summary.engine == "e1"
        site.nothing_left()


async def test_a_sandbox_that_is_killed_from_outside_costs_an_attempt_not_a_reward(tmp_path: Path):
    script = says(shell("test -f /workspace/first || sleep 30; touch done"), finish())
    async with open_site(tmp_path, script) as site:
        rollout_id = await site.submit(shell_task(setup=["true"]))
        await site.until(rollout_id, State.RUN)
        (init_client,) = site.runtime._init_clients.values()
        os.kill(init_client.pid, signal.SIGKILL)
        await site.until(rollout_id, State.QUEUED, attempt=2)
        lost = (await site.store.get(rollout_id)).lost
        assert [entry.code for entry in lost] == ["sandbox_lost"]
        await site.pipeline.cancel(rollout_id)
        await site.ended(rollout_id)


async def test_a_sandbox_that_ends_before_the_agent_starts_is_lost_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    open_tools, opened = stages._open_tools, list[object]()

    async def ending_the_first(workspace: stages.Workspace, *others: Any) -> None:
        opened.append(workspace)
        if len(opened) == 1 and workspace.sandbox is not None:
            await workspace.sandbox.exec("kill -9 -1", timeout_s=10.0)
            await workspace.sandbox.exec("sleep 10", timeout_s=10.0)
        await open_tools(workspace, *others)

    monkeypatch.setattr(stages, "_open_tools", ending_the_first)
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None and rollout.ending.outcome is Outcome.COMPLETED, rollout.ending
        assert [(lost.code, lost.stage) for lost in rollout.lost] == [("sandbox_lost", "init")]
        assert "before the agent started" in rollout.lost[0].detail
        site.nothing_left()


async def test_a_policy_that_ends_its_own_sandbox_gets_the_failing_score_and_no_evaluation(tmp_path: Path):
    # The second command observes the end: a `finish` might still save the work of a sandbox that is just ending.
    script = says(shell("touch done"), shell("kill -9 -1"), shell("sleep 30"), finish())
    async with open_site(tmp_path, script) as site:
        rollout = await site.rolled(shell_task())
        ending = rollout.ending
        assert ending is not None
        assert rollout.attempt == 1
        assert ending.failure is not None
        assert (ending.failure.code, ending.failure.blame) == ("sandbox_ended_by_policy", Blame.POLICY)
        assert ending.score == Score(0.0)
        assert ending.is_trainable
        assert 'sandbox_starts_total{runtime="bubblewrap"} 1.0' in site.pipeline.metrics.render()[0].decode()
        site.nothing_left()


async def test_an_eval_run_is_never_trained_on(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, run=Run("run", mode=Mode.EVAL)) as site:
        rollout = await site.rolled(shell_task())
        assert rollout.ending is not None
        assert rollout.ending.score is not None
        assert not rollout.ending.is_trainable


async def test_a_stalled_rollout_is_ended_by_the_watch(tmp_path: Path):
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(tmp_path, says(shell("sleep 60")), settings=settings) as site:
        rollout = await site.rolled(quick(shell_task(), stall_s=0.5, tool_s=60))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.score) == ("stalled", None)
        site.nothing_left()


async def test_time_while_the_policy_is_paused_does_not_count(tmp_path: Path):
    async with open_site(tmp_path, says(Reply(shell("touch done"), latency_s=0.5), finish())) as site:
        rollout_id = await site.submit(quick(shell_task(), run_s=3.0, stall_s=3.0))
        await site.engines[0].busy()
        await site.router.pause("default")
        await asyncio.sleep(3.5)
        assert rollout_id in site.pipeline.live
        site.router.resume("default")
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("pool", "state"), [("run", State.READY), ("eval", State.EVAL)])
async def test_time_in_a_queue_does_not_count(tmp_path: Path, pool: str, state: State):
    settings = replace(SETTINGS, run_slots=0 if pool == "run" else 8, eval_slots=0 if pool == "eval" else 4)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        rollout_id = await site.submit(quick(shell_task(), init_s=20, run_s=3.0, eval_s=3.0, stall_s=3.0))
        await site.until(rollout_id, state)
        await asyncio.sleep(3.5)
        site.pipeline.resize({pool: 1})
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure


async def test_acknowledging_a_rollout_deletes_its_artifacts(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        first, second = await site.rolled(shell_task()), await site.rolled(shell_task())
        assert len(list((tmp_path / "artifacts").glob("*/*"))) == 2
        await site.store.acknowledge("run", f"e:{first.ended_seq}")
        await site.pipeline.sweep()
        assert len(list((tmp_path / "artifacts").glob("*/*"))) == 1
        assert (await site.store.get(first.id)).ending == first.ending, "the record stays"
        assert (await site.pipeline.rescore(second.id)).scores
        with pytest.raises(Gone):
            await site.pipeline.rescore(first.id)


async def test_a_full_queue_refuses_a_submit_and_stores_nothing_of_it(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, init_slots=0, max_queued=2)) as site:
        first = await site.submit(shell_task())
        await site.submit(shell_task())
        with pytest.raises(QueueFull):
            await site.submit(shell_task(), "third")
        await site.pipeline.cancel(first)
        await site.submit(shell_task(), "third")


async def test_concurrent_submits_do_not_overfill_the_queue(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, init_slots=0, max_queued=2)) as site:
        calls = [site.submit(shell_task(), f"r{number}") for number in range(6)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(answer, QueueFull) for answer in answers] == [False, False, True, True, True, True]
        assert len(await site.store.queued()) == 2


async def test_a_repeated_submit_is_queued_once(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, init_slots=0)) as site:
        for _ in range(3):
            await site.submit(shell_task(), "same")
        assert [len(queue.rows) for queue in site.pipeline.scheduler._runs.values()] == [1]
        assert [event.state for event in site.pipeline.event_log._ring if event] == [State.QUEUED], "nothing changed"


async def test_rescoring_appends_and_does_not_change_the_terminal_record(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        again = await site.pipeline.rescore(rollout.id)
        assert again.ending == rollout.ending
        assert [score["reward"] for score in again.scores] == [1.0]
        site.nothing_left()


async def test_eval_waits_for_the_breaker_of_its_runtime(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0, eval_attempts=2)) as site:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.EVAL)
        for _ in range(FAILURES):
            site.pipeline.resources.breakers.failed(site.runtime.name, None, "too many processes")
        site.pipeline.resize({"eval": 1})
        ending = (await site.ended(rollout_id)).ending
        assert ending is not None and ending.score is not None and ending.score.reward == 1.0, ending


async def test_a_long_setup_or_check_is_not_a_stall(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        # Without a model: on a busy machine, a call in RUN may take longer than this bound.
        task = replace(shell_task(setup=["sleep 1.5"], checks=["sleep 1.5"]), agent=AgentSpec("noop"))
        rollout = await site.rolled(quick(task, stall_s=0.5))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.attempt == 1


async def test_an_eval_whose_sandbox_does_not_start_in_time_has_no_reward(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, eval_slots=0, eval_attempts=2)) as site:
        rollout_id = await site.submit(quick(shell_task(), eval_s=0.5))
        await site.until(rollout_id, State.EVAL)
        await site.idle_run()
        async with AsyncExitStack() as stack:  # the host is busy starting other sandboxes
            for _ in range(site.runtime._starting._value):
                await stack.enter_async_context(site.runtime._starting)
            site.pipeline.resize({"eval": 1})
            rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("sandbox_start_failed", Blame.INFRA)
        assert rollout.ending.score is None
        site.nothing_left()


class Idle(Handler):
    """Calls no model; its check never ends."""

    name = "idle"

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def run(self, context: AgentContext, messages: Sequence[Message]) -> str:
        return "stop"

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        await asyncio.sleep(1000)
        raise AssertionError


async def test_without_a_model_call_a_slow_check_is_not_the_policys_fault(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, environments=Environments({"idle": Idle})) as site:
        rollout = await site.rolled(quick(replace(shell_task(), environment="idle"), eval_s=0.2))
        assert rollout.ending is not None
        assert rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("eval_deadline", Blame.TASK)
        assert rollout.ending.score is None


@pytest.mark.parametrize("case", ["init", "run", "eval"])
async def test_the_place_of_a_sandbox_that_cannot_be_proven_gone_stays_taken(tmp_path: Path, case: str):
    settings = replace(SETTINGS, max_attempts=1, eval_attempts=1, eval_slots=0)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        task = shell_task(setup=["exit 3"]) if case == "init" else shell_task()
        never_s, in_time_s = 0.0, site.runtime._kill_s  # no sandbox can be proven gone in 0 s
        site.runtime._kill_s = in_time_s if case == "eval" else never_s
        rollout_id = await site.submit(task)
        if case != "init":
            await site.until(rollout_id, State.EVAL)
            await site.idle_run()
            site.runtime._kill_s = never_s if case == "eval" else in_time_s
        site.pipeline.resize({"eval": 1})
        rollout = await site.ended(rollout_id)
        await site.idle()
        assert site.pipeline.quarantined == 1
        assert rollout.ending is not None
        assert any("had not ended" in note for note in rollout.ending.summary.notes)


class Flaky(Environment):
    """Its checks first fail because of infrastructure, then hang, then succeed."""

    name = "flaky"

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, task: Task) -> Plan:
        return Plan(needs_sandbox=False, eval_needs_sandbox=False)

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "do it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        self.calls += 1
        if self.calls == 1:
            raise JudgeUnreachable("it is not there")
        if self.calls == 2:
            await asyncio.sleep(1000)
        return Score(1.0)


async def test_an_infrastructure_failure_is_not_counted_as_a_slow_check(tmp_path: Path):
    async with open_site(tmp_path, says("hello"), environments=Environments({"flaky": Flaky})) as site:
        rollout = await site.rolled(quick(replace(shell_task(), environment="flaky"), eval_s=0.5))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED, rollout.ending.failure
        assert rollout.ending.score == Score(1.0)


@pytest.mark.parametrize("may_train", [False, True])
async def test_a_slow_check_does_not_make_a_timed_out_rollout_trainable(tmp_path: Path, may_train: bool):
    run = Run("run", trainable_on_deadline=may_train)
    async with open_site(tmp_path, says(shell("sleep 60")), run=run) as site:
        rollout = await site.rolled(quick(shell_task(checks=["sleep 60"]), run_s=3.0, eval_s=3.0, tool_s=30))
        ending = rollout.ending
        assert ending is not None
        assert ending.failure is not None
        assert ending.failure.code == "eval_deadline"
        assert ending.is_trainable is may_train


async def test_after_an_engine_failure_the_next_attempt_uses_another_engine(tmp_path: Path):
    patient = RouterSettings(engine_wait_s=5.0, trip_after=1000)  # the breaker must not cause this
    broken = says(Reply(text="hello", fault="fewer_logprobs"))
    good = ScriptedEngine(says(shell("touch done"), finish()), tokenizer=FolderTokenizer(tokenizer_dir()))
    async with open_site(tmp_path, broken, router_settings=patient) as site, good:
        rollout_id = await site.submit(shell_task())
        await site.until(rollout_id, State.QUEUED, attempt=2)
        site.pipeline.resize({"init": 0})  # the next attempt starts when the other engine is there
        (first,) = site.router.list()
        calls = first.stats.calls
        await site.router.add(EngineSpec("e1", good.url, Kind.VLLM, tokenizer=str(tokenizer_dir())))
        site.pipeline.resize({"init": 1})
        rollout = await site.ended(rollout_id)
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        assert rollout.ending.summary.engine == "e1"
        assert [(lost.code, lost.engine) for lost in rollout.lost] == [("engine_broken", "e0")]
        assert first.stats.calls == calls, "the broken engine was not called again"
