"""The agent server for NeMo Gym, with a real service and a scripted engine; results are checked as NeMo RL does."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from rollyard import AsyncClient
from rollyard.testing.gym_server import GymServer, row
from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.trainers._nemo_gym_rows import rollout_id
from rollyard.trainers.nemo_gym import GymAgent, create_app, metrics_of
from tests.service.site import Site, engine_table, finish, open_site, shell

pytestmark = pytest.mark.slow

TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def calls(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


COUNTS = (
    "<think>\nTwo calls at once.\n</think>\n\n"
    + calls("increment_counter", count=1)
    + "\n"
    + calls("increment_counter", count=2),
    calls("get_counter_value"),
    "It stands at 6.",
)


def engine_of(*extra: tuple[str, tuple[str | Reply, ...]]) -> ScriptedEngine:
    rules = (*extra, ("Add 1, then 2", COUNTS), ("<|im_start|>", (shell("echo good > out.txt"), finish())))
    typed_rules = tuple(
        (marker, tuple(it if isinstance(it, Reply) else Reply(it) for it in turns)) for marker, turns in rules
    )
    return ScriptedEngine(Rules(rules=typed_rules), tokenizer=FolderTokenizer(tokenizer_dir()))


def own_row(check: str = 'test "$(cat out.txt)" = good', **fields: Any) -> dict[str, Any]:
    """A row with a Rollyard task."""
    task = {"environment": "shell", "data": {"instruction": "write good", "checks": [check]}}
    params = {"input": [{"role": "user", "content": "write good"}], "temperature": 1.0, "max_output_tokens": 256}
    return {"responses_create_params": params, "rollyard_task": task, "agent_ref": {"name": "rollyard"}, **fields}


@dataclass
class Gym:
    url: str
    site: Site
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    counter: GymServer

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **options) as answer:
            return answer.status, await answer.json(content_type=None)

    async def run(self, sent: dict[str, Any]) -> dict[str, Any]:
        status, body = await self.post("/run", sent)
        assert status == 200, body
        return body


@asynccontextmanager
async def serving(app: Any) -> AsyncGenerator[str, None]:
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", lifespan="on", timeout_graceful_shutdown=2)
    )
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(90):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait((task,))


@asynccontextmanager
async def gym(folder: Path, engine: ScriptedEngine, **values: Any) -> AsyncGenerator[Gym, None]:
    """A service with a resources server named `counter`, and an agent server that calls it."""
    agent_options = values.pop("agent", {})
    async with GymServer() as counter, engine:
        servers = {"counter": counter.url}
        async with (
            open_site(folder, engines=[engine_table(engine)], gym_servers=servers, **values) as site,
            aiohttp.ClientSession() as http,
        ):
            client = AsyncClient(site.url, site.token, retry_s=5)
            agent = GymAgent(client, **{"run": "gym", "server": "counter", **agent_options})
            async with serving(create_app(agent)) as url:
                yield Gym(url, site, engine, http, counter)


def test_the_documented_configuration_has_one_environment_server_for_the_agent() -> None:
    """By Gym 0.7's rules: one server has one kind and one implementation; an agent is reached through exactly one
    environment server, whose `agent_server` names it; `legacy_agent` takes nothing else."""
    yaml = pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "train-with-nemo-gym.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    servers: dict[str, Any] = yaml.safe_load(block)
    kinds: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        ((kind, implementations),) = server.items()
        (implementation,) = implementations.items()
        kinds.setdefault(kind, {})[name] = implementation
    assert set(kinds) == {"responses_api_agents", "environment_servers"}
    ((agent, (_, address)),) = kinds["responses_api_agents"].items()
    assert set(address) == {"host", "port"}, "without an entrypoint Gym does not start it"
    ((implementation, relay),) = kinds["environment_servers"].values()
    assert implementation == "legacy_agent"
    assert relay == {"entrypoint": "app.py", "agent_server": {"type": "responses_api_agents", "name": agent}}
    assert f'"name": "{agent}"' in page, "rows name the agent"


def learned(result: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Builds the training sequence of a result as NeMo RL does: asserts that each prompt starts with the sequence
    before it, and raises if nothing was generated."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in result["response"]["output"]:
        present = [name for name in TOKENS if name in item]
        assert present in ([], list(TOKENS)), "all three or none"
        if not present:
            continue
        assert item["type"] in ("message", "function_call", "reasoning")
        prompt, generated, values = (item[name] for name in TOKENS)
        assert len(generated) == len(values) > 0
        assert ids == prompt[: len(ids)], "each prompt starts with the sequence before it"
        context = prompt[len(ids) :]
        ids += [*context, *generated]
        mask += [0] * len(context) + [1] * len(generated)
        logprobs += [0.0] * len(context) + values
    if not ids:
        raise ValueError("no generation data")
    return ids, mask, logprobs


async def test_a_row_of_gym_runs_at_its_resources_server(tmp_path: Path) -> None:
    sent = {
        **row(3, 1, 2),
        "_rowidx": 7,
        "_ng_task_index": 1,
        "_ng_rollout_index": 0,
        "_ng_group_id": "step-1",
        "_ng_group_attempt": 0,
        "_ng_rollout_id": "step-1-0",
        "agent_ref": {"name": "rollyard"},
    }
    async with gym(tmp_path, engine_of()) as it:
        result = await it.run(sent)
        assert {name: result[name] for name in sent} == sent
        assert (result["reward"], result["mask_sample"]) == (1.0, False)
        assert "_ng_failure_class" not in result
        output = result["response"]["output"]
        assert [item["type"] for item in output] == [
            *("reasoning", "function_call", "function_call", "function_call_output", "function_call_output"),
            *("function_call", "function_call_output", "message"),
        ]
        bearers = [index for index, item in enumerate(output) if "generation_token_ids" in item]
        assert bearers == [2, 5, 7]  # the last item of each call
        ids, mask, logprobs = learned(result)
        name = result["rollyard"]["rollout"]
        (trace,) = (await it.site.get(f"/v1/rollouts/{name}/traces")).body["traces"]
        assert (ids, mask) == (trace["token_ids"], trace["mask"])
        assert logprobs == pytest.approx(trace["logprobs"])
        assert result["response"]["usage"]["output_tokens"] == sum(mask)
        task = (await it.site.get(f"/v1/rollouts/{name}")).body["task"]
        group_fields = {"_ng_group_id": "step-1", "_ng_group_attempt": 0, "_ng_rollout_index": 0}
        assert {key: value for key, value in task["data"]["row"].items() if key.startswith("_")} == group_fields
        (verified,) = it.counter.verified
        assert group_fields.items() <= verified.items(), "a verifier of the whole group needs them"


async def test_a_row_with_a_rollyard_task_runs_it_with_the_trainers_sampling(tmp_path: Path) -> None:
    async with gym(tmp_path, engine_of()) as it:
        good = await it.run(own_row())
        assert (good["reward"], good["rollyard"]["outcome"]) == (1.0, "completed")
        learned(good)
        task = (await it.site.get(f"/v1/rollouts/{good['rollyard']['rollout']}")).body["task"]
        assert (task["environment"], task["sampling"]["max_tokens"]) == ("shell", 256)
        bad = await it.run(own_row("false"))
        assert (bad["reward"], bad["mask_sample"]) == (0.0, False)
        assert "_ng_failure_class" not in bad  # a reward of 0 that was earned
        learned(bad)


async def test_a_named_row_is_one_rollout_an_unnamed_one_is_new_each_time(tmp_path: Path) -> None:
    named = own_row(_ng_rollout_id="step-1/sample 3", _ng_attempt_index=0)
    async with gym(tmp_path, engine_of()) as it:
        first, again = await it.run(named), await it.run(named)
        assert first == again
        retried = await it.run({**named, "_ng_attempt_index": 1})
        unnamed = [await it.run(own_row(_ng_task_index=0, _ng_rollout_index=0)) for _ in range(2)]
        ids = [result["rollyard"]["rollout"] for result in (first, retried, *unnamed)]
        assert len(set(ids)) == 4
        other = await it.run({**named, **own_row("false")})
        assert (other["_ng_failure_class"], other["_ng_failure_terminal"]) == ("id_conflict", True)


def test_names_and_attempts_map_to_distinct_rollouts() -> None:
    rows = [{"_ng_rollout_id": name, "_ng_attempt_index": n} for name in ("3", "3.1", "1.3", "é") for n in (0, 1, 2)]
    assert len({rollout_id(row, "gym") for row in rows}) == len(rows)
    assert rollout_id(rows[0], "gym") == rollout_id({"_ng_rollout_id": "3"}, "gym")


async def test_an_infrastructure_failure_is_a_failure_row_without_tokens(tmp_path: Path) -> None:
    async with gym(tmp_path, engine_of(), max_attempts=1) as it:
        it.engine.fail_next(2, "fewer_logprobs")
        result = await it.run(own_row(_ng_task_index=4))
        assert result["_ng_failure_class"].startswith("engine_")
        assert (result["reward"], result["mask_sample"]) == (0.0, True)
        assert not {"_ng_failure_terminal", "_ng_no_persist"} & set(result)  # it may be retried
        assert result["_ng_task_index"] == 4
        with pytest.raises(ValueError, match="no generation data"):
            learned(result)


async def test_an_infrastructure_failure_is_reported_by_status_if_configured(tmp_path: Path) -> None:
    async with gym(tmp_path, engine_of(), max_attempts=1, agent={"failures": "status"}) as it:
        it.engine.fail_next(2, "fewer_logprobs")
        status, body = await it.post("/run", own_row())
        assert (status, body["detail"].startswith("engine_")) == (503, True)
        assert (await it.run(own_row()))["reward"] == 1.0


@pytest.mark.parametrize(
    ("sent", "failed"),
    [
        ({"responses_create_params": {}, "rollyard_task": {"environment": "nowhere"}}, "unknown_environment"),
        ({"responses_create_params": {}, "rollyard_task": {"data": {}}}, "task_invalid"),
        ({"input": "no params"}, "task_invalid"),
        ({"responses_create_params": {"input": "hi"}, "rollyard_server": "unknown"}, "task_invalid"),
        ({"responses_create_params": {"input": "hi", "temperature": "hot"}}, "invalid_request"),
    ],
)
async def test_a_row_that_can_never_work_is_terminal(tmp_path: Path, sent: dict[str, Any], failed: str) -> None:
    async with gym(tmp_path, engine_of()) as it:
        result = await it.run(sent)
        assert (result["_ng_failure_class"], result["_ng_failure_terminal"]) == (failed, True)
        assert result["_ng_failure_message"]


async def test_a_task_whose_set_up_fails_is_terminal(tmp_path: Path) -> None:
    sent = own_row()
    sent["rollyard_task"]["data"]["setup"] = ["exit 3"]
    async with gym(tmp_path, engine_of()) as it:
        result = await it.run(sent)
        assert (result["_ng_failure_class"], result["_ng_failure_terminal"]) == ("setup_failed", True)


async def test_a_cancelled_rollout_counts_as_never_tried(tmp_path: Path) -> None:
    stuck = engine_of(("write good", (Reply("for ever", stall_after=1, tokens_per_s=1000),)))
    async with gym(tmp_path, stuck) as it:
        running = asyncio.create_task(it.run(own_row(_ng_rollout_id="r1")))
        await it.engine.busy()
        assert (await it.site.delete("/v1/rollouts/gym.r1")).status == 202
        result = await running
        assert (result["_ng_failure_class"], result["_ng_no_persist"]) == ("cancelled", True)


async def test_a_rollout_that_ran_out_of_time_is_scored_without_tokens(tmp_path: Path) -> None:
    slow = engine_of(
        ("write good", (shell("echo good > out.txt"), Reply("for ever", stall_after=1, tokens_per_s=1000)))
    )
    async with gym(tmp_path, slow, agent={"defaults": {"limits": {"run_s": 6.0}}}) as it:  # the first turn fits in it
        result = await it.run(own_row())
        assert (result["rollyard"]["code"], result["mask_sample"]) == ("run_deadline", True)
        assert result["reward"] == 1.0
        assert "_ng_failure_class" not in result
        with pytest.raises(ValueError, match="no generation data"):
            learned(result)


async def test_a_disconnect_cancels_only_an_unnamed_rollout(tmp_path: Path) -> None:
    stuck = engine_of(("write good", (Reply("for ever", stall_after=1, tokens_per_s=1000),)))
    async with gym(tmp_path, stuck) as it:
        named = asyncio.create_task(it.run(own_row(_ng_rollout_id="r1")))
        unnamed = asyncio.create_task(it.run(own_row()))
        while it.engine.running < 2:
            await asyncio.sleep(0.01)
        for task in (named, unnamed):
            task.cancel()
        await asyncio.gather(named, unnamed, return_exceptions=True)
        (ended,) = (await it.site.get("/v1/rollouts?run=gym&state=ended&wait_s=20")).body["rollouts"]
        assert (ended["outcome"], ended["id"] != "gym.r1") == ("cancelled", True)
        assert (await it.site.get("/v1/rollouts/gym.r1")).body["state"] == "run"
        await it.site.delete("/v1/rollouts/gym.r1")


async def test_responses_returns_one_reply_of_the_policy(tmp_path: Path) -> None:
    async with gym(tmp_path, engine_of(("say hello", ("hello there",)))) as it:
        params = {"input": [{"role": "user", "content": "say hello"}], "temperature": 0.5}
        status, body = await it.post("/v1/responses", params)
        assert (status, body["object"]) == (200, "response")
        assert body["output"][-1]["content"][0]["text"] == "hello there"
        assert (await it.post("/v1/responses", {"input": 3}))[0] == 400


async def test_metrics_leave_failures_out_of_every_mean(tmp_path: Path) -> None:
    rows = [
        {"_ng_task_index": 0, "reward": 1.0},
        {"_ng_task_index": 0, "reward": 0.0},
        {"_ng_task_index": 1, "reward": 1.0},
        {"_ng_task_index": 1, "reward": 0.0, "_ng_failure_class": "engine_broken"},
    ]
    metrics = metrics_of(rows)
    assert metrics["key_metrics"] == {"mean/reward": pytest.approx(2 / 3)}
    assert [(it["_ng_task_index"], it["mean/reward"]) for it in metrics["group_level_metrics"]] == [(0, 0.5), (1, 1.0)]
    assert (metrics["agent_metrics"]["failures"], metrics["agent_metrics"]["rollouts"]) == (1, 4)
    assert metrics_of([])["key_metrics"] == {}
    async with gym(tmp_path, engine_of()) as it:
        assert (await it.post("/aggregate_metrics", {"verify_responses": rows}))[1] == metrics
        assert (await it.post("/aggregate_metrics", {"verify_responses": 3}))[0] == 422
        assert (await it.post("/run", [1]))[0] == 422
        async with it.http.get(it.url + "/") as alive:
            assert (alive.status, await alive.json()) == (200, {"status": "ok", "run": "gym"})
        page = {"Origin": "http://evil.example"}
        assert (await it.post("/run", own_row(), headers=page))[0] == 403


async def test_the_command_serves_the_agent(tmp_path: Path) -> None:
    async with gym(tmp_path, engine_of()) as it:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard", "gym-agent", "--port", "0", "--server", "counter"),
            env={**os.environ, "ROLLYARD_URL": it.site.url, "ROLLYARD_TOKEN": it.site.token},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        url = line.split(" at ")[1].split(",")[0]
        try:
            async with it.http.post(f"{url}/run", json=row(3, 1, 2)) as answer:
                result = await answer.json()
            assert (result["reward"], result["rollyard"]["run"] in line) == (1.0, True)
        finally:
            process.send_signal(signal.SIGTERM)
            await process.communicate()


async def test_the_example_runs_a_dataset(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    wrong = {**row(3, 1, 2), "expected_count": 7}
    rows.write_text("".join(json.dumps(it) + "\n" for it in (row(3, 1, 2), wrong, {"responses_create_params": {}})))
    example = Path(__file__).parents[2] / "examples" / "trainers" / "nemo_gym.py"
    async with gym(tmp_path, engine_of()) as it:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(example), str(rows), "--agent", it.url, "--repeats", "2"),
            stdout=asyncio.subprocess.PIPE,
        )
        printed = (await process.communicate())[0].decode()
    assert process.returncode == 0
    assert printed.count("reward 1  advantage +0.00") == 2
    assert printed.count("reward 0  advantage +0.00") == 2
    assert "task 2: 0 of 2 to be trained on task_invalid task_invalid" in printed
