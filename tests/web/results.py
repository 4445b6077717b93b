"""Rows for the table of rollouts: `Results` answers like GET /v1/results, since a service with thousands of rollouts
takes minutes to fill."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.async_api import Page, Route, expect

from tests.web.visitor import Visitor


class Results:
    """Answers GET /v1/results with `count` rows, the newest of which is the last that ended."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.queries: list[dict[str, str]] = []

    def row(self, number: int, query: dict[str, str]) -> dict[str, Any]:
        is_good = number % 2 == 0
        row = {
            "id": f"r{number}",
            "run": "default",
            "group": None,
            "index": 0,
            "state": "ended",
            "attempt": 1,
            "outcome": "completed" if is_good else "failed",
            "reward": 1.0 if is_good else None,
            "trainable": is_good,
            "code": None if is_good else "sandbox_lost",
            "blame": None if is_good else "infra",
            "environment": "shell",
            "agent": "native",
            "policy": "default",
            "name": f"task {number}",
            "turns": 3,
            "sampled_tokens": 200,
            "prompt_tokens": 900,
            "oldest_version": 1,
            "newest_version": 2,
            "engine": "e1",
            "node": "",
            "created_at": 1.7e9,
            "ended_at": 1.7e9 + number,
            "seconds": {"run": 2.0, "model": 1.0},
        }
        if "search" in query:
            row["match"] = {"before": "before ", "hit": query["search"], "after": " after <b>"}
        return row

    async def __call__(self, route: Route) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(route.request.url).query).items()}
        self.queries.append(query)
        first = int(query.get("after", self.count)) - 1
        last = max(-1, first - int(query.get("limit", 50)))
        rows = [self.row(number, query) for number in range(first, last, -1)]
        following = str(last + 1) if last >= 0 else None
        body = {"rows": rows, "next": following, "total": self.count, "total_is_exact": True, "behind": 0}
        await route.fulfill(json=body)


class LiveResults:
    """Answers GET /v1/results?state=live with rows of these numbers, the newest first."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = set(numbers)
        self.polls = 0

    async def __call__(self, route: Route) -> None:
        query = {name: values[0] for name, values in parse_qs(urlsplit(route.request.url).query).items()}
        self.polls += "after" not in query
        following = [number for number in sorted(self.numbers, reverse=True) if number < int(query.get("after", 1e9))]
        page = following[: int(query["limit"])]
        is_more = len(following) > len(page)
        rows = [self.row(number) for number in page]
        cursor = str(page[-1]) if is_more else None
        body = {"rows": rows, "next": cursor, "total": len(rows), "total_is_exact": not is_more, "behind": 0}
        await route.fulfill(json=body)

    def row(self, number: int) -> dict[str, Any]:
        outcome = {"outcome": None, "reward": None, "trainable": False, "code": None, "blame": None, "ended_at": None}
        created_at = 1.7e9 + number // 8  # eight at a time
        return {**Results(0).row(number, {}), "state": "run", "created_at": created_at, **outcome}


async def table(visitor: Visitor, path: str = "/rollouts", count: int = 5000) -> tuple[Page, Results]:
    results = Results(count)
    await visitor.page.route("**/v1/results*", results)
    page = await visitor.open(path)
    await expect(page.get_by_role("grid")).to_be_visible()
    return page, results
