"""Runs tasks of a resources server over real HTTP: seed, tools, verify."""

import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from rollyard.core import Outcome
from rollyard.core.failure import TaskInvalid, VerifierCrashed
from rollyard.envs.gym import GymEnvironment
from rollyard.service.schemas.task import to_task
from rollyard.testing.gym_server import GymServer

from .conftest import context, evidence
from .gym_parts import PERFECT, QUICK, body, calls, gym_of, gym_site, gym_task, opened, says
from .stage_resources import RUNTIMES, open_resources, played, rewards


@pytest.fixture
async def server():
    async with GymServer() as server:
        yield server


# --- the known agents, and a model ----------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_the_oracle_scores_1_and_the_no_op_0(runtime, server, monkeypatch):
    monkeypatch.setenv("ROLLYARD_GYM_SERVERS", json.dumps({"other": "http://127.0.0.1:9", "counter": server.url + "/"}))
    async with open_resources(runtime) as resources:
        assert await rewards(resources, body()) == (1.0, 0.0)
        result = await played(resources, body(5, 4), "oracle")
        assert result.score is not None
        assert result.score.components == {"counted": 1.0, "told": 1.0}
        assert result.score.metrics == {"calls": 2.0}


async def test_a_task_without_a_solution_has_no_oracle(server, monkeypatch):
    monkeypatch.setenv("ROLLYARD_GYM_SERVERS", json.dumps({"counter": server.url}))
    bare = body()
    del bare["data"]["oracle"]
    async with open_resources("bubblewrap") as resources:
        result = await played(resources, bare, "oracle")
    assert result.failure is not None
    assert (result.failure.code, result.score) == ("task_invalid", None)
    assert "data.oracle: this task has no solution" in result.failure.detail


async def test_a_model_that_calls_both_tools_is_rewarded(tmp_path, server):
    async with gym_site(tmp_path, PERFECT, server) as site:
        rollout = await site.rolled(gym_task())
        assert rollout.ending is not None
        assert (rollout.ending.outcome, rollout.ending.failure) == (Outcome.COMPLETED, None)
        assert rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0
        trajectory = await site.store.trajectory(rollout.id)
    assert trajectory is not None
    tool_contents = [message.get("content") for message in trajectory.messages if message.get("role") == "tool"]
    assert tool_contents == ['{"success": true}', '{"success": true}', '{"count": 6}']
    (verified,) = server.verified
    call, output = "function_call", "function_call_output"
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == [call, call, output, output, call, output, "message"]
    assert verified["response"]["usage"]["output_tokens"] == trajectory.sampled_tokens > 0


async def test_the_model_sees_neither_the_expected_result_nor_the_cookies(tmp_path, server):
    async with gym_site(tmp_path, says(calls("get_counter_value"), "I give up."), server) as site:
        rollout = await site.rolled(gym_task())
        trajectory = await site.store.trajectory(rollout.id)
    assert rollout.ending is not None and rollout.ending.score is not None
    assert rollout.ending.score.reward == 0.0
    assert trajectory is not None
    visible = json.dumps([trajectory.messages, trajectory.tools])
    assert "get_counter_value" in visible
    assert "expected_count" not in visible
    assert GymServer.cookie not in visible


async def test_a_model_cannot_call_verify_or_seed_session(tmp_path, server):
    forged = calls("verify", expected_count=3, response={"output": []}) + calls("seed_session", initial_count=6)
    async with gym_site(tmp_path, says(forged, "It stands at 6."), server) as site:
        rollout = await site.rolled(gym_task())
    assert rollout.ending is not None and rollout.ending.score is not None
    assert rollout.ending.score.reward == 0.0
    assert (len(server.counters), len(server.verified)) == (1, 1)


# --- cookies --------------------------------------------------------------------------------------------


async def test_the_newest_cookie_is_sent_and_reaches_eval_in_another_process(server):
    async with gym_of(server) as gym:
        tool, info = await opened(gym)
        cookie_states = [dict(info["gym"]["cookies"])]
        for count in (1, 2):
            result = await tool.call({"count": count}, timeout_s=5)
            assert (result.content, result.is_error) == ('{"success": true}', False)
            cookie_states.append(dict(info["gym"]["cookies"]))
    assert len({json.dumps(cookies) for cookies in cookie_states}) == 3
    stored = json.loads(json.dumps(info))
    async with gym_of(server) as other:
        assert (await other.eval(context(gym_task()), evidence("So it is 6.", **stored))).reward == 1.0
        with pytest.raises(VerifierCrashed, match="Session not initialized"):  # it has been used
            await other.eval(context(gym_task()), evidence("So it is 6.", **stored))


async def test_a_cookie_that_the_server_deletes_is_not_sent_again():
    class Forgetful(GymServer):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            response = await super().answer(request)
            if request.path == "/seed_session":
                response.set_cookie("once", "x")
                response.set_cookie("dated", "y", expires="Fri, 01 Jan 2100 00:00:00 GMT")
            else:
                response.del_cookie("once")
                response.set_cookie("dated", "", expires="Thu, 01 Jan 1970 00:00:00 GMT")
            return response

    async with Forgetful() as server, gym_of(server) as gym:
        tool, info = await opened(gym)
        assert set(info["gym"]["cookies"]) == {GymServer.cookie, "once", "dated"}
        await tool.call({"count": 1}, timeout_s=5)
        assert set(info["gym"]["cookies"]) == {GymServer.cookie}


async def test_without_the_sessions_cookies_nothing_is_verified(server):
    async with gym_of(server) as gym:
        with pytest.raises(VerifierCrashed, match="has no session"):
            await gym.eval(context(gym_task()), evidence("6"))
    assert not server.verified


# --- which servers --------------------------------------------------------------------------------------


async def test_a_server_that_the_operator_has_not_named_is_refused(tmp_path, server):
    async with gym_site(tmp_path, PERFECT, server) as site:
        other: dict[str, Any] = body()
        for name in ("http://169.254.169.254", "http://127.0.0.1:1", server.url + "/verify", "nobody"):
            other["data"]["server"] = name
            with pytest.raises(TaskInvalid, match=r"no resources server .*; the operator has named: counter\n"):
                site.pipeline.resources.check(to_task(other, {}), site.run)
        other["data"]["server"] = server.url + "/"
        rollout = await site.rolled(replace(to_task(other, {}), limits=QUICK))
        assert rollout.ending is not None and rollout.ending.score is not None
        assert rollout.ending.score.reward == 1.0


def test_without_a_list_of_servers_every_server_is_refused():
    with pytest.raises(TaskInvalid, match="the operator has named: none"):
        GymEnvironment().check(gym_task())
