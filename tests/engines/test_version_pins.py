"""Version pins: a pause waits while an engine has the pinned weights, or may come back with them."""

from __future__ import annotations

import asyncio

import pytest

from rollyard.core.failure import PolicyPinned
from rollyard.engines import Health, Router
from rollyard.engines.weights.state import PolicyState
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import routed, spec_of


async def health_is(router: Router, engine_id: str, health: Health) -> None:
    async with asyncio.timeout(90):
        while {one.spec.id: one.health for one in router.list()}[engine_id] is not health:
            await router.pool("default").gates_moved()


async def restart(server: ScriptedEngine, router: Router, engine_id: str = "e1") -> None:
    """The engine comes back with the weights that it loads at start, and is quarantined."""
    await server.stop()
    await health_is(router, engine_id, Health.DOWN)
    server.version = "default"
    await server.start()
    await health_is(router, engine_id, Health.QUARANTINED)


async def holds(router: Router) -> bool:
    try:
        await router.policies.pause("default", holder="me", wait_s=0)
    except PolicyPinned as error:
        assert error.data["evaluations"] == ["e"]
        return True
    return False


async def test_a_pin_delays_a_pause_while_one_engine_has_the_weights() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        await router.policies.resume("default", 7)
        router.policies.pins.pin("default", "e", 7)
        assert await holds(router)
        await restart(one, router)
        assert await holds(router), "the other engine still has them"
        await restart(two, router, "e2")
        status = await router.policies.pause("default", holder="me")
        assert status.state is PolicyState.PAUSED


async def test_a_pin_delays_a_pause_while_an_engine_that_is_down_may_come_back() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        await router.policies.resume("default", 7)
        router.policies.pins.pin("default", "e", 7)
        await server.stop()
        await health_is(router, "e1", Health.DOWN)
        assert await holds(router)
        await server.start()
        await health_is(router, "e1", Health.UP)
        assert await holds(router)


async def test_engines_of_another_version_do_not_delay_a_pause() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, routed(one, two) as router:
        await router.policies.resume("default", 7)
        router.policies.pins.pin("default", "e", 7)
        await router.policies.resume("default", 8, engines=["e2"])
        assert await holds(router)
        await restart(one, router)
        assert not await holds(router)


@pytest.mark.parametrize("is_removed", [False, True])
async def test_a_waiting_pause_succeeds_when_the_last_engine_is_lost(is_removed: bool) -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        await router.policies.resume("default", 7)
        router.policies.pins.pin("default", "e", 7)
        waiting = asyncio.create_task(router.policies.pause("default", holder="me"))
        if is_removed:
            await router.remove("e1")
        else:
            await restart(server, router)
        async with asyncio.timeout(90):
            assert (await waiting).state is PolicyState.PAUSED
        if is_removed:
            await router.add(spec_of(server))
        assert (await router.policies.resume("default", 7)).state is PolicyState.RUNNING
        assert await holds(router), "the pinned version is served again"
        router.policies.pins.unpin("default", "e")
        assert not await holds(router)


async def test_a_pause_waits_for_the_last_pin() -> None:
    async with ScriptedEngine() as server, routed(server) as router:
        pins = router.policies.pins
        pins.pin("default", "d", 0)
        pins.pin("default", "e", 0)
        pins.pin("other", "f", 0)
        waiting = asyncio.create_task(router.policies.pause("default", holder="me"))
        pins.unpin("default", "d")
        assert await holds(router) and not waiting.done()
        pins.unpin("default", "e")
        async with asyncio.timeout(90):
            assert (await waiting).state is PolicyState.PAUSED
