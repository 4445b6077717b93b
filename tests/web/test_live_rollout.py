"""The view of a rollout while it runs, in Chromium. The rollouts are sessions: the test is the agent program."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route, expect

from rollyard.core import id_of
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Site, engine_table, finish, open_site, shell, task, waiting_task
from tests.service.skill import CHECK
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor


def acts(turn: Turn) -> Reply:
    """Replies with the number of the turn. Tasks of the native agent say what it does."""
    if "stay" in turn.text:
        return Reply("never", stall_after=0)
    if (request := re.search(r"member 1 waits for (\S+?)[.<]", turn.text)) is not None:
        if turn.number > 0:
            return Reply(finish())
        is_last = id_of(turn.session_id).endswith("-1")
        return Reply(shell(f"until [ -e {request[1]} ]; do sleep 0.05; done" if is_last else "touch done"))
    return Reply(f"reply {turn.number}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def yard(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    async with (
        ScriptedEngine(acts, tokenizer=FolderTokenizer(tokenizer_dir())) as engine,
        open_site(tmp_path_factory.mktemp("yard"), engines=[engine_table(engine)], drain_s=0) as site,
    ):
        yield site


@pytest_asyncio.fixture(loop_scope="session")
async def reader(yard: Site, new_visitor: NewVisitor) -> Visitor:
    return await new_visitor(yard)


@dataclass
class Program:
    """An agent program that runs as long as the test wants."""

    site: Site
    id: str
    key: str

    @classmethod
    async def start(cls, site: Site, rollout_id: str) -> Program:
        opened = await site.post("/v1/sessions", {"id": rollout_id})
        assert opened.status < 300, opened.body
        return cls(site, rollout_id, opened.body["key"])

    async def ask(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends a conversation. Returns it with the reply."""
        headers = {"Authorization": f"Bearer {self.key}"}
        body = {"model": "m", "messages": messages}
        answer = await self.site.post("/v1/chat/completions", body, headers=headers)
        assert answer.status == 200, answer.body
        return [*messages, answer.body["choices"][0]["message"]]

    async def end(self) -> None:
        answer = await self.site.post(f"/v1/sessions/{self.id}/reward", {"reward": 1.0})
        assert answer.status < 300, answer.body
        await self.site.ended(self.id)


def replying(body: object) -> Callable[[Route], Awaitable[None]]:
    return lambda route: route.fulfill(json=body)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_live_conversation_is_one_conversation(yard: Site, reader: Visitor) -> None:
    program = await Program.start(yard, "two-talks")
    main = await program.ask(user("main question"))
    page = await reader.open("/rollouts/default/two-talks")
    stats = page.get_by_role("region", name="Summary").locator(".stat")
    tokens = stats.filter(has_text="sampled tokens").locator(".value")
    messages = page.locator("article.message")
    await expect(messages).to_have_count(2)
    await program.ask({"role": "system", "content": "sub rules"}, user("sub question"))
    await expect(messages).to_have_count(3)
    await expect(messages.nth(0)).to_contain_text("sub rules")
    await expect(messages.nth(2)).to_contain_text("reply 0")
    await program.ask(*main, user("main follow-up"))
    await expect(messages).to_have_count(4)
    await expect(messages.nth(0)).to_contain_text("main question")
    await expect(messages.nth(2)).to_contain_text("main follow-up")
    live = (await yard.get("/v1/rollouts/two-talks/messages")).body
    assert live["turns"] == 3 and live["sampled_tokens"] > 0
    await expect(tokens).to_have_text(str(live["sampled_tokens"]))
    await expect(stats.filter(has_text="turns").locator(".value")).to_have_text("3")
    await program.end()
    await expect(page.locator(".live-mark")).to_have_count(0)
    await expect(messages).to_have_count(4)


async def test_requests_are_shown_while_the_rollout_runs_and_their_tokens_when_it_has_ended(
    yard: Site, reader: Visitor
) -> None:
    program = await Program.start(yard, "asks")
    said = await program.ask(user("first question"))
    page = await reader.open("/rollouts/default/asks?tab=requests")
    turns = page.locator("details.request")
    await expect(turns).to_have_count(1)
    await turns.first.locator("summary").click()
    await expect(turns.first).to_contain_text("first question")
    await expect(turns.first).to_contain_text("available when the rollout has ended")
    await program.ask(*said, user("second question"))
    await expect(turns).to_have_count(2)
    await turns.nth(1).locator("summary").click()
    await expect(turns.nth(1)).to_contain_text("second question")
    await program.ask(*said, user("third question"))  # after which no request is read again before the end
    await program.end()
    await expect(turns).to_have_count(3)
    await expect(turns.first).to_contain_text("Trace 0: ")
    await expect(turns.first).to_contain_text("<|im_start|>user\nfirst question")


async def test_the_requests_of_a_rollout_that_sends_none_say_so_while_it_runs(yard: Site, reader: Visitor) -> None:
    await yard.submit("native", task=task("stay", limits={**task()["limits"], "run_s": 3600, "model_s": 3600}))
    page = await reader.open("/rollouts/default/native?tab=requests")
    await expect(page.get_by_role("tabpanel")).to_contain_text("The native agent sends no requests")
    await yard.delete("/v1/rollouts/native")
    await yard.ended("native")


async def test_the_advantage_appears_when_the_group_is_complete(yard: Site, reader: Visitor, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    body = waiting_task(flag, "member 1 waits for {}.")
    body["data"]["checks"] = CHECK
    assert (await yard.post("/v1/groups", {"id": "late", "task": body, "size": 2})).status < 300
    await yard.ended("late-0")
    page = await reader.open("/rollouts/default/late-0?tab=tokens")
    button = page.get_by_role("button", name="Advantage")
    await expect(button).to_have_attribute("title", "Its group is not complete yet.")
    flag.touch()
    await expect(button).to_be_enabled()
    await expect(page.get_by_role("region", name="Summary")).to_contain_text("advantage 1.0")

    shown = (await yard.get("/v1/groups/late")).body
    for change, why in (
        ({"trainable": False}, "It is not trained on."),
        ({"is_member": False}, "Its group does not count it."),
    ):
        changed = {**shown, "members": [{**shown["members"][0], **change}, shown["members"][1]]}

        await page.route("**/v1/groups/late?*", replying(changed))
        await page.reload()
        await expect(button).to_have_attribute("title", why)
        await expect(page.get_by_role("region", name="Summary")).not_to_contain_text("advantage")


async def test_turns_of_the_conversation_are_those_of_the_calls(yard: Site, reader: Visitor) -> None:
    program = await Program.start(yard, "counts")
    given: list[dict[str, Any]] = [user("how?"), {"role": "assistant", "content": "a given example"}]
    main = await program.ask(*given, user("main question"))
    await program.ask(user("sub question"))
    await program.ask(*main, user("main follow-up"))
    page = await reader.open("/rollouts/default/counts")
    heads = page.locator("article.message header .note")
    expected = ["turn 0 · #0", " · #1", "turn 0 · #2", "turn 0 · #3", "turn 2 · #4", "turn 2 · #5"]
    await expect(heads).to_have_text(expected)
    await page.locator(".calls-table summary").click()
    turns = page.locator(".calls-table tbody td:first-child")
    await expect(turns).to_have_text(["0", "1", "2"])
    await program.end()
    await expect(page.locator(".live-mark")).to_have_count(0)
    await expect(heads).to_have_text(expected)
    await page.reload()
    await expect(heads).to_have_text(expected)
