"""Sessions: a key, a gateway, a reward, and a trajectory like any other. Over real HTTP, with the real SDKs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollyard.core import State
from rollyard.service.security.keys import SECRET, SessionKeys, load_keys
from rollyard.testing.script import Reply
from tests.service.site import OTHER, TRAINER, Answer, Site, engine_table, open_site, scripted

pytestmark = pytest.mark.slow

HELLO = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
FAST = {"init_s": 20, "run_s": 30, "model_s": 10}


@asynccontextmanager
async def pipeline(folder: Path, *turns: Reply | str, **values: Any) -> AsyncGenerator[Site, None]:
    async with (
        scripted(*turns or ("one", "two", "three")) as engine,
        open_site(folder, engines=[engine_table(engine)], **values) as site,
    ):
        yield site


async def begin(site: Site, **body: Any) -> dict[str, Any]:
    answer = await site.post("/v1/sessions", {"limits": FAST, **body})
    assert answer.status == 201, answer.body
    assert answer.body["is_open"], answer.body
    return answer.body


async def chat(site: Site, session: dict[str, Any], *contents: str, path: str = "/v1/chat/completions") -> Answer:
    messages = [
        {"role": "user" if number % 2 == 0 else "assistant", "content": it} for number, it in enumerate(contents)
    ]
    return await site.post(path, {"model": "any", "messages": messages}, token=session["key"])


async def reward(site: Site, session: dict[str, Any], value: Any = 1.0, **more: Any) -> Answer:
    return await site.post(f"/v1/sessions/{session['id']}/reward", {"reward": value, **more})


# --- a complete session -------------------------------------------------------------------------------


async def test_a_session_becomes_a_trajectory_like_any_other(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site, id="s1", metadata={"task": "t7"}, group="g", index=2)
        assert session["base_url"] == f"{site.url}/v1" and session["root_url"] == site.url
        first = await chat(site, session, "hello")
        assert first.body["choices"][0]["message"]["content"] == "one"
        second = await chat(site, session, "hello", "one", "and now?")
        assert second.body["choices"][0]["message"]["content"] == "two"
        looked = (await site.get("/v1/sessions/s1")).body
        assert (looked["state"], looked["turns"], looked["forks"]) == ("run", 2, {})
        assert looked["sampled_tokens"] > 0 and "key" not in looked

        answer = await reward(site, session, 0.5, components={"style": 1}, metrics={"steps": 2}, answer="two")
        assert answer.status == 200
        record = answer.body
        assert (record["state"], record["outcome"], record["reward"]) == ("ended", "completed", 0.5)
        assert record["score"]["components"] == {"style": 1.0} and record["score"]["metrics"] == {"steps": 2.0}
        assert record["trainable"] and (record["group"], record["index"]) == ("g", 2)
        assert record["task"]["data"] == {"metadata": {"task": "t7"}}
        whole = (await site.get("/v1/rollouts/s1?include=trajectory")).body["trajectory"]
        assert [trace["fork_reason"] for trace in whole["traces"]] == [None], "one conversation, one trace"
        assert len(whole["traces"][0]["spans"]) == 2
        assert (whole["turns"], whole["ended_by"], whole["info"]["answer"]) == (2, "reward", "two")
        after = (await site.get("/v1/sessions/s1")).body
        assert (after["turns"], after["is_open"], after["reward"]) == (2, False, 0.5)
        assert after["sampled_tokens"] == looked["sampled_tokens"]


async def test_a_strict_session_refuses_parameters_that_would_be_overridden(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        for is_strict, status in ((False, 200), (True, 400)):
            session = await begin(site, strict=is_strict)
            body = {**HELLO, "temperature": 0.1}
            answer = await site.post("/v1/chat/completions", body, token=session["key"])
            assert answer.status == status
            if is_strict:
                assert answer.body["error"]["param"] == "temperature"
            else:
                assert answer.body["warnings"] == ["temperature: the task's sampling applies"]
            await site.delete(f"/v1/sessions/{session['id']}")
        refused = await site.post("/v1/sessions", {"strict": "perhaps"})
        assert refused.status == 422


async def test_the_real_sdks_work_unchanged_with_a_session(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        async with openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["key"]) as client:
            completion = await client.chat.completions.create(
                model=session["model"], messages=[{"role": "user", "content": "hello"}]
            )
            assert completion.choices[0].message.content == "one"
            responded = await client.responses.create(model=session["model"], input="something else")
            assert responded.output_text == "one"
            assert [model.id async for model in client.models.list()] == [session["model"]]
        async with anthropic.AsyncAnthropic(base_url=session["root_url"], api_key=session["key"]) as client:
            hello: list[Any] = [{"role": "user", "content": "hello again"}]
            counted = await client.messages.count_tokens(model=session["model"], messages=hello)
            async with client.messages.stream(model=session["model"], max_tokens=64, messages=hello) as stream:
                message = await stream.get_final_message()
            usage = message.usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens > 0
            assert [part.text for part in message.content if part.type == "text"] == ["one"]
        assert (await reward(site, session)).body["outcome"] == "completed"


async def test_forks_and_calls_by_path_are_counted(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        await chat(site, session, "hello")
        await chat(site, session, "another matter")
        assert (await site.get(f"/v1/sessions/{session['id']}")).body["forks"] == {"new conversation": 1}
        await reward(site, session)
        text = (await site.get("/metrics")).body.decode()
        assert 'rollyard_forks_total{reason="new conversation"} 1.0' in text
        assert 'rollyard_gateway_requests_total{result="new"} 2.0' in text
        assert 'route="/v1/chat/completions",status="200"} 2.0' in text


async def test_the_same_id_is_the_same_session_with_the_same_key(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        first = await begin(site, id="mine")
        assert (await begin(site, id="mine"))["key"] == first["key"]
        other = await site.post("/v1/sessions", {"id": "mine", "limits": FAST, "metadata": {"a": 1}})
        assert (other.status, other.code) == (409, "id_conflict")
        assert (await begin(site, id="other"))["key"] != first["key"]


async def test_a_runs_sampling_and_limits_apply_but_its_environment_does_not(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        defaults = {"limits": {"max_turns": 7}, "sampling": {"top_p": 0.5}, "agent": {"options": {"tools": ["shell"]}}}
        assert (await site.post("/v1/runs", {"id": "r", "defaults": defaults})).status == 201
        session = await begin(site, run="r")
        task = (await site.get(f"/v1/rollouts/{session['id']}")).body["task"]
        assert (task["limits"]["max_turns"], task["sampling"]["top_p"], task["limits"]["run_s"]) == (7, 0.5, 30)
        assert "tools" not in task["agent"]["options"]


# --- access -------------------------------------------------------------------------------------------


async def test_a_sessions_key_is_valid_for_its_own_gateway_only(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        key = session["key"]
        for method, path in (
            ("GET", "/v1/status"),
            ("GET", f"/v1/sessions/{session['id']}"),
            ("POST", f"/v1/sessions/{session['id']}/reward"),
            ("POST", "/v1/sessions"),
            ("GET", f"/v1/rollouts/{session['id']}"),
            ("GET", "/metrics"),
        ):
            refused = await site.call(method, path, token=key, json={} if method == "POST" else None)
            assert (refused.status, refused.code) == (401, "unauthorized"), path
        other = await begin(site)
        forged = key.replace(session["id"], other["id"])
        for token in (site.token, TRAINER, forged, key[:-1], "", "rys-", "rys--", f"{key}x"):
            refused = await site.post("/v1/chat/completions", HELLO, token=token)
            assert refused.status == 401, token
            assert refused.body["error"]["message"] and refused.headers["x-should-retry"] == "false"
            refused = await site.post("/v1/messages", HELLO, token="", headers={"x-api-key": token or "none"})
            assert refused.status == 401
            assert (refused.body["type"], refused.body["error"]["type"]) == ("error", "authentication_error")
        assert (await site.get("/v1/models", token=site.token)).status == 401
        assert (await site.get("/v1/models", token=key)).status == 200
        both = {"authorization": f"Bearer {site.token}", "x-api-key": key}  # an SDK may send a token of its own
        assert (await site.get("/v1/models", token="", headers=both)).status == 200
        looked = (await site.get(f"/v1/sessions/{session['id']}")).body
        assert looked["turns"] == 0


@pytest.mark.parametrize("headers", [{"origin": "http://evil.example"}, {"host": "evil.example"}])
async def test_browsers_and_foreign_hosts_are_refused_here_too(tmp_path: Path, headers: dict[str, str]) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        refused = await site.post("/v1/chat/completions", HELLO, token=session["key"], headers=headers)
        assert refused.status == 403
        assert refused.body["error"]["code"] == "foreign_host"


async def test_a_body_beyond_the_limit_is_refused_in_the_dialects_format(tmp_path: Path) -> None:
    async with pipeline(tmp_path, max_body_bytes=2000) as site:
        session = await begin(site)
        refused = await chat(site, session, "x" * 3000)
        assert refused.status == 413 and refused.body["error"]["message"]

        async def streamed() -> AsyncGenerator[bytes, None]:
            for _ in range(5):
                yield b" " * 1000

        refused = await site.call("POST", "/v1/messages", token=session["key"], data=streamed())
        assert refused.status == 413 and refused.body["type"] == "error"


async def test_an_unexpected_error_has_the_dialects_format(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        depth = 990  # Python can read it but not write it
        nested = '{"a":' * depth + "1" + "}" * depth
        tool = f'{{"name": "f", "input_schema": {{"type": "object", "properties": {nested}}}}}'
        body = (
            f'{{"model": "m", "max_tokens": 5, "messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}]}}'
        )
        broken = await site.call("POST", "/v1/messages", token=session["key"], data=body)
        assert broken.status in (400, 500), broken.body
        assert (broken.body["type"], set(broken.body["error"])) == ("error", {"type", "message"})
        assert (await chat(site, session, "hello")).status == 200, "and the session continues"


async def test_other_trainers_sessions_cannot_be_opened_rewarded_or_cancelled(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        await site.post("/v1/runs", {"id": "theirs"}, token=TRAINER)
        body = {"id": "s", "run": "theirs", "limits": FAST}
        assert (await site.post("/v1/sessions", body, token=TRAINER)).status == 201
        refused = [
            await site.post("/v1/sessions", body, token=OTHER),
            await site.post("/v1/sessions/s/reward", {"reward": 1}, token=OTHER),
            await site.delete("/v1/sessions/s", token=OTHER),
        ]
        assert [(answer.status, answer.code) for answer in refused[:2]] == [(404, "not_found")] * 2
        assert refused[2].body["state"] == "cancelled_before_submit", (
            "cancels a session of their own, if one is submitted"
        )
        assert (await site.post("/v1/sessions/s/reward", {"reward": 1}, token=TRAINER)).status == 200


def test_keys_are_derived_from_the_id_a_number_and_a_private_secret(tmp_path: Path) -> None:
    keys = load_keys(tmp_path)
    assert (tmp_path / SECRET).stat().st_mode & 0o777 == 0o600
    assert load_keys(tmp_path).make("r~a-b.c:d", 7) == keys.make("r~a-b.c:d", 7) != keys.make("r~a-b.c", 7)
    assert keys.session_of(keys.make("r~a-b.c:d", 7)) == ("r~a-b.c:d", 7)
    assert keys.make("a", 7) != keys.make("a", 8)
    assert SessionKeys("another secret").session_of(keys.make("a", 7)) is None
    for wrong in ("", "rys-", "rys-a", "rys-a-", "rys-a-7-", keys.make("a", 7)[4:], keys.make("", 7)):
        assert keys.session_of(wrong) is None


# --- the end of a session -----------------------------------------------------------------------------


async def test_a_reward_is_accepted_once(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        await chat(site, session, "hello")
        first = await reward(site, session, 1, answer="x")
        assert (await reward(site, session, 1.0, answer="x")).body == first.body
        for more in ({"value": 0}, {"answer": "y"}, {}, {"components": {"a": 1}, "answer": "x"}):
            other = await reward(site, session, more.pop("value", 1), **more)
            assert (other.status, other.code) == (409, "session_conflict")
            assert (other.body["outcome"], other.body["reward"]) == ("completed", 1.0)
        run = (await site.get(f"/v1/rollouts/{session['id']}")).body
        await site.post(f"/v1/runs/{run['run']}/ack", {"cursor": run["cursor"]})
        await site.served.app_state.pipeline.sweep()
        assert (await reward(site, session, 1.0, answer="x")).status == 200, "even without its trajectory"
        assert (await reward(site, session, 0.0)).status == 409


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '"1"', "true", "null", "1" + "0" * 400])
async def test_a_reward_must_be_a_finite_number(tmp_path: Path, number: str) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site)
        for body in (f'{{"reward": {number}}}', f'{{"reward": 1, "components": {{"a": {number}}}}}'):
            refused = await site.call("POST", f"/v1/sessions/{session['id']}/reward", data=body)
            assert (refused.status, refused.code) == (422, "invalid_request")
        assert (await site.get(f"/v1/sessions/{session['id']}")).body["is_open"]


async def test_other_rollouts_cannot_be_used_as_sessions(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        await site.hold()
        await site.submit("plain")
        for name in ("plain", "unknown"):
            answers = [
                await site.get(f"/v1/sessions/{name}"),
                await site.post(f"/v1/sessions/{name}/reward", {"reward": 1}),
            ]
            assert [(answer.status, answer.code) for answer in answers] == [(404, "not_found")] * 2
        answer = await site.delete("/v1/sessions/plain")
        assert (answer.status, answer.code) == (404, "not_found")
        task = {"environment": "session", "agent": {"name": "native"}}
        refused = await site.post("/v1/rollouts", {"task": task})
        assert (refused.status, refused.code) == (422, "task_invalid")
        task = {"environment": "shell", "data": {"instruction": "x", "checks": []}, "agent": {"name": "session"}}
        assert (await site.post("/v1/rollouts", {"task": task})).code == "task_invalid"


async def test_a_deleted_session_is_cancelled_without_a_reward(tmp_path: Path) -> None:
    async with pipeline(tmp_path, "one", Reply("two", latency_s=60)) as site:
        session = await begin(site)
        await chat(site, session, "hello")
        waiting = asyncio.create_task(chat(site, session, "hello", "one", "and?"))
        answer = await site.delete(f"/v1/sessions/{session['id']}")
        assert answer.status == 202
        record = await site.ended(session["id"])
        assert (record["outcome"], record["reward"]) == ("cancelled", None)
        await waiting  # it returns and does not hang
        late = await reward(site, session)
        assert (late.status, late.code, late.body["outcome"]) == (409, "session_conflict", "cancelled")
        closed = await chat(site, session, "hello")
        assert closed.status == 503 and "not open" in closed.body["error"]["message"]


async def test_a_cancel_that_arrives_before_its_session_is_effective(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        answer = await site.delete("/v1/sessions/s")
        assert (answer.status, answer.body) == (202, {"id": "s", "state": "cancelled_before_submit"})
        late = await site.post("/v1/sessions", {"id": "s", "limits": FAST})
        assert (late.status, late.body["is_open"], late.body["outcome"]) == (201, False, "cancelled")


async def test_an_expired_session_has_no_reward(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site, limits={**FAST, "run_s": 5})
        assert (await chat(site, session, "hello")).status == 200
        record = await site.ended(session["id"])
        assert (record["outcome"], record["reward"], record["trainable"]) == ("failed", None, False)
        assert (record["failure"]["code"], record["failure"]["blame"]) == ("session_abandoned", "client")
        assert record["attempt"] == 1 and record["summary"]["sampled_tokens"] > 0
        late = await reward(site, session)
        assert (late.status, late.body["failure_code"]) == (409, "session_abandoned")


async def test_after_a_limit_a_reward_is_accepted_and_the_rollout_is_truncated(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site, limits={**FAST, "max_turns": 1})
        assert (await chat(site, session, "hello")).status == 200
        refused = await chat(site, session, "hello", "one", "and?")
        assert (refused.status, refused.headers["x-should-retry"]) == (400, "false")
        looked = (await site.get(f"/v1/sessions/{session['id']}")).body
        assert (looked["is_open"], looked["limit"]) == (True, "turn_limit")
        record = (await reward(site, session, 0.25)).body
        assert (record["outcome"], record["reward"], record["trainable"]) == ("truncated", 0.25, True)
        assert record["failure"]["code"] == "turn_limit"
        assert (await reward(site, session, 0.25)).status == 200


async def test_a_conversation_that_did_not_fit_truncates_unless_the_agent_continued(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        for goes_on, outcome in ((False, "truncated"), (True, "completed")):
            session = await begin(site, limits={**FAST, "max_context": 60})
            assert (await chat(site, session, "hello")).status == 200
            refused = await chat(site, session, "hello", "one", "word " * 100)
            assert (refused.status, refused.body["error"]["code"]) == (400, "context_length_exceeded")
            if goes_on:
                assert (await chat(site, session, "hello", "one", "shorter")).status == 200
            record = (await reward(site, session)).body
            assert (record["outcome"], record["reward"]) == (outcome, 1.0)
            assert (record["failure"] or {}).get("code") == (None if goes_on else "context_limit")


async def test_an_engine_that_fails_permanently_loses_the_session_without_a_retry(tmp_path: Path) -> None:
    async with pipeline(tmp_path, "one", Reply(fault="not_json")) as site:
        session = await begin(site)
        await chat(site, session, "hello")
        assert (await chat(site, session, "hello", "one", "and?")).status == 503
        record = await site.ended(session["id"])
        assert (record["outcome"], record["reward"], record["attempt"]) == ("failed", None, 1)
        assert (record["failure"]["code"], record["failure"]["blame"]) == ("session_lost", "infra")
        assert record["failure"]["data"]["cause"].startswith("engine_")


# --- slots --------------------------------------------------------------------------------------------


async def test_a_session_waits_for_a_free_slot_and_then_opens(tmp_path: Path) -> None:
    async with pipeline(tmp_path, run_slots=1) as site:
        first = await begin(site)
        second = (await site.post("/v1/sessions?wait_s=0.2", {"id": "second", "limits": FAST})).body
        assert not second["is_open"] and second["state"] != "run"
        early = await chat(site, second, "hello")
        assert early.status == 503
        unready = await site.post("/v1/sessions/second/reward?wait_s=0", {"reward": 1})
        assert (unready.status, unready.code) == (409, "session_conflict")
        opening = asyncio.create_task(site.get("/v1/sessions/second?wait_s=20"))
        await reward(site, first)
        assert (await opening).body["is_open"]
        assert (await chat(site, second, "hello")).status == 200


async def test_a_full_queue_returns_retry_after(tmp_path: Path) -> None:
    async with pipeline(tmp_path, max_queued=1) as site:
        await site.hold()
        assert (await site.post("/v1/sessions?wait_s=0", {})).status == 201
        full = await site.post("/v1/sessions?wait_s=0", {})
        assert (full.status, full.code) == (429, "queue_full")
        assert full.headers["retry-after"]


# --- restarts -----------------------------------------------------------------------------------------


async def test_a_restart_loses_an_open_session_and_reports_it(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site, id="s")
        await chat(site, session, "hello")
    async with pipeline(tmp_path) as site:
        record = await site.ended("s")
        assert (record["outcome"], record["reward"], record["failure"]["code"]) == ("failed", None, "session_lost")
        assert record["failure"]["blame"] == "infra" and record["attempt"] == 2
        late = await reward(site, session)
        assert (late.status, late.body["failure_code"]) == (409, "session_lost")
        again = (await site.post("/v1/sessions", {"id": "s", "limits": FAST})).body
        assert (again["state"], again["is_open"], again["key"]) == ("ended", False, session["key"])


async def test_a_queued_session_opens_after_a_restart_with_the_same_key(tmp_path: Path) -> None:
    async with pipeline(tmp_path, run_slots=1) as site:
        await begin(site, id="first")
        waiting = (await site.post("/v1/sessions?wait_s=0.2", {"id": "s", "limits": FAST})).body
        assert not waiting["is_open"]
        assert (await site.served.app_state.store.get("s")).state is not State.RUN
    async with pipeline(tmp_path) as site:
        session = await begin(site, id="s")
        assert session["key"] == waiting["key"]
        assert (await chat(site, session, "hello")).status == 200
        assert (await reward(site, session)).body["outcome"] == "completed"


async def test_a_saved_reward_survives_a_restart(tmp_path: Path) -> None:
    async with pipeline(tmp_path) as site:
        session = await begin(site, id="s")
        await chat(site, session, "hello")
        assert (await site.call("PATCH", "/v1/pools", json={"eval": 0})).status == 200
        posted = await site.post("/v1/sessions/s/reward?wait_s=1", {"reward": 0.75})
        assert posted.status == 202, posted.body
        async with asyncio.timeout(60):
            while (await site.get("/v1/rollouts/s")).body["state"] != "eval":
                await asyncio.sleep(0.02)
        again = await site.post("/v1/sessions/s/reward?wait_s=0.1", {"reward": 0.75})
        assert (again.status, again.body["state"]) == (202, "eval")
        assert (await site.post("/v1/sessions/s/reward?wait_s=0.1", {"reward": 0.5})).status == 409
    async with pipeline(tmp_path) as site:
        record = await site.ended("s")
        assert (record["outcome"], record["reward"], record["attempt"]) == ("completed", 0.75, 1)
        assert (await reward(site, session, 0.75)).status == 200
