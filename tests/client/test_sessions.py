"""Sessions through the client, and the examples of the how-to page, run unchanged."""

import asyncio
import logging
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollyard.client import AsyncClient, Client
from rollyard.core.failure import IdConflict, InvalidRequest, SessionConflict
from tests.client.served import Proxy, RunningService, served

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "agents-elsewhere.md"


async def complete(base_url: str, key: str, text: str) -> tuple[int, Any]:
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{base_url}/chat/completions", json=body) as reply,
    ):
        return reply.status, await reply.json()


async def test_a_session_is_opened_used_and_rewarded(client: AsyncClient):
    async with client.session("s", metadata={"n": 1}, group="g", index=3) as session:
        status, body = await complete(session.base_url, session.key, "six times seven")
        assert (status, body["choices"][0]["message"]["content"]) == (200, "It is 42.")
        session_status = await session.status()
        assert (session_status["turns"], session_status["is_open"], session_status["metadata"]) == (1, True, {"n": 1})
        record = await session.reward(1, components={"right": 1.0}, metrics={"calls": 1}, answer="42")
    assert (record.id, record.outcome, record.reward, record.group, record.index) == ("s", "completed", 1.0, "g", 3)
    (trace,) = await client.traces("s")
    assert trace.trainable and trace.reward == 1.0
    assert (await client.get("s")).outcome == "completed", "leaving the block after a reward cancels nothing"


async def test_leaving_the_block_without_a_reward_cancels(client: AsyncClient):
    with pytest.raises(ValueError, match="mine"):
        async with client.session("s"):
            raise ValueError("mine")
    record = await client.wait("s", timeout_s=20)
    assert (record.outcome, record.reward) == ("cancelled", None)
    with pytest.raises(SessionConflict, match=r"has already ended \(cancelled"):
        async with client.session("s"):
            raise AssertionError("it cannot be opened again")


async def test_a_refused_session_is_not_cancelled(client: AsyncClient, caplog: pytest.LogCaptureFixture):
    with pytest.raises(InvalidRequest, match="limits"):
        async with client.session(limits={"run_s": -1}):
            raise AssertionError("it was refused")
    assert "could not be cancelled" not in caplog.text


async def test_a_refused_id_does_not_cancel_another_session_and_can_be_retried(client: AsyncClient):
    async with client.session("s", metadata={"mine": 1}) as session:
        with pytest.raises(IdConflict):
            async with client.session("s", metadata={"mine": 2}):
                raise AssertionError("it was refused")
        assert (await session.status())["is_open"]
        assert (await session.reward(1)).outcome == "completed"
    with pytest.raises(InvalidRequest, match="limits"):
        async with client.session("t", limits={"run_s": -1}):
            raise AssertionError("it was refused")
    async with client.session("t") as session:
        assert (await session.reward(1)).outcome == "completed"


async def test_no_free_slot_in_time_is_a_timeout_and_leaves_nothing_queued(tmp_path: Path):
    async with (
        served(tmp_path, run_slots=1) as service,
        AsyncClient(service.url, service.token) as client,
        client.session("first"),
    ):
        with pytest.raises(TimeoutError, match="session second is in"):
            async with client.session("second", timeout_s=0.2):
                raise AssertionError("there is no free slot")
        assert (await client.wait("second", timeout_s=20)).outcome == "cancelled"
        waiting = asyncio.create_task(client.session("third").__aenter__())
        async with aclosing(client.events(after="0-0")) as events:  # type: ignore[type-var]
            async for event in events:
                if (event.rollout, event.state) == ("third", "ready"):
                    break
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert (await client.wait("third", timeout_s=20)).outcome == "cancelled"


async def test_dropped_responses_are_retried_and_it_is_still_one_session(service: RunningService):
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token, timeout_s=20) as client:
        proxy.cut_replies = 1
        async with client.session(limits={"run_s": 60}) as session:
            assert session.base_url == f"{proxy.url}/v1", (
                "the agent uses the URL at which the client reached the service"
            )
            proxy.break_all()
            proxy.cut_replies = 1
            record = await session.reward(0.5)
        assert (record.reward, record.attempt) == (0.5, 1)
        assert len((await client.list(state="ended")).rollouts) == 1


async def test_an_unreachable_service_does_not_hide_the_error_of_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with served(tmp_path) as service:
        client = await AsyncClient(service.url, service.token, retry_s=0.1).__aenter__()
        session = await client.session("s").__aenter__()
    try:
        with caplog.at_level(logging.WARNING, "rollyard.client"):
            await session.__aexit__(None, None, None)
    finally:
        await client.__aexit__(None, None, None)
    assert "a session could not be cancelled" in caplog.text


async def test_the_sync_client_supports_sessions(service: RunningService):
    def work() -> None:
        with Client(service.url, service.token) as client:
            with client.session("kept") as session:
                assert (session.id, session.root_url, session.key[:4]) == ("kept", service.url, "rys-")
                assert session.status()["is_open"]
                assert session.reward(0.5).reward == 0.5
            with client.session("left"):
                pass
            assert client.wait("left", timeout_s=20).outcome == "cancelled"

    await asyncio.to_thread(work)


async def test_the_examples_of_the_page_run(
    service: RunningService, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
):
    for name, value in service.environ().items():
        monkeypatch.setenv(name, value)
    with_openai, with_anthropic = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(with_openai, PAGE.name, "exec"), names)
    assert await names["rollout"]("What is six times seven?") == 1.0
    exec(compile(with_anthropic, PAGE.name, "exec"), names)
    assert await asyncio.to_thread(names["rollout"], "What is six times seven?") == 1.0
    ended = (await client.list(state="ended")).rollouts
    assert [(record.outcome, record.trainable) for record in ended] == [("completed", True)] * 2
