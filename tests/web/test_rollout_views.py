"""The views of rollouts, of one rollout and of a group in Chromium, with a real service."""

from __future__ import annotations

import json
import re
from array import array
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from rollyard.core import id_of
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Site, engine_table, finish, open_site, shell, task, waiting_task
from tests.service.skill import CHECK
from tests.web.conftest import NewVisitor
from tests.web.results import Results, table
from tests.web.visitor import Visitor

ROLLOUT = "/rollouts/default/pair-0"
TABS = ("conversation", "tokens", "traces", "requests", "terminal", "evidence", "record")


def acts(turn: Turn) -> Reply:
    """All look around; then member 0 of `pair` solves its task and the others do something else."""
    if "<|im_start|>" not in turn.text:
        return Reply("ok")  # the probe
    if turn.number == 0:
        return Reply("<think>I look first.</think>Looking." + shell("echo $PPID; seq 1 99"))
    if "wait for go" in turn.text and turn.number == 1:
        found = re.search(r"wait for go at (\S+?)[.<]", turn.text)
        assert found is not None
        return Reply(shell(f"while [ ! -e {found[1]} ]; do sleep 0.05; done; echo went"))
    if turn.number == 1:
        return Reply(shell("touch done" if id_of(turn.session_id) == "pair-0" else "echo nothing"))
    return Reply(finish())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def yard(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    """A service with the group `pair`, whose member 0 passes, and the rollout `deleted`, whose traces are deleted."""
    engine = ScriptedEngine(acts, tokenizer=FolderTokenizer(tokenizer_dir()))
    async with engine, open_site(tmp_path_factory.mktemp("yard"), engines=[engine_table(engine)], drain_s=0) as site:
        assert (await site.post("/v1/runs", {"id": "old"})).status == 201
        answer = await site.post("/v1/rollouts", {"run": "old", "rollouts": [{"id": "deleted", "task": task("gone")}]})
        assert answer.status == 202, answer.body
        ended = await site.ended("deleted")
        answer = await site.post("/v1/runs/old/ack", {"cursor": ended["cursor"]})
        assert answer.status == 200, answer.body
        body = task("write a file")
        body["data"]["checks"] = CHECK
        assert (await site.post("/v1/groups", {"id": "pair", "task": body, "size": 2})).status == 202
        while (await site.get("/v1/groups/pair?wait_s=20")).body["state"] == "open":
            pass
        yield site


@pytest_asyncio.fixture(loop_scope="session")
async def reader(yard: Site, new_visitor: NewVisitor) -> Visitor:
    return await new_visitor(yard)


async def altered(page: Page, path: str, change: Callable[[dict[str, Any]], None], site: Site) -> None:
    """Replies to this address as the service does, with a change."""

    async def answer(route: Route) -> None:
        parts = urlsplit(route.request.url)
        body = (await site.get(f"{parts.path}?{parts.query}")).body
        change(body)
        await route.fulfill(json=body)

    await page.route(lambda url: url.split("/v1", 1)[-1].startswith(path), answer)


# --- the table


async def test_the_table_has_few_rows_in_the_page_and_reads_others_while_one_scrolls(reader: Visitor) -> None:
    page, _ = await table(reader)
    rows = page.locator(".rows-space [role=row]")
    await expect(rows.first).to_contain_text("task 4999")
    assert await rows.count() < 60
    for pages in range(2, 6):
        await page.get_by_role("grid").evaluate("(grid) => { grid.scrollTop = grid.scrollHeight; }")
        await page.wait_for_function(
            "(height) => Number(document.querySelector('.rows-space').style.height.slice(0, -2)) >= height",
            arg=36 * 100 * pages,
        )
    await page.get_by_role("grid").evaluate("(grid) => { grid.scrollTop = 36 * 250; }")
    await expect(page.get_by_role("row", name=re.compile("task 4749"))).to_be_visible()
    assert await rows.count() < 60


async def test_new_rows_wait_until_the_reader_asks_for_them(reader: Visitor) -> None:
    page, results = await table(reader)
    await page.get_by_role("grid").evaluate("(grid) => { grid.scrollTop = 360; }")
    seen = page.get_by_role("row", name=re.compile("task 4985"))
    before = await seen.bounding_box()
    results.count += 12
    button = page.get_by_role("button", name="12 new")
    await expect(button).to_be_visible()
    assert await seen.bounding_box() == before
    await button.click()
    await expect(page.get_by_role("row", name=re.compile("task 5011"))).to_be_in_viewport()
    await expect(button).to_have_count(0)


async def test_keys_move_in_the_table_and_the_back_button_returns_to_the_row(reader: Visitor) -> None:
    reader.expect_status(404)
    page, _ = await table(reader)
    await page.get_by_role("grid").focus()
    for _ in range(3):
        await page.keyboard.press("ArrowDown")
    for _ in range(2):
        await page.keyboard.press("PageDown")
    selected = page.locator("[role=row][aria-selected=true]")
    name = await selected.locator("a").inner_text()
    await page.keyboard.press("Enter")
    await page.wait_for_url(re.compile(r"/rollouts/default/r\d+$"))
    await page.go_back()
    await expect(page.get_by_role("grid")).to_be_visible()
    await expect(selected.locator("a")).to_have_text(name)
    await expect(selected).to_be_in_viewport()


async def test_the_address_holds_all_filters(reader: Visitor, yard: Site, new_visitor: NewVisitor) -> None:
    page, _ = await table(reader)
    await page.get_by_role("button", name="More filters").click()
    await page.get_by_label("Search in messages").fill("needle")
    await page.get_by_label("Environment").fill("shell")
    await page.get_by_label("Code").fill("sandbox_lost")
    await page.get_by_label("Weight version").fill("7")
    await page.get_by_label("Reward from").fill("0.5")
    await page.get_by_label("Reward to").fill("1")
    await page.get_by_label("Outcome").select_option("failed")
    await page.get_by_label("Trainable").select_option("false")
    await page.locator("select[name=run]").select_option("default")
    wanted = {
        "search": "needle",
        "environment": "shell",
        "code": "sandbox_lost",
        "version": "7",
        "min_reward": "0.5",
        "max_reward": "1",
        "outcome": "failed",
        "trainable": "false",
        "run": "default",
    }
    await page.wait_for_function(
        "(count) => [...new URLSearchParams(location.search)].length === count", arg=len(wanted)
    )

    other = await new_visitor(yard)
    linked, results = await table(other, urlsplit(page.url).path + "?" + urlsplit(page.url).query)
    assert {name: value for name, value in results.queries[0].items() if name != "limit"} == wanted
    await expect(linked.get_by_label("Search in messages")).to_have_value("needle")
    await expect(linked.get_by_label("Reward from")).to_have_value("0.5")
    row = linked.locator(".rows-space [role=row]").first
    await expect(row.locator("mark")).to_have_text("needle")
    await expect(row).to_contain_text("before needle after <b>")


async def test_a_narrow_table_has_cards(yard: Site, new_visitor: NewVisitor) -> None:
    visitor = await new_visitor(yard, width=390)
    page, _ = await table(visitor)
    box = await page.locator(".rows-space [role=row]").first.bounding_box()
    assert box is not None and box["width"] <= 390 and box["height"] == 62
    row = page.locator(".rows-space [role=row]").first
    for text in ("task 4999", "failed", "3 turns"):
        await expect(row).to_contain_text(text)
    assert await page.evaluate("document.documentElement.scrollWidth") == 390


# --- one rollout


async def test_a_rollout_shows_how_it_ended_and_its_conversation(reader: Visitor, yard: Site) -> None:
    def colour(body: dict[str, Any]) -> None:
        message = body["trajectory"]["messages"][2]
        palette = "\x1b[38;5;40mgreen\x1b[0m \x1b[38;2;40;60;250;1mblue\x1b[0m \x1b[38;5mplain\x1b[0m"
        message["content"] = f"\x1b[31mred\x1b[0m\x1b]0;title\x07 {palette}\n" + message["content"]

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", colour, yard)
    page = await reader.open(ROLLOUT)
    head = page.get_by_role("region", name="Summary")
    for text in ("completed", "trainable", "run default", "group pair", "advantage 1.0"):
        await expect(head).to_contain_text(text)
    messages = page.locator("article.message")
    await expect(messages.nth(1)).to_contain_text("Looking.")
    await expect(messages.nth(1)).not_to_contain_text("I look first.")
    await messages.nth(1).get_by_text("Reasoning").click()
    await expect(messages.nth(1)).to_contain_text("I look first.")
    await expect(messages.nth(2).locator(".fg1")).to_have_text("red")
    await expect(messages.nth(2).locator(".fg2")).to_have_text("green")  # the nearest of a terminal's eight colours
    await expect(messages.nth(2).locator(".fg4.bold")).to_have_text("blue")
    await expect(messages.nth(2).locator("[class^=fg]")).to_have_count(3)
    await expect(messages.nth(2)).not_to_contain_text("title")
    last = re.compile(r"(?<!\d)99(?!\d)")  # its first line is a pid
    await expect(messages.nth(2)).not_to_contain_text(last)
    await messages.nth(2).get_by_role("button", name="Show more").click()
    await expect(messages.nth(2)).to_contain_text(last)
    await expect(messages.nth(3).locator(".command")).to_contain_text("touch done")


async def test_a_progress_bar_has_a_line_for_each_of_its_states(reader: Visitor, yard: Site) -> None:
    def draw(body: dict[str, Any]) -> None:
        messages = body["trajectory"]["messages"]
        messages[0]["content"] = "first\r\nsecond\rthird"
        messages[2]["content"] = "\r10 %\r\x1b[K50 %\r100 %\r\r\ndone"

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", draw, yard)
    page = await reader.open(ROLLOUT)
    messages = page.locator("article.message")
    await expect(messages.nth(2)).to_contain_text("done")
    assert await messages.nth(2).locator("pre").text_content() == "\n10 %\n50 %\n100 %\ndone"
    assert await messages.nth(0).locator("pre").text_content() == "first\nsecond\u240dthird"


async def test_a_link_leads_to_a_message(reader: Visitor, yard: Site) -> None:
    def lengthen(body: dict[str, Any]) -> None:
        body["trajectory"]["messages"] += [{"role": "user", "content": f"note {number}"} for number in range(700)]

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", lengthen, yard)
    page = await reader.open(ROLLOUT)
    assert await page.locator("article.message").count() == 500
    await page.get_by_role("button", name="Show 207 more messages").click()
    await page.get_by_role("link", name="#650", exact=True).click()
    assert page.url.endswith("?message=650")
    await page.reload()
    await expect(page.locator("#message-650")).to_be_focused()
    await expect(page.locator("#message-650")).to_be_in_viewport()
    await expect(page.locator("#message-650")).to_contain_text("note 643")


async def test_a_running_rollout_is_shown_while_it_runs_and_when_it_ends(
    reader: Visitor, yard: Site, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    await yard.submit("walks", task=waiting_task(go))
    page = await reader.open("/rollouts/default/walks")
    await expect(page.locator(".command").last).to_contain_text("while [ ! -e")
    await expect(page.get_by_role("region", name="Summary")).to_contain_text("run")
    await page.get_by_role("tab", name="Tokens").click()
    await expect(page.get_by_role("tabpanel")).to_contain_text("when the rollout has ended")
    await page.get_by_role("tab", name="Conversation").click()
    go.touch()
    await expect(page.get_by_role("tabpanel")).to_contain_text("went")
    await expect(page.get_by_role("region", name="Summary")).to_contain_text("completed")
    await expect(page.locator(".live-mark")).to_have_count(0)


async def test_a_browser_whose_clock_is_wrong_shows_right_times(reader: Visitor, yard: Site, tmp_path: Path) -> None:
    go = tmp_path / "go"
    await yard.submit("ticks", task=waiting_task(go))
    await reader.context.add_init_script("{ const now = Date.now; Date.now = () => now() + 5 * 3600e3; }")
    page = await reader.open("/rollouts/default/ticks")
    lanes = page.get_by_role("group", name="Times of attempt 1")
    await expect(page.locator(".part.kind-run.running")).to_be_attached()
    await lanes.focus()
    await page.keyboard.press("End")
    status = page.locator(".time-card").get_by_role("status")
    await expect(status).to_contain_text("so far")
    assert " h " not in await status.inner_text()
    go.touch()
    await yard.ended("ticks")


async def test_arrow_keys_walk_through_the_waterfall(reader: Visitor) -> None:
    parts: list[dict[str, Any]] = [
        {"kind": "queued", "start_s": 0, "end_s": 4},
        {"kind": "run", "start_s": 4, "end_s": 10},
        {"kind": "model", "start_s": 4, "end_s": 6, "turn": 0, "tokens": 7},
        {"kind": "tool", "start_s": 6, "end_s": 9.5, "turn": 0, "name": "sh\u202eell", "is_error": True},
    ]
    lost = {"attempt": 1, "code": "sandbox_lost", "detail": "it died", "start_s": 0, "parts": []}
    last = {"attempt": 2, "code": None, "detail": "", "start_s": 0, "parts": parts}
    timeline = {"id": "pair-0", "run": "default", "state": "ended", "origin": 1.7e9, "attempts": [lost, last]}
    await reader.page.route("**/v1/rollouts/*/timeline?*", lambda route: route.fulfill(json=timeline))
    page = await reader.open(ROLLOUT)
    card = page.locator(".time-card")
    await expect(card).to_contain_text("sandbox_lost")
    await expect(card).to_contain_text("it died")
    await card.get_by_role("group", name="Times of attempt 2").focus()
    for _ in range(3):
        await page.keyboard.press("ArrowRight")
    await expect(card.get_by_role("status")).to_contain_text("Model, turn 0: 2.0 s, 7 tokens")
    await page.keyboard.press("ArrowRight")
    await expect(card.get_by_role("status")).to_contain_text("Tool shRLOell, turn 0: 3.5 s, failed")
    model = card.locator(".part.kind-model").first
    wide = await model.evaluate("(part) => part.style.left")
    await card.get_by_role("button", name="Without the queue").click()
    assert wide == "40%" and await model.evaluate("(part) => part.style.left") == "0%"
    assert "wait=hide" in page.url


async def test_the_strip_tells_every_tokens_numbers(reader: Visitor, yard: Site) -> None:
    [trace] = (await yard.get("/v1/rollouts/pair-0/traces")).body["traces"]
    [texts] = (await yard.get("/v1/rollouts/pair-0/texts")).body["texts"]
    start, token = trace["spans"][0]["start"], trace["spans"][0]["start"] + 2
    page = await reader.open(f"{ROLLOUT}?tab=tokens")
    await expect(page.locator(f".strip[data-tokens='{len(trace['token_ids'])}']")).to_be_visible()
    strip, number = page.get_by_role("region", name="Tokens"), page.locator(".strip .under-pointer")
    await strip.focus()
    await page.keyboard.press("ArrowRight")
    await expect(number).to_contain_text(f"0 {json.dumps(texts[0])}")
    await expect(number).to_contain_text("context, loss mask 0")
    await page.keyboard.press("n")
    for _ in range(2):
        await page.keyboard.press("ArrowRight")
    await expect(number).to_contain_text(f"id {trace['token_ids'][token]} ")
    await expect(number).to_contain_text("sampled in turn 0, loss mask 1")
    await expect(number).to_contain_text(f"logprob {trace['logprobs'][token]:.4g}")
    await expect(number).to_contain_text("advantage 1.0")
    await page.wait_for_function(f"() => new URLSearchParams(location.search).get('token') === '{token}'")
    await page.locator(f"[data-token='{start}']").hover()
    await expect(number).to_contain_text(f"id {trace['token_ids'][start]} ")
    for name, style in (("Loss mask", "mask1"), ("Weight version", "version0"), ("Advantage", "adv5")):
        await page.get_by_role("button", name=name).click()
        await expect(page.locator(f"[data-token='{token}']")).to_have_class(re.compile(rf"\b{style}\b"))
    await expect(page.get_by_role("button", name="Entropy")).to_be_disabled()
    assert "colour=advantage" in page.url


async def test_entropy_is_shown_where_the_engine_gave_it(reader: Visitor, yard: Site) -> None:
    [trace] = (await yard.get("/v1/rollouts/pair-0/traces")).body["traces"]
    first, second = trace["spans"][:2]

    def measure(body: dict[str, Any]) -> None:
        values = array("f", [2.5] * (first["end"] - first["start"]))
        body["trajectory"]["traces"][0]["columns"] = {"entropy/0": b64encode(values.tobytes()).decode()}

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", measure, yard)
    page = await reader.open(f"{ROLLOUT}?tab=tokens&colour=entropy&token={first['start']}")
    token = page.locator(f"[data-token='{first['start']}']")
    await expect(token).to_have_class(re.compile(r"\bheat5\b"))
    await expect(page.locator(".strip .under-pointer")).to_contain_text("entropy 2.5 nats")
    await page.get_by_label("Token", exact=True).fill(str(second["start"]))
    await page.get_by_label("Token", exact=True).press("Enter")
    await expect(page.locator(f"[data-token='{second['start']}']")).to_have_class(re.compile(r"\bcontext\b"))


async def test_a_strip_of_64000_tokens_has_few_elements(reader: Visitor, yard: Site) -> None:
    count = 64_000

    def enlarge(body: dict[str, Any]) -> None:
        [trace] = body["trajectory"]["traces"]
        span = {**trace["spans"][0], "start": 10, "end": count}
        trace |= {"token_ids": list(range(count)), "mask": [0] * 10 + [1] * (count - 10), "spans": [span]}
        trace |= {"logprobs": [-0.5] * count, "versions": [3] * count}

    def spell(body: dict[str, Any]) -> None:
        body["texts"] = [[f" w{number % 1000}" for number in range(count)]]

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", enlarge, yard)
    await altered(reader.page, "/rollouts/pair-0/texts", spell, yard)
    page = await reader.open(f"{ROLLOUT}?tab=tokens")
    await expect(page.locator(f".strip[data-tokens='{count}']")).to_be_visible()
    await page.get_by_role("region", name="Tokens").focus()
    await page.keyboard.press("End")
    await expect(page.locator(f"[data-token='{count - 1}']")).to_be_in_viewport()
    await expect(page.locator(".strip .under-pointer")).to_contain_text('63,999 " w999"')
    assert await page.locator(".strip .t").count() < 3000


async def test_the_proof_fails_for_a_token_that_was_not_sent(reader: Visitor, yard: Site) -> None:
    page = await reader.open(f"{ROLLOUT}?tab=traces")
    await expect(page.locator("[data-proof=good]")).to_contain_text("3 model calls")

    def forge(body: dict[str, Any]) -> None:
        [trace] = body["trajectory"]["traces"]
        trace["token_ids"][trace["spans"][1]["start"]] += 1

    await altered(page, "/rollouts/pair-0?include=trajectory", forge, yard)
    await page.reload()
    await expect(page.locator("[data-proof=bad]")).to_contain_text("2 model calls of 3")


async def test_digests_that_were_not_recorded_prove_nothing(reader: Visitor, yard: Site) -> None:
    def drop_all(body: dict[str, Any]) -> None:
        for span in body["trajectory"]["traces"][0]["spans"]:
            span |= {"prompt_digest": "", "sampled_digest": ""}

    def drop_one(body: dict[str, Any]) -> None:
        body["trajectory"]["traces"][0]["spans"][1]["sampled_digest"] = ""

    def drop_spans(body: dict[str, Any]) -> None:
        body["trajectory"]["traces"][0]["spans"] = []

    verdict = reader.page.locator("[data-proof=open]")
    for change, words in (
        (drop_all, "3 model calls of 3: not all digests were recorded"),
        (drop_one, "1 model call of 3: not all digests were recorded"),
        (drop_spans, "nothing to prove"),
    ):
        await altered(reader.page, "/rollouts/pair-0?include=trajectory", change, yard)
        page = await reader.open(f"{ROLLOUT}?tab=traces")
        await expect(verdict).to_contain_text(words)
        await expect(page.locator(".proven, .refuted")).to_have_count(2 * 3 - 1 if change is drop_one else 0)


async def test_the_digest_of_the_page_is_blake2b(reader: Visitor) -> None:
    page = await reader.open("/rollouts/default/pair-1")
    sizes = [0, 1, 127, 128, 129, 255, 256, 257, 5000]
    found = await page.evaluate(
        """async (sizes) => {
          const { Blake2b } = await import("/assets/js/rollout/blake2b.js");
          return sizes.map((size) => {
            const hash = new Blake2b(16), bytes = new Uint8Array(size).map((_, at) => at * 7);
            hash.update(bytes.subarray(0, 100));
            hash.hex();
            return hash.update(bytes.subarray(100)).hex();
          });
        }""",
        sizes,
    )
    expected = [bytes(at * 7 % 256 for at in range(size)) for size in sizes]
    assert found == [blake2b(data, digest_size=16).hexdigest() for data in expected]


async def test_forks_are_a_tree_with_their_reasons(reader: Visitor, yard: Site) -> None:
    def fork(body: dict[str, Any]) -> None:
        [first] = body["trajectory"]["traces"]
        copy = {**first["spans"][0], "is_owned": False}
        own = {**first["spans"][1], "turn": 7}
        second = {**first, "index": 1, "fork_reason": "history rewritten", "spans": [copy, own]}
        third = {**first, "index": 2, "fork_reason": "new <i>conversation", "spans": [{**own, "turn": 8}]}
        body["trajectory"]["traces"] = [first, second, third]

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", fork, yard)
    page = await reader.open(f"{ROLLOUT}?tab=traces")
    roots = page.locator(".fork-tree.root > li")
    await expect(roots).to_have_count(2)
    await expect(roots.first.locator(".fork-tree li")).to_contain_text("history rewritten")
    await expect(roots.last).to_contain_text("new <i>conversation")
    await page.get_by_role("link", name="Trace 1").click()
    await expect(page.get_by_role("tab", name="Tokens")).to_have_attribute("aria-selected", "true")
    await expect(page.get_by_label("Trace")).to_have_value("1")


async def test_a_request_is_beside_what_the_engine_got(reader: Visitor) -> None:
    request = {
        "turn": 1,
        "start_s": 2.5,
        "dialect": "chat",
        "fields": {"temperature": 0.3},
        "kept_messages": 4,
        "tools": 2,
        "new_messages": [{"role": "user", "content": "sent <b>"}],
        "overruled": ["temperature"],
        "bytes": 2048,
    }
    body = {"requests": [request], "is_complete": False}
    await reader.page.route("**/v1/rollouts/*/requests?*", lambda route: route.fulfill(json=body))
    page = await reader.open(f"{ROLLOUT}?tab=requests")
    panel = page.get_by_role("tabpanel")
    await expect(panel).to_contain_text("the middle ones are missing")
    turn = panel.locator("details.request").nth(1)
    await turn.locator("summary").click()
    for text in ("sent <b>", "4 messages as before", "Overruled by the task: temperature", "<tool_response>"):
        await expect(turn).to_contain_text(text)
    await turn.get_by_role("button", name="tokens before").click()
    await expect(turn).to_contain_text("<|im_start|>user\nwrite a file")


async def test_the_shell_session_is_replayed(reader: Visitor) -> None:
    page = await reader.open(f"{ROLLOUT}?tab=terminal")
    screen = page.get_by_role("region", name="Terminal")
    await expect(screen).not_to_contain_text("touch done")
    await page.get_by_role("button", name="To the end").click()
    await expect(screen).to_contain_text("touch done")
    slider = page.get_by_role("slider")
    await slider.focus()
    await page.keyboard.press("Home")
    await expect(screen).not_to_contain_text("touch done")
    await page.get_by_label("Speed").select_option("64")
    await page.get_by_role("button", name="Play").click()
    await expect(screen).to_contain_text("touch done")
    await expect(page.get_by_role("button", name="Play")).to_be_visible()


async def test_evidence_is_shown_and_artifacts_are_downloaded(reader: Visitor, yard: Site) -> None:
    patch = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <b>\n+new\n"

    def add(body: dict[str, Any]) -> None:
        body["trajectory"]["info"]["evidence"] = [
            {"kind": "tests", "name": "pytest", "text": "\x1b[31m1 failed\x1b[0m", "passed": False},
            {"kind": "judge", "name": "style", "text": "It is readable.", "passed": None},
            {"kind": "patch", "name": "patch", "text": patch, "passed": None},
        ]

    listing = {"artifacts": [{"name": "a/b c", "path": "/w", "bytes": 5, "kind": "file", "available": True}]}
    headers: list[dict[str, str]] = []

    async def file(route: Route) -> None:
        headers.append(await route.request.all_headers())
        await route.fulfill(body=b"bytes", content_type="application/octet-stream")

    await altered(reader.page, "/rollouts/pair-0?include=trajectory", add, yard)
    await reader.page.route("**/v1/rollouts/*/artifacts?*", lambda route: route.fulfill(json=listing))
    await reader.page.route("**/v1/rollouts/*/artifacts/a%2Fb%20c?*", file)
    page = await reader.open(f"{ROLLOUT}?tab=evidence")
    await expect(page.locator("[data-kind=tests] .fg1")).to_have_text("1 failed")
    await expect(page.locator("[data-kind=judge]")).to_contain_text("It is readable.")
    await expect(page.locator(".diff-line.removed")).to_have_text("-old <b>")
    await expect(page.locator(".diff-line.added")).to_have_text("+new")
    async with page.expect_download() as started:
        await page.get_by_role("button", name="Download a/b c").click()
    download = await started.value
    assert download.suggested_filename == "a_b_c"
    assert Path(await download.path()).read_bytes() == b"bytes"
    assert len(headers[0]["x-rollyard-page"]) > 20
    reader.troubles = [trouble for trouble in reader.troubles if not trouble.startswith("download: blob:")]


async def test_a_rollout_that_cannot_be_shown_says_why(reader: Visitor, yard: Site) -> None:
    reader.expect_status(404, 410)
    page = await reader.open("/rollouts/default/nope")
    await expect(page.get_by_role("alert")).to_contain_text("There is no rollout nope in run default")

    page = await reader.open("/rollouts/old/deleted")
    await expect(page.get_by_role("note")).to_contain_text("acknowledged")
    await expect(page.get_by_role("region", name="Summary")).to_contain_text("completed")
    await page.get_by_role("tab", name="Record").click()
    await expect(page.get_by_role("tabpanel")).to_contain_text("gone")

    def elsewhere(body: dict[str, Any]) -> None:
        body |= {"available": False, "messages": [], "next": 0, "state": "run"}

    def running(body: dict[str, Any]) -> None:
        body["state"] = "run"

    await altered(page, "/rollouts/pair-1/messages", elsewhere, yard)
    await altered(page, "/rollouts/pair-1?run", running, yard)
    await reader.open("/rollouts/default/pair-1")
    await expect(page.get_by_role("tabpanel")).to_contain_text("runs on a node")


async def test_a_queued_rollout_says_so(reader: Visitor, yard: Site) -> None:
    await yard.hold()
    try:
        await yard.submit("waits")
        page = await reader.open("/rollouts/default/waits")
        await expect(page.get_by_role("tabpanel")).to_contain_text("in the queue")
    finally:
        assert (await yard.call("PATCH", "/v1/pools", json={"init": 4})).status == 200
    await expect(page.get_by_role("region", name="Summary")).to_contain_text("completed")


# --- the group


async def test_two_members_are_shown_where_they_part(reader: Visitor) -> None:
    page = await reader.open("/groups/default/pair")
    rows = page.locator(".members tbody tr")
    await expect(rows.nth(0)).to_contain_text("+1.0")
    await expect(rows.nth(1)).to_contain_text("-1.0")
    await expect(page.get_by_role("img", name=re.compile("Rewards"))).to_be_visible()
    await page.get_by_label("Compare member 0").check()
    await page.get_by_label("Compare member 1").check()
    await expect(page.locator("[data-shared='3']")).to_contain_text("They part at turn 1, message 3")
    marks = page.locator("mark.different")
    await expect(marks.nth(0)).to_contain_text("touch done")
    await expect(marks.nth(1)).to_contain_text("echo nothing")
    plain = "(mark) => getComputedStyle(mark.querySelector('pre')).backgroundColor === 'rgba(0, 0, 0, 0)'"
    assert await marks.nth(0).evaluate(plain)  # or it hides the colour of the mark
    assert page.url.endswith("?a=0&b=1")
    await page.get_by_role("button", name="3 messages that both share").click()
    await expect(page.locator("article.message").first).to_contain_text("write a file")


# --- every tab

VIOLATIONS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  const serious = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
  const shown = (node) => `${node.html.slice(0, 200)} ${node.failureSummary}`;
  return serious.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(shown).join(" | ")}`);
}"""


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1600, "light")])
async def test_every_tab_fits_and_is_accessible(
    yard: Site, new_visitor: NewVisitor, axe: str, width: int, theme: str
) -> None:
    visitor = await new_visitor(yard, width=width, theme=theme)
    await visitor.context.add_init_script(axe)
    await visitor.page.route("**/v1/results*", Results(300))
    paths = [f"{ROLLOUT}?tab={tab}" for tab in TABS] + ["/rollouts?search=needle", "/groups/default/pair?a=0&b=1"]
    await visitor.open(paths[0])
    found: dict[str, object] = {}
    for path in paths:
        await visitor.go(path)
        if problems := await visitor.page.evaluate(VIOLATIONS):
            found[path] = problems
        if (wide := await visitor.page.evaluate("document.documentElement.scrollWidth")) > width:
            found[f"{path} is {wide} px wide"] = True
    assert found == {}


async def test_arrow_keys_change_the_tab(reader: Visitor) -> None:
    page = await reader.open(ROLLOUT)
    await page.get_by_role("tab", name="Conversation").focus()
    for tab in TABS[1:]:
        await page.keyboard.press("ArrowRight")
        await expect(page.locator(f"#tab-{tab}")).to_be_focused()
        assert f"tab={tab}" in page.url
