"""Overview, runs, draws, evaluations, engines and nodes, in Chromium against a real service.

Replies of the service are replaced (`answer`) only where a state is hard to reach: full pools, open breakers, a hundred
runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Page, Route, expect

from tests.fleet.fleet_site import loop_node, open_head, until
from tests.service.site import Site
from tests.web.conftest import NewVisitor
from tests.web.visitor import Visitor

NOW = 1_800_000_000.0

STEPS = 360


def pool(size: int, active: int, waiting: int = 0) -> dict[str, int]:
    return {"size": size, "active": active, "waiting": waiting}


def overview(**fields: Any) -> dict[str, Any]:
    empty: list[float | None] = [None] * STEPS
    return {
        "at": NOW,
        "version": "1.2.3",
        "uptime_s": 60.0,
        "is_draining": False,
        "flow": {"queued": 120, "init": 3, "ready": 4, "run": 16, "eval": 2, "ended": 500},
        "pools": {
            "queue": pool(1000, 120),
            "init": pool(8, 3),
            "ready": pool(8, 4),
            "run": pool(16, 16, 4),
            "eval": pool(8, 2),
            "live": pool(64, 25),
        },
        "waiting_for_room": 0,
        "history": {
            "step_s": 10,
            "end_at": NOW,
            "turns": [*empty[1:], 50],
            "tokens": [*empty[1:], 20_000],
            "ended": [*empty[6:], *[2] * 6],
            "live": [*empty[1:], 25],
        },
        "failures": [{"code": "sandbox_lost", "blame": "infra", "count": 7, "last_at": NOW}],
        "alerts": [
            {"kind": "breaker_open", "what": "bubblewrap", "detail": "<b>no space</b>", "severity": "bad"},
            {"kind": "policy_paused", "what": "actor", "detail": "held by t1", "severity": "warn"},
        ],
        "engines": [],
        "policies": [],
        "nodes": [],
        **fields,
    }


async def answer(page: Page, path: str, body: Any, status: int = 200) -> list[dict[str, str]]:
    """Replaces the reply of a path. Returns the list of the queries with which it is called from now on."""
    queries: list[dict[str, str]] = []

    async def fulfil(route: Route) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(route.request.url).query).items()}
        queries.append(query)
        reply = body(query) if callable(body) else body
        await route.fulfill(status=status, content_type="application/json", body=json.dumps(reply))

    await page.route(lambda url: urlsplit(url).path == path, fulfil)
    return queries


async def serious_violations(page: Page, axe: str) -> list[tuple[str, list[str]]]:
    """What axe-core finds on the page as it is; `test_pages.py` checks every view of a service without trouble."""
    await page.evaluate(axe)
    found = await page.evaluate("() => axe.run({ resultTypes: ['violations'] })")
    return [
        (one["id"], [node["html"][:200] for node in one["nodes"][:3]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


async def is_as_wide_as_the_window(page: Page) -> bool:
    return await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1600, "light")])
async def test_the_overview_shows_the_flow_and_what_is_wrong(
    world: Site, new_visitor: NewVisitor, axe: str, width: int, theme: str
) -> None:
    visitor: Visitor = await new_visitor(world, width=width, theme=theme)
    await answer(visitor.page, "/v1/overview", overview())
    page = await visitor.open("/")
    stages = page.get_by_role("list", name="Stages").get_by_role("listitem")
    await expect(stages).to_have_text([
        "Queue120120 of 1,000 places", "INIT33 of 8 slots", "READY44 of 8 places", "RUN1616 of 16 slots4 wait",
        "EVAL22 of 8 slots", "Ended500since the service started",
    ])  # fmt: skip
    first, second = await stages.nth(0).bounding_box(), await stages.nth(1).bounding_box()
    assert first is not None and second is not None
    assert (first["y"] < second["y"]) == (width == 390), "stacked if narrow, side by side if wide"
    await expect(page.locator("main")).to_contain_text("RUN is full and others wait for it")
    alerts = page.get_by_role("list", name="Alerts").get_by_role("listitem")
    await expect(alerts.nth(0)).to_contain_text("breaker open bubblewrap – <b>no space</b>")
    await expect(alerts.nth(1)).to_contain_text("policy paused actor")
    await expect(page.get_by_role("link", name="sandbox_lost")).to_have_attribute("href", "/rollouts?code=sandbox_lost")
    await expect(page.locator("figcaption")).to_have_text([
        "Turns per second 5", "Tokens per second 2,000", "Rollouts ended per minute 12", "Rollouts live 25",
    ])  # fmt: skip
    assert await is_as_wide_as_the_window(page)
    assert not await serious_violations(page, axe)


async def test_the_first_visit_shows_how_to_submit(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world, width=390)
    idle = overview(flow=dict.fromkeys(("queued", "init", "ready", "run", "eval", "ended"), 0), alerts=[], failures=[])
    await answer(visitor.page, "/v1/overview", idle)
    await answer(visitor.page, "/v1/runs", {"runs": []})
    page = await visitor.open("/")
    await expect(page.get_by_role("heading", name="Nothing has run yet")).to_be_visible()
    await expect(page.get_by_text("rollyard engines add http://127.0.0.1:8000")).to_be_visible()
    await expect(page.get_by_text("rollyard submit tasks.jsonl")).to_be_visible()
    await page.get_by_role("button", name="Copy the command").last.click()
    assert await page.evaluate("navigator.clipboard.readText()") == "rollyard submit tasks.jsonl"
    assert await is_as_wide_as_the_window(page)


async def test_runs_are_filtered_and_sorted_by_the_address(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    real = (await world.get("/v1/runs?include=results")).body["runs"]
    results = {"states": {"ended": 3}, "rewarded": 3, "trainable": 3, "active_at": NOW}
    more = [
        {**real[0], "id": f"r{i}", "mode": "train", "results": {**results, "mean_reward": i / 120}} for i in range(120)
    ]
    await answer(visitor.page, "/v1/runs", {"runs": [*real, *more]})
    page = await visitor.open("/runs")
    rows = page.locator("tbody tr")
    await expect(rows).to_have_count(100)
    await page.get_by_role("button", name="Show more").click()
    await expect(rows).to_have_count(len(real) + 120)
    await page.get_by_role("button", name="Mean reward").click()
    await expect(page.get_by_role("columnheader", name="Mean reward")).to_have_attribute("aria-sort", "descending")
    await page.get_by_label("Filter by name").fill("r11")
    await expect(rows).to_have_count(11)  # r11, r110 to r119
    await expect(rows.first).to_contain_text("r119")
    assert page.url.endswith("/runs?sort=-reward&q=r11")
    await page.reload()
    await expect(rows).to_have_count(11)
    await page.go_back()
    await expect(page.get_by_label("Filter by name")).to_have_value("")


async def test_a_long_name_leaves_room_on_a_narrow_screen(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world, width=390)
    (run, *_) = (await world.get("/v1/runs?include=results")).body["runs"]
    await answer(visitor.page, "/v1/runs", {"runs": [{**run, "id": "grpo-qwen2.5-7b-instruct-" + "seed42" * 8}]})
    page = await visitor.open("/runs")
    await expect(page.get_by_role("columnheader", name="Policy")).to_be_in_viewport(ratio=1)
    long = [{"id": "gpu-" * 12, "state": "down", "paused": False, "version": 1, "sessions": 1, "cap": 2}]
    await answer(visitor.page, "/v1/overview", overview(engines=long))
    await visitor.go("/")
    await page.locator(".badge", has_text="down").scroll_into_view_if_needed()
    await expect(page.locator(".badge", has_text="down")).to_be_in_viewport(ratio=1)
    assert await page.locator(".table-frame").first.evaluate("(frame) => frame.scrollLeft") == 0


SERIES: dict[str, Any] = {
    "x": [1, 2],
    "count": [4, 4],
    "reward": [0.25, 0.75],
    "pass_rate": [0.25, 0.75],
    "response_tokens": [10, 20],
    "turns": [2, 3],
    "staleness": [0, 1],
    "share": {"model": [0.5, 0.5], "tool": [0.25, 0.25], "waiting": [0.25, 0.25], "other": [0, 0]},
    "failures": [
        {"code": "run_deadline", "blame": "task", "counts": [2, 0]},
        {"code": "run_deadline", "blame": "policy", "counts": [0, 1]},
    ],
    "groups": {"delivered": 3, "filtered": 1},
    "group_counts": {"delivered": [0, 3], "complete": [0, 1], "filtered": [0, 1], "void": [0, 0]},
    "group_tokens": {"delivered": [0, 600], "filtered": [0, 300], "failed": [40, 0], "dropped": [60, 0]},
    "tokens": {"sampled": 1000, "delivered": 600, "filtered": 300, "lost": 100},
    "environments": ["shell"],
    "totals": {
        "count": 8,
        "reward": 0.5,
        "pass_rate": 0.5,
        "failures": [
            {"code": "run_deadline", "blame": "task", "count": 2},
            {"code": "run_deadline", "blame": "policy", "count": 1},
        ],
    },
}


async def test_a_run_shows_its_curves_over_time_and_over_versions(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    queries = await answer(visitor.page, "/v1/runs/default/series", lambda query: {**SERIES, "by": query["by"]})
    await answer(visitor.page, "/v1/groups", {"groups": [], "next": None})
    page = await visitor.open("/runs/default")
    await expect(page.locator("figcaption")).to_have_text([
        "Mean reward", "Pass rate", "Response length (tokens)", "Turns", "Staleness (versions)", "Rollout time",
        "Rollouts ended", "Groups", "Tokens thrown away", "Failures",
    ])  # fmt: skip
    await expect(page.get_by_role("img", name="Rollout time: model 50 %, tools 25 %, waiting 25 %")).to_be_visible()
    await expect(page.locator("section", has_text="of all points")).to_contain_text("Other: INIT, EVAL")
    groups = page.get_by_role("table", name="Groups").locator("tbody tr")
    await expect(groups.nth(0)).to_contain_text("––––")  # no group ended at that point
    await expect(groups.nth(1)).to_contain_text("80 %20 %0 %0 %")
    thrown = page.get_by_role("table", name="Tokens thrown away").locator("tbody tr")
    await expect(thrown.nth(0)).to_have_text(re.compile("0100$"))
    await expect(thrown.nth(1)).to_have_text(re.compile("3000$"))
    await expect(page.get_by_role("img", name="Groups: kept 75 %, filtered 25 %")).to_be_visible()
    await expect(page.locator(".stat", has_text="Tokens thrown away")).to_contain_text("40040.0 %")
    table = page.get_by_role("table", name="Failures")
    await expect(table.get_by_role("columnheader")).to_have_text(
        ["time", "run_deadline (task)", "run_deadline (policy)"]
    )
    by_code = page.locator("section", has=page.get_by_role("heading", name="Failures by code")).get_by_role("listitem")
    await expect(by_code).to_have_text([re.compile("run_deadline.*task.*2"), re.compile("run_deadline.*policy.*1")])
    await expect(by_code.get_by_role("link").first).to_have_attribute("href", "/rollouts?run=default&code=run_deadline")
    await page.locator(".uplot").evaluate_all(
        "(charts) => charts.forEach((chart) => { chart.dataset.drawn = 'before' })"
    )
    await page.get_by_role("button", name="Theme:").click()
    await expect(page.locator(".uplot[data-drawn]")).to_have_count(0)  # a canvas does not follow the colours by itself
    await page.get_by_role("button", name="Over weight version").click()
    await expect(page.get_by_role("button", name="Over weight version")).to_have_attribute("aria-pressed", "true")
    await expect(page.get_by_role("columnheader", name="weight version").first).to_be_attached()
    assert page.url.endswith("/runs/default?by=version")
    assert [query["by"] for query in (queries[0], queries[-1])] == ["time", "version"]


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("/runs/nope", "All runs"),
        ("/draws/default/nope", "All draws"),
        ("/evals/e1/nope", "All evaluations"),
        ("/evals/compare?a=e1/nope&b=e2/e2", "All evaluations"),
    ],
)
async def test_an_unknown_id_gets_a_page_that_says_so(
    world: Site, new_visitor: NewVisitor, path: str, link: str
) -> None:
    visitor: Visitor = await new_visitor(world)
    visitor.expect_status(404)
    page = await visitor.open(path)
    await expect(page.get_by_role("alert")).to_contain_text("Not found")
    await expect(page.get_by_role("alert").get_by_role("link", name=link)).to_be_visible()


async def test_a_draw_says_why_groups_were_filtered(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    batch = (await world.get("/v1/draws/d/batches/1")).body
    closed = {**batch, "created_at": NOW, "closed_at": NOW + 90, "acked": False}
    opened = {**closed, "number": 2, "state": "open", "created_at": NOW - 10**8, "closed_at": None}
    batches = {"batches": [opened, closed], "next": None}
    group = (await world.get("/v1/groups/same")).body
    hopeless = {**group, "id": "early", "state": "filtered", "reason": "hopeless"}
    queries = await answer(
        visitor.page, "/v1/groups", {"groups": [{**group, "state": "filtered"}, hopeless], "next": "c1"}
    )
    await answer(visitor.page, "/v1/draws/d/batches", batches)
    page = await visitor.open("/draws")
    await page.get_by_role("link", name="d", exact=True).click()
    rows = page.get_by_role("region", name="Batches").get_by_role("row")
    await expect(rows.nth(1)).to_contain_text("so far")
    await expect(rows.nth(2)).to_contain_text("not yet")
    await expect(rows.nth(2)).to_contain_text("2 of 2")
    await expect(rows.nth(2)).to_contain_text("90 s")
    await expect(rows.nth(2).locator("time")).to_have_count(2)  # opened and closed
    groups = page.get_by_role("region", name="Groups").get_by_role("row")
    await expect(groups.nth(1)).to_contain_text("every member got 1.0: no spread to learn from")
    await expect(groups.nth(2)).to_contain_text("ended early")
    assert queries[0] == {"run": "default", "draw": "d", "state": "filtered", "limit": "25"}
    await page.get_by_role("button", name="Older").click()
    await page.wait_for_url("**/draws/default/d?after=c1")
    await page.get_by_role("button", name="Failed").click()
    await page.wait_for_url("**/draws/default/d?state=failed")


async def test_engines_show_a_pause_with_its_holder_and_their_versions(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    await answer(visitor.page, "/v1/policies/default/versions", {"engines": {"e1": [[NOW, 0], [NOW + 60, 1]]}})
    policy = (await world.get("/v1/policies/default")).body
    held = {**policy, "state": "paused", "mode": "drain", "holder": "admin/t7", "lease_s": 600, "lease_left_s": 431}
    await answer(visitor.page, "/v1/policies", {"policies": [held]})
    page = await visitor.open("/engines")
    await expect(page.locator(".pause")).to_contain_text("held by admin/t7, lease ends in 7 min 11 s of 10 min 0 s")
    row = page.get_by_role("region", name="Engines").get_by_role("row").nth(1)
    await expect(row).to_contain_text("e1")
    await expect(page.get_by_role("table", name="Weight version per engine")).to_contain_text("1")
    await page.get_by_role("button", name="7 days").click()
    await page.wait_for_url("**/engines?hours=168")


def tasks_of(eval_id: str, *passes: tuple[str, int]) -> dict[str, Any]:
    return {
        "tasks": [
            {
                "index": index,
                "group": f"{eval_id}.{index}",
                "name": name,
                "by": {},
                "samples": 10,
                "passes": passed,
                "mean_reward": passed / 10,
                "missing": 0,
            }
            for index, (name, passed) in enumerate(passes)
        ]
    }


async def test_two_evaluations_are_compared_task_by_task(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    same = ("the same text", 10), ("the same text", 0)
    await answer(visitor.page, "/v1/evals/e1/tasks", tasks_of("e1", ("up", 0), ("down", 8), ("gone", 3), *same))
    await answer(visitor.page, "/v1/evals/e2/tasks", tasks_of("e2", ("down", 6), ("up", 10), ("new", 3), *same))
    page = await visitor.open("/evals")
    await page.get_by_label("Compare e1").check()
    await page.get_by_label("Compare e2").check()
    await page.get_by_role("button", name="Compare these two").click()
    await page.wait_for_url("**/evals/compare?a=e1%2Fe1&b=e2%2Fe2")
    rows = page.get_by_role("region", name="Tasks of both evaluations").locator("tbody tr")
    await expect(rows).to_have_count(6)
    names = [await rows.nth(index).locator(".task-name").inner_text() for index in range(6)]
    assert names[:4] == ["up", "the same text", "the same text", "down"]  # by difference; missing ones last
    await expect(rows.nth(0)).to_contain_text("+1.000")
    await expect(rows.nth(0)).to_contain_text("clear")
    await expect(rows.nth(3)).to_contain_text("−0.200")
    await expect(rows.nth(3)).to_contain_text("0.800 [0.490, 0.943]")  # Wilson's interval of 8 of 10
    await expect(rows.nth(3)).not_to_contain_text("clear")
    await expect(rows.nth(4)).to_contain_text("only in A")
    await page.get_by_label("Show").select_option(value="worse")
    await expect(rows).to_have_count(1)
    await page.get_by_role("button", name="Swap").click()
    await expect(rows).to_contain_text(["up"])
    await page.get_by_label("Filter tasks").fill("no such task")
    await expect(page.locator("main")).to_contain_text("No task matches.")


async def test_a_comparison_follows_an_evaluation_that_runs(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    page = visitor.page
    ended = (await world.get("/v1/evals/e2")).body
    await answer(page, "/v1/evals/e1/tasks", tasks_of("e1", ("one", 5), ("two", 5)))
    await answer(page, "/v1/evals/e2/tasks", tasks_of("e2", ("one", 6)))
    await answer(page, "/v1/evals/e2", {**ended, "state": "running"})
    await visitor.open("/evals/compare?a=e1/e1&b=e2/e2")
    rows = page.get_by_role("region", name="Tasks of both evaluations").locator("tbody tr")
    await expect(rows.filter(has_text="two")).to_contain_text("only in A")
    await answer(page, "/v1/evals/e2/tasks", tasks_of("e2", ("one", 6), ("two", 9)))
    await answer(page, "/v1/evals/e2", ended)
    await expect(rows.filter(has_text="two")).to_contain_text("+0.400")


async def test_an_evaluation_shows_intervals_and_links_each_task_to_its_group(
    world: Site, new_visitor: NewVisitor
) -> None:
    visitor: Visitor = await new_visitor(world)
    every = tasks_of("e1", ("first", 5), ("second", 10))["tasks"]

    def page_of(query: dict[str, str]) -> dict[str, Any]:
        return (
            {"tasks": every[1:], "next": None} if query.get("after") == "t:1" else {"tasks": every[:1], "next": "t:1"}
        )

    await answer(visitor.page, "/v1/evals/e1/tasks", page_of)
    page = await visitor.open("/evals/e1/e1")
    await expect(page.get_by_role("img", name="pass@1:")).to_be_visible()
    await expect(page.get_by_role("region", name="Environment")).to_contain_text("shell")
    await expect(page.get_by_role("link", name="first")).to_have_attribute("href", "/groups/e1/e1.0")
    await page.get_by_role("button", name="pass@2").click()
    await expect(page.get_by_role("columnheader", name="pass@2")).to_be_visible()
    await page.get_by_label("Show").select_option(value="all")
    await expect(page.get_by_role("region", name="Tasks").locator("tbody tr")).to_have_count(1)


async def test_every_view_shows_what_the_service_has(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world, width=390)
    page = await visitor.open("/")
    await expect(page.get_by_role("list", name="Stages").get_by_role("listitem").nth(3)).to_contain_text("RUN1")
    await expect(page.get_by_role("link", name="setup_failed")).to_be_visible()
    shown = {
        "/runs": ["default", "e1", "e2"],
        "/runs/default": ["Mean reward", "mixed", "setup_failed"],
        "/draws": ["default", "100 %"],
        "/draws/default/d?state=delivered": ["not yet", "2 of 2", "d.0."],
        "/engines": ["version 0", "Weight version per engine", "scripted"],
        "/evals": ["e1", "4 of 4"],
        "/evals/e1/e1": ["task 0", "0.500", "1/2"],
        "/evals/compare?a=e1/e1&b=e2/e2": ["over 2 shared tasks", "task 1"],
    }
    for path, texts in shown.items():
        await visitor.go(path)
        assert await is_as_wide_as_the_window(page), path
        for text in texts:
            await expect(page.locator("main"), path).to_contain_text(text)


async def test_a_service_without_a_fleet_says_so(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    visitor.expect_status(404)
    page = await visitor.open("/nodes")
    await expect(page.get_by_role("heading", name="This service has no fleet")).to_be_visible()


async def test_an_admin_drains_a_node_after_a_confirmation(tmp_path: Path, new_visitor: NewVisitor, axe: str) -> None:
    async with open_head(tmp_path / "head", engines=[]) as site, loop_node(site, tmp_path / "node", "n1"):
        await until(site, "n1")
        visitor: Visitor = await new_visitor(site)
        page = await visitor.open("/nodes")
        drain, dialog = page.get_by_role("button", name="Drain", exact=True), page.get_by_role("dialog")
        await drain.press("Enter")
        await expect(dialog).to_have_accessible_name("Drain n1?")
        await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(drain).to_be_focused()
        visitor.expect_status(404)
        await answer(page, "/v1/nodes/n1/drain", {"code": "not_found", "detail": "n1 has left", "status": 404}, 404)
        await drain.click()
        await dialog.get_by_role("button", name="Drain the node").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("n1 has left")
        assert not await serious_violations(page, axe)
        await page.unroute_all()
        await dialog.get_by_role("button", name="Drain the node").click()
        await page.get_by_role("button", name="Resume", exact=True).click()
        await dialog.get_by_role("button", name="Resume the node").click()
        await expect(drain).to_be_visible()
        actions = [entry["action"] for entry in (await site.get("/v1/audit")).body["entries"]]
        assert [action for action in actions if action.endswith("_node")] == ["resume_node", "drain_node"]

        reader = (await site.post("/v1/tokens", {"access": "reader"})).body["token"]
        other: Visitor = await new_visitor(site)
        await other.sign_in("/nodes", token=reader)
        await expect(other.page.get_by_role("heading", name="n1")).to_be_visible()
        await expect(other.page.get_by_role("button", name="Drain", exact=True)).to_have_count(0)
        for one in (visitor, other):
            one.expect_loss()  # the pages are closed after the service


async def test_versions_of_engines_share_one_axis(world: Site, new_visitor: NewVisitor) -> None:
    page = await (await new_visitor(world)).open("/runs")
    changes = {"a": [[2, 1], [30, 2]], "b": [[20, 1]]}
    found = await page.evaluate(
        """async (changes) => (await import("/assets/js/views/engines.js")).versionSeries(changes, 10, 40)""", changes
    )
    assert found["x"] == [10, 20, 30, 40]  # from the start, although b and the second version of a are younger
    assert {one["label"]: one["values"] for one in found["series"]} == {"a": [1, 1, 2, 2], "b": [None, 1, 1, 1]}


async def test_the_axis_of_versions_has_the_chosen_length(world: Site, new_visitor: NewVisitor) -> None:
    visitor: Visitor = await new_visitor(world)
    page = await visitor.open("/engines?hours=1")
    rows = page.get_by_role("table", name="Weight version per engine").locator("tbody tr")
    await expect(rows.first).to_contain_text("–")  # an hour ago the service was not running
    await expect(rows.last).to_contain_text("0")
