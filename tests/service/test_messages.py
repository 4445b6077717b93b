"""GET /v1/rollouts/{id}/messages shows a conversation while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline import message_page
from rollyard.testing.script import Reply
from tests.service.site import Site, engine_table, finish, open_site, scripted, shell


async def messages(site: Site, query: str = "") -> dict[str, Any]:
    answer = await site.get(f"/v1/rollouts/r1/messages{query}")
    assert answer.status == 200, answer.body
    return answer.body


async def test_the_messages_appear_while_the_rollout_runs(tmp_path: Path) -> None:
    waiting = Reply("never", stall_after=0)
    async with (
        scripted(shell("echo one two # \ud800"), waiting) as engine,  # half of a surrogate pair cannot be encoded
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.hold()
        await site.submit("r1")
        queued = await messages(site)
        assert (queued["state"], queued["messages"], queued["next"]) == ("queued", [], 0)
        await site.call("PATCH", "/v1/pools", json={"init": 1})
        async with asyncio.timeout(60):
            while (running := await messages(site))["messages"][-1:] == [] or running["messages"][-1]["role"] != "tool":
                await asyncio.sleep(0.02)
        assert (running["state"], running["turns"], running["attempt"]) == ("run", 1, 1)
        assert running["sampled_tokens"] > 0 and running["available"] is True
        assert "one two" in running["messages"][-1]["content"]
        seen = running["next"]
        assert seen == len(running["messages"])
        assert running["message_turns"] == [None, 0, None]
        rest = await messages(site, f"?after={seen - 1}")
        assert rest["messages"] == running["messages"][-1:] and rest["message_turns"] == [None]
        assert (await messages(site, "?after=1000"))["messages"] == []
        await site.delete("/v1/rollouts/r1")


async def test_another_conversation_of_an_agent_program_has_another_number(tmp_path: Path) -> None:
    async with (
        scripted("one", "two", "three", "four") as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        opened = (await site.post("/v1/sessions", {"id": "r1"})).body
        key = {"Authorization": f"Bearer {opened['key']}"}

        async def ask(*messages: dict[str, str]) -> dict[str, Any]:
            answer = await site.post("/v1/chat/completions", {"model": "m", "messages": messages}, headers=key)
            assert answer.status == 200, answer.body
            return answer.body["choices"][0]["message"]

        main = [{"role": "user", "content": "Hello"}]
        main.append(await ask(*main))
        first = await messages(site)
        await ask({"role": "system", "content": "Search."}, {"role": "user", "content": "where?"})
        second = await messages(site)
        assert second["messages"][0]["content"] == "Search." and second["conversation"] != first["conversation"]
        await ask(*main, {"role": "user", "content": "And?"})
        third = await messages(site, "?after=3")
        assert third["conversation"] not in (first["conversation"], second["conversation"])
        assert len(third["messages"]) == 1 and third["next"] == 4
        assert third["message_turns"] == [2]
        whole = await messages(site)
        assert whole["messages"][:2] == first["messages"] and whole["message_turns"] == [None, 0, None, 2]
        calls = (await site.get("/v1/rollouts/r1/timeline")).body["attempts"][0]["parts"]
        assert [one["turn"] for one in calls if one["kind"] == "model"] == [0, 1, 2]
        await site.post("/v1/sessions/r1/reward", {"reward": 1.0})
        await site.ended("r1")
        assert (await messages(site))["message_turns"] == [None, 0, None, 2]


async def test_the_messages_of_an_ended_rollout_are_those_of_its_trajectory(tmp_path: Path) -> None:
    async with (
        scripted(shell("echo one"), finish()) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.submit("r1")
        await site.ended("r1")
        record = (await site.get("/v1/rollouts/r1?include=trajectory")).body
        ended = await messages(site)
        assert ended["messages"] == record["trajectory"]["messages"]
        assert (ended["state"], ended["turns"]) == ("ended", record["trajectory"]["turns"])
        assert ended["message_turns"] == record["trajectory"]["info"]["message_turns"] == [None, 0, None, 1, None]
        answer = await site.get("/v1/rollouts/r1/messages?after=-1")
        assert answer.status == 422


async def test_a_page_of_messages_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_page, "PAGE_BYTES", 10)
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.submit("r1")
        await site.ended("r1")
        whole = (await site.get("/v1/rollouts/r1?include=trajectory")).body["trajectory"]["messages"]
        first = await messages(site)
        assert (first["messages"], first["next"]) == (whole[:1], 1)
        second = await messages(site, "?after=1")
        assert (second["messages"], second["next"]) == (whole[1:2], 2)


async def test_an_unknown_rollout_has_no_messages(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.get("/v1/rollouts/r1/messages")).code == "not_found"
