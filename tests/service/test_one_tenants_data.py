"""Data of one tenant can at worst end that tenant's rollout, group or draw; the service keeps running and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollyard.sampling import groups as groups_module
from rollyard.sampling import open_group as opening
from rollyard.sampling.draw_runner import DrawRunner
from rollyard.sampling.open_group import OpenGroup, catch_up
from rollyard.store import SqliteStore, Store
from tests.service.site import engine_table, open_site, scripted, task
from tests.store.small_texts import lower_limits


async def test_a_group_larger_than_a_sqlite_text_is_read_and_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower_limits(monkeypatch)
    big = task("x" * 150_000)
    async with scripted() as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            await site.hold()
            assert (await site.post("/v1/groups", {"id": "g", "task": big, "size": 30})).status == 202
            await site.submit("small")
            group = await site.get("/v1/groups/g")
            assert group.status == 200 and len(group.body["members"]) == 30
            page = (await site.get("/v1/rollouts?limit=1000")).body
            assert 0 < len(page["rollouts"]) < 31 and page["next"] is not None
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            assert (await site.ended("small"))["reward"] == 1.0
            group = await site.get("/v1/groups/g")
            assert group.status == 200 and len(group.body["members"]) >= 30
            await site.delete("/v1/groups/g")


async def test_a_group_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "MOST_GROUP_BYTES", 1 << 20)
    big = task("x" * 20_000)
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        for path, body in (
            ("/v1/groups", {"id": "g", "task": big, "size": 100}),
            ("/v1/draws", {"id": "d", "group_size": 100, "source": {"tasks": [big]}}),
            ("/v1/evals", {"id": "e", "source": {"tasks": [big]}, "k": 1, "samples": 100}),
        ):
            answer = await site.post(path, body)
            assert (answer.status, answer.code) == (422, "invalid_request"), (path, answer.body)
            assert "100 rollouts of a task of 20" in answer.body["detail"] and "1 MiB" in answer.body["detail"]
        grows = {"id": "p", "group_size": 100, "source": {"push": True}}
        assert (await site.post("/v1/draws", grows)).status == 201
        pushed = await site.post("/v1/draws/p/tasks", {"tasks": [big]})
        assert pushed.status == 422 and "tasks.0: 100 rollouts of a task" in pushed.body["detail"]
        assert (await site.post("/v1/groups", {"id": "g", "task": big, "size": 10})).status == 202


async def test_only_a_group_that_cannot_be_resumed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(store: Store, opened: OpenGroup) -> None:
        if opened.id == "bad":
            raise ValueError("what it has cannot be read")
        await catch_up(store, opened)

    async with scripted() as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            await site.hold()
            for name in ("good", "bad"):
                assert (await site.post("/v1/groups", {"id": name, "task": task(), "size": 2})).status == 202
        monkeypatch.setattr(groups_module, "catch_up", broken)
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            bad = (await site.get("/v1/groups/bad")).body
            assert (bad["state"], bad["reason"]) == ("failed", "internal_error")
            assert (await site.get("/v1/groups/good?wait_s=60")).body["state"] == "complete"


async def test_only_a_draw_that_cannot_be_resumed_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = DrawRunner.load

    async def broken(self: DrawRunner, groups: Any) -> None:
        if self.draw.id == "bad":
            raise ValueError("what it has cannot be read")
        await load(self, groups)

    async with scripted() as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            for name in ("good", "bad"):
                body = {"id": name, "group_size": 2, "source": {"tasks": [task()]}}
                assert (await site.post("/v1/draws", body)).status == 201
        with monkeypatch.context() as patch:
            patch.setattr(DrawRunner, "load", broken)
            async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
                assert (await site.get("/v1/draws/good")).body["state"] == "active"
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            bad = (await site.get("/v1/draws/bad")).body
            assert (bad["state"], bad["reason"]) == ("ended", "unusable") and "cannot be read" in bad["detail"]


async def test_only_a_rollout_that_cannot_be_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = SqliteStore.get

    async def broken(self: SqliteStore, rollout_id: str) -> Any:
        if rollout_id == "bad" and not is_read:
            raise ValueError("its row cannot be decoded")
        return await get(self, rollout_id)

    is_read = False
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await site.hold()
        await site.submit("bad", "good")
        monkeypatch.setattr(SqliteStore, "get", broken)
        assert (await site.call("PATCH", "/v1/pools", json={"init": 4})).status == 200
        page: dict[str, Any] = {}
        while len(page.get("rollouts", ())) < 2:
            page = (await site.get("/v1/rollouts?state=ended")).body
        is_read = True
        bad, good = await site.ended("bad"), await site.ended("good")
        assert (bad["outcome"], bad["failure"]["code"]) == ("failed", "internal_error")
        assert "cannot be decoded" in bad["failure"]["detail"] and bad["reward"] is None
        assert good["reward"] == 1.0
