"""The members of a group beside each other in Chromium, while they run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Browser, Route, expect

from rollyard.core import id_of
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Site, engine_table, finish, open_site, shell, waiting_task
from tests.service.skill import member_of
from tests.web.conftest import NewVisitor


def acts(turn: Turn) -> Reply:
    """Both members look around. Member 1 then waits for a file, and does something else than member 0."""
    if "<|im_start|>" not in turn.text:
        return Reply("ok")  # the probe
    found = re.search(r"wait for go at (\S+?)[.<]", turn.text)
    if turn.number == 0 or found is None:
        return Reply(shell("echo looking"))
    is_first = member_of(id_of(turn.session_id))[1] == 0
    wait = f"while [ ! -e {found[1]} ]; do sleep 0.05; done"
    commands = ["touch done"] if is_first else [wait, "echo nothing"]
    return Reply(shell(commands[turn.number - 1]) if turn.number <= len(commands) else finish())


@pytest_asyncio.fixture(loop_scope="session")
async def site(browser: Browser, tmp_path: Path) -> AsyncGenerator[Site, None]:
    engine = ScriptedEngine(acts, tokenizer=FolderTokenizer(tokenizer_dir()))
    async with engine, open_site(tmp_path / "site", engines=[engine_table(engine)], drain_s=0) as opened:
        yield opened


async def test_a_comparison_follows_members_that_run(site: Site, new_visitor: NewVisitor, tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = {"id": "pair", "task": waiting_task(go), "size": 2, "spares": 0}
    assert (await site.post("/v1/groups", body)).status == 202
    await site.ended("pair-0")
    visitor = await new_visitor(site)
    page = await visitor.open("/groups/default/pair?a=0&b=1")
    compared = page.locator("#compared")
    await expect(compared.locator(".live-mark")).to_have_text("Member 1 runs: this follows.")
    await expect(compared.locator(".parting-head")).to_contain_text("They part")
    other = compared.locator("mark.different").nth(1)
    await expect(other).to_contain_text("while [ ! -e")
    await expect(compared).not_to_contain_text("echo nothing")
    go.touch()
    await expect(compared.locator(".two-sides").last).to_contain_text("echo nothing")
    await expect(compared.locator(".live-mark")).to_have_count(0)
    await expect(page.locator(".badge", has_text="complete").first).to_be_visible()


async def test_a_member_that_has_not_started_says_so_and_then_its_messages_come(
    site: Site, new_visitor: NewVisitor, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    go.touch()
    await site.hold()
    body = {"id": "late", "task": waiting_task(go), "size": 2, "spares": 0}
    assert (await site.post("/v1/groups", body)).status == 202
    visitor = await new_visitor(site)
    page = await visitor.open("/groups/default/late?a=0&b=1")
    await expect(page.locator("#compared")).to_contain_text("has no messages yet")
    assert (await site.call("PATCH", "/v1/pools", json={"init": 4})).status == 200
    await expect(page.locator("#compared .parting-head")).to_contain_text("They part at turn 1")


async def test_messages_stay_while_the_node_of_a_member_does_not_send_them(
    site: Site, new_visitor: NewVisitor, tmp_path: Path
) -> None:
    """The reply is then of no conversation; that of an agent program that has several has a number."""
    go = tmp_path / "go"
    body = {"id": "far", "task": waiting_task(go), "size": 2, "spares": 0}
    assert (await site.post("/v1/groups", body)).status == 202
    await site.ended("far-0")
    is_silent, silent_replies, was_silent = False, 0, asyncio.Event()

    async def answer(route: Route) -> None:
        nonlocal silent_replies
        reply = await (await route.fetch()).json()
        if is_silent:
            reply |= {"messages": [], "message_turns": [], "next": 0, "available": False}
            silent_replies += 1
            if silent_replies == 3:  # what the page has made of the first two is shown
                was_silent.set()
        else:
            reply["conversation"] = 2
        await route.fulfill(json=reply)

    visitor = await new_visitor(site)
    await visitor.page.route("**/v1/rollouts/far-1/messages?*", answer)
    page = await visitor.open("/groups/default/far?a=0&b=1")
    compared = page.locator("#compared")
    await expect(compared.locator("mark.different").nth(1)).to_contain_text("while [ ! -e")
    is_silent = True
    await was_silent.wait()
    await expect(compared).not_to_contain_text("does not send its messages")
    await expect(compared.locator("mark.different").nth(1)).to_contain_text("while [ ! -e")
    is_silent = False
    go.touch()
    await expect(compared.locator(".two-sides").last).to_contain_text("echo nothing")
    await visitor.page.unroute_all(behavior="ignoreErrors")
