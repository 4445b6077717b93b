"""Tokens of an engine that was replaced never get a version that it may not have had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollyard.core import Sampling
from rollyard.core.policy import PolicyRecord
from rollyard.engines import Health, Router
from rollyard.engines.base import Generation
from rollyard.engines.clients import http as http_module
from rollyard.engines.routing.follower_router import FollowerRouter
from rollyard.engines.routing.settings import RouterSettings
from rollyard.testing.script import Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import complete, routed, spec_of

WORDS = "the quick brown fox jumps over the lazy dog and runs into the woods"
SCRIPT = Rules(default=(Reply(WORDS),))
SLOW_WATCH = RouterSettings(watch_s=600.0, backoff_s=0.001, engine_wait_s=20.0, abort_grace_s=5.0, probe_s=20.0)

KINDS: dict[str, dict[str, Any]] = {
    "generate": {},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
}


@asynccontextmanager
async def named(kind: str, version: int = 3, **fields: Any) -> AsyncGenerator[tuple[ScriptedEngine, Router], None]:
    """An engine whose policy has this version, without health checks."""
    async with (
        ScriptedEngine(SCRIPT, **KINDS[kind], **fields) as server,
        routed(server, settings=SLOW_WATCH) as router,
    ):
        await router.policies.pause("default", holder="trainer")
        await router.policies.resume("default", version)
        yield server, router


async def sampled(router: Router, session: str = "s1", **fields: Any) -> Generation:
    async with router.session("default", session) as one:
        return await complete(one, **fields)


def versions(generation: Generation) -> set[int]:
    return {span.version for span in generation.versions}


def health(router: Router) -> Health:
    (status,) = router.list()
    return status.health


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_version_of_an_unchanged_engine_is_trusted(kind: str, is_streamed: bool) -> None:
    fields: dict[str, Any] = {"on_tokens": lambda _: None} if is_streamed else {}
    async with named(kind) as (_, router):
        for _ in range(3):
            generation = await sampled(router, **fields)
            assert (versions(generation), generation.untrainable) == ({3}, "")
        assert health(router) is Health.UP


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_restarted_between_two_rollouts_is_quarantined(kind: str, is_streamed: bool) -> None:
    fields: dict[str, Any] = {"on_tokens": lambda _: None} if is_streamed else {}
    async with named(kind) as (server, router):
        await sampled(router, **fields)
        await server.restart()
        generation = await sampled(router, "s2", **fields)
        assert "was it restarted?" in generation.untrainable and 3 not in versions(generation)
        assert health(router) is Health.QUARANTINED

        await router.policies.resume("default", 4)
        again = await sampled(router, "s3", **fields)
        assert (versions(again), again.untrainable, health(router)) == ({4}, "", Health.UP)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_restarted_between_two_calls_is_quarantined(kind: str) -> None:
    async with named(kind) as (server, router), router.session("default", "s1") as session:
        assert not (await complete(session)).untrainable
        await server.restart()
        assert (await complete(session)).untrainable
        assert health(router) is Health.QUARANTINED


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_of_an_engine_restarted_during_a_stream_are_untrainable(kind: str) -> None:
    """Tokens before the restart have the version; those of the new process do not."""
    streamed_ids: list[int] = []
    async with named(kind, tokens_per_s=40.0) as (server, router), router.session("default", "s1") as session:
        task = asyncio.create_task(complete(session, on_tokens=streamed_ids.extend))
        while len(streamed_ids) < 5:
            await asyncio.sleep(0.01)
        await server.restart()
        server.tokens_per_s = None
        async with asyncio.timeout(20):
            while health(router) is not Health.QUARANTINED:
                await asyncio.sleep(0.01)
        await router.policies.resume("default", 4)
        generation = await task
        assert generation.untrainable, "a part of it was sampled by unknown weights"


async def test_tokens_streamed_before_the_engine_died_keep_their_version() -> None:
    streamed_ids: list[int] = []
    async with (
        ScriptedEngine(SCRIPT, tokens_per_s=40.0) as first,
        ScriptedEngine(SCRIPT) as second,
        routed(first, second, settings=SLOW_WATCH) as router,
    ):
        await router.policies.pause("default", holder="trainer")
        await router.policies.resume("default", 3)
        async with router.session("default", "s0") as other, router.session("default", "s1") as session:
            dying, surviving = (first, second) if session.engine.spec.id == "e1" else (second, first)
            dying.tokens_per_s, surviving.tokens_per_s = 40.0, None
            await complete(session, max_tokens=2)
            task = asyncio.create_task(complete(session, on_tokens=streamed_ids.extend))
            while len(streamed_ids) < 5:
                await asyncio.sleep(0.01)
            await dying.stop()
            generation = await task
            assert other.engine is not None
        assert (versions(generation), generation.untrainable) == ({3}, "")


async def test_an_engine_that_reports_an_older_version_is_quarantined() -> None:
    async with named("generate") as (server, router):
        server.version = "2"
        generation = await sampled(router)
        assert "reports version 2 where it had version 3" in generation.untrainable
        assert health(router) is Health.QUARANTINED


@asynccontextmanager
async def silent(*, reports_start: bool = True) -> AsyncGenerator[tuple[ScriptedEngine, Router], None]:
    """An engine of version 3 that returns no versions and has no control routes."""
    async with ScriptedEngine(SCRIPT, is_scale_out=False) as server:
        server.control.is_there = False
        server.started_at = server.started_at if reports_start else None
        async with routed(server, settings=SLOW_WATCH) as router:
            await router.policies.pause("default", holder="trainer")
            await router.policies.resume("default", 3)
            yield server, router


@pytest.mark.parametrize("reports_start", [True, False])
async def test_an_engine_without_versions_is_verified_after_a_lost_connection(reports_start: bool) -> None:
    async with silent(reports_start=reports_start) as (server, router):
        assert not (await sampled(router)).untrainable
        await server.stop()  # the connection is lost, and the process stays the same
        await server.start()
        generation = await sampled(router, "s2")
        assert bool(generation.untrainable) is not reports_start
        assert health(router) is Health.UP
        if not reports_start:
            assert "does not report which weights it has" in generation.untrainable
            assert versions(generation) == {-1}
            await router.policies.resume("default", 3, engines=["e1"])
            assert not (await sampled(router, "s3")).untrainable


@pytest.mark.parametrize("reports_start", [True, False])
async def test_connections_closed_by_the_client_do_not_count_as_lost(
    reports_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_module, "KEEPALIVE_S", 0.02)
    async with silent(reports_start=reports_start) as (_, router):
        for _ in range(3):
            await asyncio.sleep(0.1)
            assert not (await sampled(router)).untrainable


@pytest.mark.parametrize("is_idle", [True, False])
async def test_an_engine_without_versions_that_was_restarted_is_quarantined(
    is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_idle:  # nothing is connected when it restarts
        monkeypatch.setattr(http_module, "KEEPALIVE_S", 0.02)
    async with silent() as (server, router):
        assert not (await sampled(router)).untrainable
        await asyncio.sleep(0.1 if is_idle else 0)
        await server.restart()
        assert "was restarted" in (await sampled(router)).untrainable
        assert health(router) is Health.QUARANTINED


@pytest.mark.parametrize("is_restarted", [True, False])
async def test_a_restart_of_the_engine_while_the_service_was_down_is_found(is_restarted: bool) -> None:
    saved: dict[str, PolicyRecord] = {}

    async def save(record: PolicyRecord) -> None:
        saved[record.name] = record

    async with silent() as (server, router):
        router.policies.save = save
        await router.policies.resume("default", 4)
        if is_restarted:
            await server.restart()
        async with Router(SLOW_WATCH) as next_router:
            next_router.policies.restore(saved.values())
            status = await next_router.add(spec_of(server))
            assert (status.health is Health.QUARANTINED) is is_restarted
            if not is_restarted:
                generation = await sampled(next_router)
                assert (versions(generation), generation.untrainable) == ({4}, "")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_node_detects_a_restarted_engine(kind: str) -> None:
    """A node calls the engine directly, but only the head gives the engine a version."""
    async with named(kind) as (server, head), FollowerRouter(SLOW_WATCH) as node:
        await node.follow(head.gates())
        async with asyncio.timeout(20):
            while health(node) is not Health.UP:
                await asyncio.sleep(0.01)
        generation = await sampled(node)
        assert (versions(generation), generation.untrainable) == ({3}, "")
        await server.restart()
        assert "was it restarted?" in (await sampled(node, "s2")).untrainable


async def test_the_watch_finds_a_restart_before_any_rollout_does() -> None:
    quick = RouterSettings(watch_s=0.05, backoff_s=0.001, engine_wait_s=20.0, probe_s=20.0)
    async with ScriptedEngine(SCRIPT) as server, routed(server, settings=quick) as router:
        await router.policies.pause("default", holder="trainer")
        await router.policies.resume("default", 3)
        await server.restart()
        async with asyncio.timeout(20):
            while health(router) is not Health.QUARANTINED:
                await asyncio.sleep(0.02)


async def test_an_engine_of_a_policy_without_a_version_is_trusted() -> None:
    """Without a version, its tokens cannot have a wrong one."""
    async with ScriptedEngine(SCRIPT) as server, routed(server, settings=SLOW_WATCH) as router:
        await sampled(router)
        await server.restart()
        generation = await sampled(router, "s2")
        assert (versions(generation), generation.untrainable, health(router)) == ({0}, "", Health.UP)


async def test_a_version_set_by_the_trainer_itself_may_increase_but_not_disappear() -> None:
    async with ScriptedEngine(SCRIPT) as server, routed(server, settings=SLOW_WATCH) as router:
        for version in ("7", "8"):
            server.version = version
            generation = await sampled(router)
            assert (versions(generation), generation.untrainable) == ({int(version)}, "")
        await server.restart()
        assert "no version" in (await sampled(router)).untrainable
        assert health(router) is Health.QUARANTINED


async def test_kept_calls_may_report_the_next_version() -> None:
    async with named("generate", tokens_per_s=60.0) as (server, router), router.session("default", "s1") as session:
        await complete(session, sampling=Sampling(), max_tokens=2)  # it reports its versions: the next call may be kept
        task = asyncio.create_task(complete(session))
        async with asyncio.timeout(20):
            while not server.running:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await router.policies.pause("default", holder="trainer", mode="keep")  # type: ignore[arg-type]
        await router.policies.resume("default", 4)
        generation = await task
        assert versions(generation) <= {3, 4} and not generation.untrainable
        assert health(router) is Health.UP
