"""Failures of a resources server: their blame, and what the model sees."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from rollyard.core import Blame
from rollyard.core.failure import TaskInvalid, ToolUnreachable, VerifierCrashed
from rollyard.envs.gym.environment import MOST_METRICS
from rollyard.service.schemas.task import to_task
from rollyard.testing.gym_server import Counter, GymServer, Refused, row
from tests.pipeline.site import SETTINGS

from .conftest import context, evidence
from .gym_parts import PERFECT, Slow, body, calls, gym_of, gym_site, gym_task, opened, says


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pause between tries."""
    monkeypatch.setattr("rollyard.envs.gym.session.PAUSE_S", 0.0)


# --- tools ----------------------------------------------------------------------------------------------


async def test_an_error_status_of_a_tool_is_an_observation():
    async with GymServer() as server, gym_of(server) as gym:
        tool, _ = await opened(gym)
        refused = await tool.call({"count": "many"}, timeout_s=5)
        assert refused.is_error
        assert refused.content == '{"detail": "body.count: Input should be a valid integer"}'
        broken = await tool.call({"count": 10**9}, timeout_s=5)
        assert broken.is_error
        assert broken.content == """{"detail": "OverflowError('the counter is full')"}"""
        assert not (await tool.call({"count": 1}, timeout_s=5)).is_error


async def test_arguments_without_a_json_form_are_an_observation():
    async with GymServer() as server, gym_of(server) as gym:
        tool, _ = await opened(gym)
        result = await tool.call({"count": float("nan")}, timeout_s=5)
        assert result.is_error and "cannot be sent" in result.content
        half = await tool.call({"count": "\ud800"}, timeout_s=5)
        assert half.is_error and "valid integer" in half.content


async def test_a_long_reply_is_cut_for_the_model():
    class Talkative(GymServer):
        async def get_counter_value(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
            return {"said": "x" * (5 << 20)}

    async with Talkative() as server, gym_of(server) as gym:
        tool, _ = await opened(gym, "get_counter_value", output_bytes=100)
        content = (await tool.call({}, timeout_s=5)).content
        assert content.startswith('{"said": "xxx')
        assert f"{(4 << 20) - 100} bytes left out" in content


async def test_a_tool_that_does_not_answer_in_time_is_an_observation():
    async with Slow("/get_counter_value") as server, gym_of(server) as gym:
        tool, _ = await opened(gym, "get_counter_value")
        result = await tool.call({}, timeout_s=0.1)
        assert (result.content, result.is_error) == ("Error: get_counter_value did not answer within 0.1 s", True)


async def test_a_redirect_is_not_followed():
    class Elsewhere(GymServer):
        async def get_counter_value(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
            raise web.HTTPTemporaryRedirect("/increment_counter", text="over there")

    async with Elsewhere() as server, gym_of(server) as gym:
        tool, _ = await opened(gym, "get_counter_value")
        result = await tool.call({}, timeout_s=5)
        assert (result.content, result.is_error) == ("over there", True)


async def test_concurrent_calls_are_serialized():
    async with GymServer() as server, gym_of(server) as gym:
        tool, _ = await opened(gym)  # the server accepts only the newest cookie
        results = await asyncio.gather(*(tool.call({"count": 1}, timeout_s=5) for _ in range(4)))
        assert not any(result.is_error for result in results)
        assert [counter.value for counter in server.counters.values()] == [7]


async def test_a_server_that_disappears_in_run_has_blame_infra(tmp_path):
    class Dying(GymServer):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/get_counter_value":
                assert request.transport is not None
                request.transport.abort()
            return await super().answer(request)

    script = says(calls("get_counter_value"), "6")
    async with (
        Dying() as server,
        gym_site(tmp_path, script, server, settings=replace(SETTINGS, max_attempts=2)) as site,
    ):
        rollout = await site.rolled(gym_task())
        assert rollout.ending is not None and rollout.ending.failure is not None
        failure = rollout.ending.failure
        assert (failure.code, failure.blame, rollout.ending.score) == ("tool_unreachable", Blame.INFRA, None)
        assert "the resources server counter, tool get_counter_value: " in failure.detail
        assert [counter.calls for counter in server.counters.values()] == [1, 1]  # one call per attempt and session


# --- seeding --------------------------------------------------------------------------------------------


async def test_a_server_that_is_down_at_the_seed_has_blame_infra():
    async with GymServer() as server:
        pass
    async with gym_of(server) as gym:
        with pytest.raises(ToolUnreachable, match="the resources server counter, seed_session: Client"):
            await gym.init(context(gym_task()))


async def test_the_seed_is_retried_while_a_server_starts():
    class Starting(GymServer):
        busy = 2

        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            self.busy -= 1
            return web.Response(status=503, text="soon") if self.busy >= 0 else await super().answer(request)

    async with Starting() as server, gym_of(server) as gym:
        assert len((await gym.init(context(gym_task()))).tools) == 2
        server.busy = 3
        with pytest.raises(ToolUnreachable, match="status 503: soon, 3 times"):
            await gym.init(context(gym_task()))
        assert server.busy == 0


async def test_a_server_that_hangs_at_the_seed_is_not_the_tasks_fault():
    async with Slow("/seed_session") as server, gym_of(server) as gym:
        with pytest.raises(ToolUnreachable, match=r"no answer within 0\.09 s"):
            await gym.init(context(gym_task(init_s=0.1)))


async def test_a_row_that_the_server_refuses_is_the_tasks_fault(tmp_path):
    wrong = body()
    del wrong["data"]["row"]["initial_count"]
    async with GymServer() as server, gym_site(tmp_path, says("x"), server) as site:
        rollout = await site.rolled(to_task(wrong, {}))
        assert rollout.ending is not None and rollout.ending.failure is not None
        assert (rollout.ending.failure.code, rollout.ending.failure.blame) == ("setup_failed", Blame.TASK)
        assert "the resources server counter refused this row: status 422" in rollout.ending.failure.detail


async def test_a_seed_that_fails_has_blame_infra():
    class Broken(GymServer):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            return web.Response(status=500, text="KeyError('x')")

    async with Broken() as server, gym_of(server) as gym:
        with pytest.raises(ToolUnreachable, match="created no session: status 500: KeyError"):
            await gym.init(context(gym_task()))


async def test_mcp_tools_are_called_at_their_paths_and_refused_if_the_row_names_none():
    class Exposing(GymServer):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            response = await super().answer(request)
            if request.path == "/seed_session":
                assert isinstance(response, web.Response)
                response.text = json.dumps({"mcp": {"server_name": "counter", "url_path": "/mcp", "headers": {}}})
            return response

    bare = body()
    del bare["data"]["oracle"]
    bare["data"]["row"]["responses_create_params"]["tools"] = []
    async with Exposing() as server, gym_of(server) as gym:
        tool, _ = await opened(gym)
        assert not (await tool.call({"count": 1}, timeout_s=5)).is_error
        with pytest.raises(TaskInvalid, match="offers its tools over MCP, and the row names none"):
            await gym.init(context(to_task(bare, {})))


# --- verifying ------------------------------------------------------------------------------------------


class Judging(GymServer):
    """A server that returns the verdict that a test sets."""

    verdict: Any = None
    status = 200

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/verify":
            return await super().answer(request)
        text = self.verdict if isinstance(self.verdict, str) else json.dumps(self.verdict)
        return web.Response(status=self.status, text=text)


@pytest.mark.parametrize(
    ("verdict", "status", "match"),
    [
        ("<html>", 200, "not a JSON object: status 200: <html>"),
        ([1.0], 200, "not a JSON object"),
        ({}, 200, "without a reward"),
        ({"reward": "1.0"}, 200, "without a reward"),
        ({"reward": True}, 200, "without a reward"),
        ('{"reward": NaN}', 200, "not a JSON object"),
        ({"reward": 1.0}, 500, "did not verify: status 500"),
        ({"reward": 1.0}, 422, "did not verify: status 422"),
        ({"reward": 0.0, "_ng_failure_class": "judge_failed"}, 200, "could not verify: judge_failed"),
    ],
)
async def test_an_invalid_verdict_is_a_crashed_verifier(verdict, status, match):
    async with Judging() as server, gym_of(server) as gym:
        server.verdict, server.status = verdict, status
        _, info = await opened(gym)
        with pytest.raises(VerifierCrashed, match=match):
            await gym.eval(context(gym_task()), evidence("6", **info))


async def test_other_numbers_become_metrics_unless_they_are_fields_of_the_row():
    async with Judging() as server, gym_of(server) as gym:
        own = {"is_neat": True, "turns": 3, "note": "x", "reward_components": {"a": 0.5, "b": None}}
        server.verdict = {**row(3, 1, 2), "reward": -0.5, **own}
        _, info = await opened(gym)
        score = await gym.eval(context(gym_task()), evidence("6", **info))
        assert (score.reward, score.components, score.metrics) == (-0.5, {"a": 0.5}, {"is_neat": 1.0, "turns": 3.0})
        server.verdict = {"reward": 1, **{f"n{index}": index for index in range(1000)}}
        assert len((await gym.eval(context(gym_task()), evidence("6", **info))).metrics) == MOST_METRICS


async def test_a_server_that_hangs_at_verify_gives_no_reward():
    async with Slow("/verify") as server, gym_of(server) as gym:
        _, info = await opened(gym)
        with pytest.raises(VerifierCrashed, match=r"no answer within 0\.09 s"):
            await gym.eval(context(gym_task(eval_s=0.1)), evidence("6", **info))


async def test_a_server_that_is_gone_or_was_restarted_before_eval_gives_no_reward():
    server = GymServer()
    async with server, gym_of(server) as gym:
        _, info = await opened(gym)
    async with gym_of(server) as gym:
        with pytest.raises(VerifierCrashed, match="the resources server counter, verify: Client"):
            await gym.eval(context(gym_task()), evidence("6", **info))
    async with server, gym_of(server) as gym:
        with pytest.raises(VerifierCrashed, match=r"did not verify: status 400: .*Session not initialized"):
            await gym.eval(context(gym_task()), evidence("6", **info))


async def test_a_lost_session_ends_a_rollout_without_a_reward(tmp_path):
    class Restarted(GymServer):
        async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/verify":
                self.counters.clear()
            return await super().answer(request)

    async with Restarted() as server, gym_site(tmp_path, PERFECT, server) as site:
        rollout = await site.rolled(gym_task())
        assert rollout.ending is not None and rollout.ending.failure is not None
        failure = rollout.ending.failure
        assert (failure.code, failure.blame, rollout.ending.score) == ("verifier_crashed", Blame.INFRA, None)


async def test_the_verification_is_retried_if_the_server_is_briefly_unavailable(tmp_path):
    class Away(GymServer):
        busy = 2

        async def verify(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
            self.busy -= 1
            if self.busy >= 0:
                raise Refused(503, "a moment")
            return await super().verify(counter, body)

    async with Away() as server, gym_site(tmp_path, PERFECT, server) as site:
        rollout = await site.rolled(gym_task())
        assert rollout.ending is not None and rollout.ending.score is not None
        assert (rollout.ending.score.reward, rollout.attempt) == (1.0, 1)
        assert not any("EVAL was tried again" in note for note in rollout.ending.summary.notes)
