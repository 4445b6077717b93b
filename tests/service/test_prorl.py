"""ProRL Agent's API, over real HTTP: jobs, their results, the intake, engines, and access."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.core import Score, State, Task
from rollyard.envs import EnvContext, Environment, Environments, Evidence, Plan, Start
from rollyard.envs.base import ArtifactRule
from rollyard.service.prorl import jobs as prorl_jobs
from rollyard.service.server import serve
from rollyard.store import SqliteStore
from rollyard.store.base import Page
from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.prorl_parts import Trainer, as_trained, good, open_trainer, work
from tests.service.site import OTHER, Site, engine_table, finish, open_site, scripted, settings, shell
from tests.service.site import TRAINER as TENANT

pytestmark = pytest.mark.slow

RESULT = {
    *("instance_id", "trajectory_id", "git_patch", "success", "error", "finish", "messages", "tools", "end_properly"),
    *("resolved", "critical_error", "filter", "timing", "reward", "rollyard"),
}
TIMING = {"init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered"}

ADMIN, TRAINER = "admin-token-of-these-tests", "trainer-token-of-these-tests"


def stalled() -> ScriptedEngine:
    """Samples a little in its first turn, and then nothing."""
    return scripted(Reply("thinking about it for ever", stall_after=2, tokens_per_s=1000))


async def test_a_job_runs_and_its_result_has_the_trainers_format(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        answer = await trainer.process(work(trajectory_id=3))
        result = answer.body
        assert answer.status == 200, result
        assert set(result) == RESULT
        assert set(result["timing"]) == TIMING
        assert (result["instance_id"], result["trajectory_id"], result["resolved"]) == ("i1", 3, True)
        assert (result["success"], result["error"], result["critical_error"]) == (True, None, None)
        assert (result["finish"], result["end_properly"], result["filter"]) == (True, True, False)
        assert [message["role"] for message in result["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert result["messages"][1]["tool_calls"][0]["name"] == "shell"
        assert {tool["function"]["name"] for tool in result["tools"]} == {"shell", "finish"}
        timing = result["timing"]
        assert timing["counted_elapsed"] == pytest.approx(
            timing["init_time"] + timing["run_time"] + timing["eval_time"]
        )
        assert timing["timeout_triggered"] is False


async def test_a_results_tokens_are_exactly_the_traces(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        result = (await trainer.process(work(), all_input_ids=True)).body
        rollout = result["rollyard"]["rollout"]
        (trace,) = (await trainer.site.get(f"/v1/rollouts/{rollout}/traces")).body["traces"]
        ids, mask, logprobs = as_trained(result["messages"])
        assert (ids, mask) == (trace["token_ids"], trace["mask"])
        assert logprobs == pytest.approx(trace["logprobs"])
        replies = [message for message in result["messages"] if message["role"] == "assistant"]
        assert [message["input_ids"] for message in replies] == [ids[: span["start"]] for span in trace["spans"]]
        sent = [list(call.prompt_ids) for call in engine.calls]
        assert [message["input_ids"] for message in replies] == sent
        assert trace["trainable"] is True
        brief = (await trainer.process(work(trajectory_id=1))).body["messages"]
        prompts = [message["input_ids"] for message in brief if message["role"] == "assistant"]
        assert prompts[0] == sent[0]
        assert prompts[1] is None


class Patching(Environment):
    """Leaves a patch, as `swe` does."""

    name = "patching"
    tools = ("shell", "finish")

    def plan(self, task: Task) -> Plan:
        return Plan(artifacts=(ArtifactRule("patch", "/workspace/out.txt"),))

    async def init(self, context: EnvContext) -> Start:
        return Start(({"role": "user", "content": "write it"},))

    async def eval(self, context: EnvContext, evidence: Evidence) -> Score:
        return Score(float("patch" in evidence.artifacts))


async def test_the_agents_patch_is_in_the_result(tmp_path: Path) -> None:
    chosen = settings(tmp_path, prorl=True, trainer_tokens=[], prorl_tokenizer=str(tokenizer_dir()))
    environments = Environments({"patching": Patching()})
    async with (
        scripted(*good()) as engine,
        serve(chosen, environments=environments) as served,
        aiohttp.ClientSession() as http,
    ):
        trainer = Trainer(Site(served.url, "", http, served))
        await trainer.post("/add_llm_server", {"address": engine.url})
        await trainer.post("/start")
        answer = await trainer.process({"data_source": "patching", "trajectory_id": 0})
        assert (answer.body["git_patch"], answer.body["resolved"]) == ("good\n", True)


async def test_a_wrong_answer_and_a_limit_of_turns_are_trained_on_with_their_reward(tmp_path: Path) -> None:
    async with scripted(shell("echo bad > out.txt")) as engine, open_trainer(tmp_path, engine) as trainer:
        result = (await trainer.process(work(), max_iterations=2)).body
        assert (result["resolved"], result["reward"], result["error"], result["filter"]) == (False, 0.0, None, False)
        assert (result["finish"], result["end_properly"]) == (False, False)
        assert result["rollyard"]["code"] == "turn_limit"
        assert len([it for it in result["messages"] if it["role"] == "assistant"]) == 2


async def test_an_infrastructure_failure_has_no_reward_and_the_next_call_starts_again(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine, max_attempts=1) as trainer:
        engine.fail_next(2, "fewer_logprobs")
        lost = (await trainer.process(work())).body
        assert (lost["messages"], lost["reward"], lost["resolved"], lost["success"]) == ([], None, False, False)
        assert (lost["critical_error"], lost["filter"]) == ("run", True)
        assert "engine" in lost["error"]
        again = (await trainer.process(work())).body
        assert (again["resolved"], again["error"]) == (True, None)
        assert again["rollyard"]["rollout"] != lost["rollyard"]["rollout"]
        assert (await trainer.process(work())).body["rollyard"] == again["rollyard"]


async def test_a_task_that_cannot_be_set_up_is_reported(tmp_path: Path) -> None:
    async with scripted() as engine, open_trainer(tmp_path, engine) as trainer:
        result = (await trainer.process(work(setup=["exit 3"]))).body
        assert (result["critical_error"], result["messages"], result["reward"]) == ("init", [], None)
        assert result["error"].startswith("setup_failed")


async def test_an_expired_run_deadline_is_a_timeout_and_not_trained_on(tmp_path: Path) -> None:
    async with stalled() as engine, open_trainer(tmp_path, engine) as trainer:
        run = {"id": "prorl", "defaults": {"limits": {"run_s": 0.3}}}
        assert (await trainer.site.post("/v1/runs", run)).status in (200, 201)
        result = (await trainer.process(work())).body
        assert (result["critical_error"], result["filter"]) == ("timeout", True)
        assert result["timing"]["timeout_triggered"] is True
        assert result["error"].startswith("run_deadline")


async def test_the_same_call_again_waits_for_the_same_rollout(tmp_path: Path) -> None:
    slow = scripted(*(Reply(text, latency_s=0.2) for text in good()))
    async with slow as engine, open_trainer(tmp_path, engine) as trainer:
        first, second, other = await asyncio.gather(
            trainer.process(work()), trainer.process(work()), trainer.process(work(trajectory_id=1))
        )
        assert first.body == second.body
        assert other.body["rollyard"]["rollout"] != first.body["rollyard"]["rollout"]
        await trainer.post("/stop")
        await trainer.post("/start")
        later = (await trainer.process(work())).body  # of the next batch: the weights have changed
        assert later["rollyard"]["rollout"] != first.body["rollyard"]["rollout"]


async def test_stop_also_cancels_a_job_that_returns_to_the_queue_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing, missed = SqliteStore.list, list[State]()
    async with scripted(Reply(finish(), latency_s=60.0)) as engine, open_trainer(tmp_path, engine) as trainer:
        job = asyncio.create_task(trainer.process(work()))
        pipeline = trainer.site.served.app_state.pipeline
        async with asyncio.timeout(60):
            while not any(attempt.state is State.RUN for attempt in pipeline.live.values()):
                await asyncio.sleep(0.01)

        async def without_it(self: SqliteStore, **options: Any) -> Page:
            page = await listing(self, **options)
            if options.get("state") is State.RUN and not missed:
                missed.append(State.RUN)
                return Page((), None)
            return page

        monkeypatch.setattr(SqliteStore, "list", without_it)
        await trainer.post("/stop")
        assert missed and not pipeline.live
        assert "stopped" in str((await job).body)


async def test_stop_cancels_every_job_even_if_that_takes_longer_than_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prorl_jobs, "STOP_S", 0.0)
    async with scripted() as engine, open_trainer(tmp_path, engine) as trainer:
        await trainer.site.hold()
        calls = [asyncio.create_task(trainer.process(work(trajectory_id=number))) for number in range(3)]
        await trainer.waited_for(3)
        await trainer.post("/stop")
        app_state = trainer.site.served.app_state
        assert not (await app_state.store.list(state=State.QUEUED)).rollouts and not len(app_state.pipeline.scheduler)
        assert all("stopped" in str(answer.body) for answer in await asyncio.gather(*calls))


async def test_every_start_sets_a_new_weight_version(tmp_path: Path) -> None:
    async def versions(trainer: Trainer) -> set[int]:
        result = (await trainer.process(work())).body
        (trace,) = (await trainer.site.get(f"/v1/rollouts/{result['rollyard']['rollout']}/traces")).body["traces"]
        return {version for version, owned in zip(trace["versions"], trace["mask"], strict=True) if owned}

    async with scripted(*good()) as engine:
        async with open_trainer(tmp_path, engine) as trainer:
            assert await versions(trainer) == {1}
            await trainer.post("/stop")
            await trainer.post("/start")
            assert await versions(trainer) == {2}
        async with open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
            trainer = Trainer(site)
            assert (await trainer.post("/start")).status == 400  # the trainer died and was restarted
            assert await versions(trainer) == {3}
            assert (await site.post("/v1/policies/default/resume", {"version": 70})).status == 200
            await trainer.post("/stop")
            await trainer.post("/start")
            assert await versions(trainer) == {70}  # another client sets them


async def test_a_job_id_is_always_the_same_job(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        first = (await trainer.process(work(), "job 1/a")).body
        await trainer.post("/stop")
        await trainer.post("/start")
        assert (await trainer.process(work(), "job 1/a")).body == first
        other = await trainer.process(work(instance_id="i2"), "job 1/a")
        assert (other.status, other.code) == (409, "id_conflict")


async def test_instances_without_a_trajectory_id_are_jobs_of_their_own(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        first, second = (
            await trainer.process(work(trajectory_id=None)),
            await trainer.process(work(trajectory_id=None)),
        )
        assert first.body["rollyard"]["rollout"] != second.body["rollyard"]["rollout"]


async def test_a_cancelled_job_returns_a_result(tmp_path: Path) -> None:
    async with stalled() as engine, open_trainer(tmp_path, engine) as trainer:
        waiting = asyncio.create_task(trainer.process(work(), "j1"))
        await engine.busy()
        cancelled = await trainer.post("/cancel", {"job_id": "j1"})
        assert (cancelled.status, cancelled.body) == (200, {"status": "Cancel requested for job j1"})
        answer = await waiting
        assert answer.status == 200
        result = answer.body
        assert set(result) == RESULT
        assert (result["messages"], result["critical_error"], result["filter"]) == ([], None, True)
        assert (result["success"], result["resolved"], result["reward"]) == (False, False, None)
        assert result["error"].startswith("cancelled")
        assert (await trainer.process(work(), "j1")).body == result
        await engine.idle()


async def test_a_cancel_before_its_job_is_effective(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        assert (await trainer.post("/cancel", {"job_id": "early"})).status == 200
        assert (await trainer.process(work(), "early")).body["rollyard"]["outcome"] == "cancelled"


async def test_a_client_that_disconnects_does_not_affect_its_job(tmp_path: Path) -> None:
    slow = scripted(*(Reply(text, latency_s=0.3) for text in good()))
    async with slow as engine, open_trainer(tmp_path, engine) as trainer:
        abandoned = asyncio.create_task(trainer.process(work(), "j1"))
        await engine.busy()
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        result = (await trainer.process(work(), "j1")).body
        assert (result["resolved"], result["rollyard"]["attempt"]) == (True, 1)


async def test_a_call_that_times_out_gets_504_and_the_next_one_the_result(tmp_path: Path) -> None:
    engine = scripted(*(Reply(text, latency_s=0.4) for text in good()))
    async with engine, open_trainer(tmp_path, engine, prorl_timeout_s=0.2) as trainer:
        answer = await trainer.process(work())
        assert answer.status == 504
        assert "prorl.p1-" in answer.body["detail"]
        async with asyncio.timeout(90):
            while (answer := await trainer.process(work())).status == 504:
                pass
        assert answer.body["resolved"] is True
        listed = (await trainer.site.get("/v1/rollouts?run=prorl&state=ended")).body["rollouts"]
        assert len(listed) == 1


async def test_stop_closes_the_intake_and_ends_waiting_calls(tmp_path: Path) -> None:
    async with stalled() as engine, open_trainer(tmp_path, engine) as trainer:
        waiting = [asyncio.create_task(trainer.process(work(trajectory_id=number))) for number in range(3)]
        await trainer.waited_for(3)
        status = (await trainer.site.get("/status", token="")).body
        assert (status["status"], status["pending_jobs"], status["total"]) == ("running", 3, 3)
        assert (await trainer.post("/stop")).body == {"status": "Server stopped successfully"}
        for answer in await asyncio.gather(*waiting):
            assert (answer.status, answer.body["rollyard"]["outcome"]) == (200, "cancelled")
        refused = [
            await trainer.post("/stop"),
            await trainer.site.get("/status", token=""),
            await trainer.post("/cancel", {"job_id": "j1"}),
            await trainer.process(work()),
        ]
        assert [answer.status for answer in refused] == [503] * 4
        assert {answer.body["detail"] for answer in refused} == {
            "Server is not running. Please start the server first."
        }
        assert (await trainer.post("/start")).status == 200
        again = await trainer.post("/start")
        assert (again.status, again.body["detail"]) == (400, "Server is already running")


async def test_the_status_counts_this_runs_jobs_by_stage(tmp_path: Path) -> None:
    async with stalled() as engine, open_trainer(tmp_path, engine, run_slots=1, ready_slots=1) as trainer:
        jobs = [asyncio.create_task(trainer.process(work(trajectory_id=number))) for number in range(3)]
        settled = {
            "status": "running",
            "pending_jobs": 3,
            "init_queue": 1,
            "run_queue": 1,
            "eval_queue": 0,
            "active_init": 0,
            "active_run": 1,
            "active_eval": 0,
            "total": 3,
        }
        async with asyncio.timeout(90):
            while (await trainer.site.get("/status", token="")).body != settled:
                await asyncio.sleep(0.02)
        await trainer.site.submit("another-runs")
        assert (await trainer.site.get("/status", token="")).body == settled
        await trainer.post("/stop")
        await asyncio.gather(*jobs)


async def test_the_intake_is_open_after_a_restart_if_it_was_before(tmp_path: Path) -> None:
    async with scripted(*good()) as engine:
        async with open_trainer(tmp_path, engine) as trainer:
            first = (await trainer.process(work())).body
        async with open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
            trainer = Trainer(site)
            assert (await trainer.process(work())).body == first
            assert (await trainer.post("/stop")).status == 200
        async with open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
            assert (await Trainer(site).process(work())).status == 503


# --- engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "prorl"])
async def test_an_engine_is_added_as_the_kind_it_responds_as(tmp_path: Path, dialect: Any) -> None:
    tokenizer = FolderTokenizer(tokenizer_dir())
    script = Rules(rules=(("<|im_start|>", tuple(map(Reply, good()))),))
    speaking = ScriptedEngine(script, tokenizer=tokenizer, dialect=dialect)
    async with speaking as engine, open_trainer(tmp_path, engine) as trainer:
        (entry,) = (await trainer.site.get("/v1/engines")).body["engines"]
        assert (entry["kind"], entry["state"], entry["url"]) == (dialect, "up", engine.url)
        suffix = "" if dialect == "prorl" else "/v1"  # the trainer appends it for text engines
        again = await trainer.post("/add_llm_server", {"address": engine.url + suffix})
        assert again.status == 200, again.body
        result = (await trainer.process(work())).body
        assert (result["resolved"], result["error"]) == (True, None)
        ids, mask, logprobs = as_trained(result["messages"])
        assert sum(mask) > 0
        assert all(value < 0 for value, owned in zip(logprobs, mask, strict=True) if owned)
        assert len(ids) == len(logprobs)


@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_tokenizer_named_by_a_call_is_trained_on_only_if_it_is_trusted(
    tmp_path: Path, is_trusted: bool
) -> None:
    script = Rules(rules=(("<|im_start|>", tuple(map(Reply, good()))),))
    speaking = ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir()), dialect="prorl")
    async with speaking as engine, open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
        trainer = Trainer(site)
        named = {"address": engine.url, "tokenizer": str(tokenizer_dir()), "trust_tokenizer": is_trusted}
        assert (await trainer.post("/add_llm_server", named)).status == 200
        await trainer.post("/start")
        result = (await trainer.process(work())).body
        assert (result["error"] is None, result["filter"]) == (is_trusted, not is_trusted)
        assert is_trusted or "could not be verified" in result["error"]


async def test_clearing_removes_added_engines_and_keeps_configured_ones(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, scripted(*good()) as own:
        table = {"id": "own", "url": own.url, "tokenizer": str(tokenizer_dir())}
        async with open_trainer(tmp_path, engine, engines=[table]) as trainer:
            assert len((await trainer.site.get("/v1/engines")).body["engines"]) == 2
            assert (await trainer.post("/clear_llm_server")).status == 200
            assert [it["id"] for it in (await trainer.site.get("/v1/engines")).body["engines"]] == ["own"]
        async with open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
            assert (await site.get("/v1/engines")).body["engines"] == []
            answer = await Trainer(site).process(work())
            assert (answer.status, "LLM server" in answer.body["detail"]) == (503, True)


async def test_an_engine_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
        trainer = Trainer(site)
        assert (await trainer.post("/add_llm_server", {"address": "http://127.0.0.1:1"})).status == 502
        assert (await trainer.post("/add_llm_server", {"address": "gpu1"})).status == 422
        unnamed = await trainer.post("/add_llm_server", {"address": engine.url})
        assert unnamed.status in (422, 502)
        assert "tokenizer" in unnamed.body["detail"]
        named = {"address": engine.url, "tokenizer": str(tokenizer_dir())}
        assert (await trainer.post("/add_llm_server", named)).status == 200


# --- instances ----------------------------------------------------------------------------------------


async def test_an_instance_without_a_handler_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with scripted() as engine, open_trainer(tmp_path, engine) as trainer:
        unknown = await trainer.process({"data_source": "osworld", "trajectory_id": 0})
        assert (unknown.status, "osworld" in unknown.body["detail"]) == (400, True)
        empty = await trainer.process({"data_source": "deepscaler", "trajectory_id": 0})
        assert (empty.status, "question" in empty.body["detail"]) == (400, True)
        wrong = await trainer.process(work(), temperature="hot")
        assert (wrong.status, wrong.code) == (422, "invalid_request")
        assert (await trainer.post("/process", {"sampling_params": {}})).status == 422


async def test_nan_in_a_table_is_read_as_null(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_trainer(tmp_path, engine) as trainer:
        result = await trainer.process(work(hints=float("nan")))
        assert (result.status, result.body["resolved"]) == (200, True)


# --- access -------------------------------------------------------------------------------------------


async def test_without_the_setting_the_api_is_not_mounted(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.post("/start")).status == 404
        assert (await site.post("/start", token="")).status == 401


async def test_on_loopback_it_is_open_to_programs_but_not_to_pages(tmp_path: Path) -> None:
    async with open_site(tmp_path, prorl=True, trainer_tokens=[]) as site:
        assert (await site.post("/start", token="")).status == 200
        foreign = ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"})
        for headers in foreign:
            answer = await site.post("/stop", token="", headers=headers)
            assert (answer.status, answer.code) == (403, "foreign_host")
        assert (await site.get("/v1/rollouts", token="")).status == 401
        assert (await site.get("/v1/status", token="")).status == 401


async def test_configured_tokens_are_required_and_may_be_in_the_url(tmp_path: Path) -> None:
    async with scripted(*good()) as engine:
        chosen = {"prorl": True, "admin_tokens": [ADMIN], "trainer_tokens": [TRAINER]}
        async with serve(settings(tmp_path, **chosen)) as served, aiohttp.ClientSession() as http:
            url = served.url

            async def post(path: str, token: str, body: Any = None) -> int:
                address = url.replace("://", f"://prorl:{token}@") if token else url
                async with http.post(f"{address}{path}", json=body) as answer:
                    return answer.status

            server = {"address": engine.url, "tokenizer": str(tokenizer_dir())}
            assert await post("/start", "") == 401
            assert await post("/start", "not-a-token-that-is-known") == 401
            assert await post("/start", TRAINER) == 200
            assert await post("/add_llm_server", TRAINER, server) == 403
            assert await post("/add_llm_server", ADMIN, server) == 200
            assert await post("/process", TRAINER, {"instance": work(), "sampling_params": {}}) == 200
            assert await post("/v1/runs", ADMIN, {}) == 401  # only the ProRL paths accept a token in the URL
            bearer = {"Authorization": f"Bearer {TRAINER}"}
            async with http.post(f"{url}/stop", headers=bearer) as answer:
                assert answer.status == 200


async def test_a_start_needs_the_policys_owner_and_does_not_end_anothers_pause(tmp_path: Path) -> None:
    async with scripted(*good()) as engine, open_site(tmp_path, prorl=True, engines=[engine_table(engine)]) as site:
        policy = "/v1/policies/default"
        paused = await site.post(f"{policy}/pause", {"holder": "a"}, token=TENANT)
        assert (paused.status, paused.body["state"]) == (200, "paused")
        foreign = await site.post("/start", token=OTHER)
        assert (foreign.status, foreign.code) == (403, "forbidden")
        early = await site.post("/start", token=TENANT)
        assert (early.status, early.code) == (409, "policy_conflict")
        assert (await site.get("/status", token=TENANT)).status == 503  # the intake is closed
        assert (await site.get(policy)).body["state"] == "paused"
        assert (await site.post(f"{policy}/resume", {"version": 0, "holder": "a"}, token=TENANT)).status == 200
        assert (await site.post("/start", token=TENANT)).status == 200
        assert (await site.get(policy)).body["version"] > 0


async def test_a_job_creates_its_run_only_for_a_token_that_may(tmp_path: Path) -> None:
    async with (
        scripted(*good()) as engine,
        open_site(tmp_path, prorl=True, engines=[engine_table(engine)], max_runs=1) as site,
    ):
        submitter = (await site.post("/v1/tokens", {"access": "submitter"})).body["token"]
        bound = (await site.post("/v1/tokens", {"access": "trainer", "runs": ["other-*"]})).body["token"]
        assert (await site.post("/start")).status == 200
        job = {"instance": work(), "sampling_params": {}}
        for token in (submitter, bound):
            for path, body in (("/start", None), ("/process", job), ("/cancel", {"job_id": "j"}), ("/stop", None)):
                refused = await site.post(path, body, token=token)
                assert (refused.status, refused.code) == (403, "forbidden"), path
        assert (await site.post("/v1/runs", {"id": "mine"}, token=TENANT)).status == 201
        full = await site.post("/process", job, token=TENANT)
        assert (full.status, full.code) == (429, "quota_exceeded")
        assert (await site.get("/v1/runs/prorl")).status == 404
        assert (await site.post("/process", job, token=OTHER)).body["resolved"] is True
        assert (await site.post("/process", job, token=TENANT)).status == 403


async def test_of_two_tenants_whose_first_jobs_arrive_at_once_one_gets_the_run(tmp_path: Path) -> None:
    tokens = [TENANT, OTHER]
    chosen = {"prorl": True, "prorl_tokenizer": str(tokenizer_dir()), "trainer_tokens": tokens}
    async with scripted(*good()) as engine, open_site(tmp_path, **chosen) as site:
        assert (await site.post("/add_llm_server", {"address": engine.url})).status == 200
        assert (await site.post("/start", token=TENANT)).status == 200
        body = {"instance": work(), "sampling_params": {"max_iterations": 4}}
        calls = [site.post("/process", {**body, "job_id": token}, token=token) for token in tokens]
        assert sorted(answer.status for answer in await asyncio.gather(*calls)) == [200, 403]
        assert len((await site.get("/v1/rollouts?run=prorl")).body["rollouts"]) == 1
