"""The view of a rollout while it runs, in Chromium. The rollouts are sessions: the test is the agent program."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.service.site import Site, engine_table, open_site, scripted
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def yard(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    replies = [f"reply {number}" for number in range(8)]
    async with (
        scripted(*replies) as engine,
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


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_live_conversation_is_one_conversation(yard: Site, reader: Visitor) -> None:
    program = await Program.start(yard, "two-talks")
    main = await program.ask(user("main question"))
    page = await reader.open("/rollouts/default/two-talks")
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
    await program.end()
    await expect(page.locator(".live-mark")).to_have_count(0)
    await expect(messages).to_have_count(4)
