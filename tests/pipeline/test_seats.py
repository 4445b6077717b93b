"""RUN admits as many rollouts as the engines have seats: by policy, in order, and every seat is released."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import AgentSpec, Outcome, Run, State, Task
from rollyard.core.engine import Admission
from rollyard.engines import EngineSpec, Kind, RouterSettings
from rollyard.engines.pool.admission import CapRules
from rollyard.testing.script import FolderTokenizer, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.pipeline.site import SETTINGS, Site, finish, new_run, open_site, quick, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


def patient_task() -> Task:
    """Its calls may wait as long as a test takes on a busy machine."""
    return quick(shell_task(), run_s=50, model_s=50)


@asynccontextmanager
async def playing(script: Any = DO_IT) -> AsyncGenerator[ScriptedEngine, None]:
    async with ScriptedEngine(script, tokenizer=FolderTokenizer(tokenizer_dir())) as engine:
        yield engine


def hold(engine: ScriptedEngine) -> None:
    """Makes the engine's calls wait from now on."""
    engine._work.open.clear()


def let_go(engine: ScriptedEngine) -> None:
    engine._work.open.set()


async def add(site: Site, engine: ScriptedEngine, name: str, **fields: Any) -> None:
    fields = {"admission": Admission.FIXED, "tokenizer": str(tokenizer_dir()), **fields}
    await site.router.add(EngineSpec(name, engine.url, Kind.VLLM, **fields))


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for a condition that has no event."""
    async with asyncio.timeout(90):
        while not is_so():
            await asyncio.sleep(0.01)


async def completed(site: Site, *ids: str) -> None:
    for rollout_id in ids:
        ending = (await site.ended(rollout_id)).ending
        assert ending is not None and ending.outcome is Outcome.COMPLETED, ending


def assert_no_seat_taken(site: Site) -> None:
    site.nothing_left()
    assert (site.pipeline.unseated, site.pipeline.ahead) == (0, {})
    for pool in site.router._policies.values():
        assert (pool.seats.taken, pool.seats.waiting) == (0, 0)


async def test_run_never_has_more_rollouts_than_the_engines_have_seats(tmp_path: Path):
    active_counts: list[int] = []

    def script(turn: Turn) -> Any:
        if "site" in opened and turn.session_id:
            active_counts.append(opened["site"].pipeline.run_pool.active)
        return DO_IT(turn)

    opened: dict[str, Site] = {}
    async with playing(script) as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "one", capacity=1)
        await add(site, engine, "two", capacity=2)
        opened["site"] = site
        hold(engine)
        ids = [await site.submit(patient_task()) for _ in range(12)]
        await until(lambda: engine.running == 3 and site.pipeline.unseated == SETTINGS.ready_slots)
        assert site.pipeline.run_pool.active == 3 and site.pipeline.run_pool.free == 5
        assert sorted(s.stats.sessions for s in site.router.list()) == [1, 2]  # each engine's seats are taken
        assert site.pipeline.pools()["ready"] == {"size": 4, "active": 4, "waiting": 4}
        waiting = [a for a in site.pipeline.live.values() if a.state is State.READY]
        assert len(waiting) == 4 and all(a.tick(1e9) is None for a in waiting)  # no clock runs
        let_go(engine)
        await completed(site, *ids)
        assert max(active_counts) == 3
        await site.idle()
        assert_no_seat_taken(site)


async def test_a_full_policy_does_not_block_the_rollouts_of_another(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=2, ready_slots=2, init_slots=1)
    async with (
        playing() as stuck,
        playing() as other,
        open_site(tmp_path, DO_IT, engines=0, settings=settings, run=Run("a", policy="full")) as site,
    ):
        await site.store.put_run(Run("b", policy="free"), {"id": "b"})
        site.pipeline.register_run(Run("b", policy="free"))
        await add(site, stuck, "stuck", policy="full", capacity=1)
        await add(site, other, "other", policy="free", capacity=8)
        hold(stuck)
        full = [await site.submit(patient_task()) for _ in range(10)]
        await until(lambda: stuck.running == 1 and site.router.waiting()["full"] == 2)
        hold(other)
        free = [await site.submit(patient_task(), run="b") for _ in range(8)]
        await until(lambda: other.running == 1 and site.pipeline.run_pool.free == 0)
        await site.until(free[1], State.READY)  # INIT prepares rollouts of this policy, too
        let_go(other)
        await completed(site, *free)  # with one RUN slot, while the other policy's rollouts wait
        assert site.router.waiting() == {"full": 2, "free": 0}
        let_go(stuck)
        await completed(site, *full)
        await site.idle()
        assert_no_seat_taken(site)


async def test_the_rollouts_of_a_paused_policy_take_no_run_slots(tmp_path: Path):
    settings = replace(SETTINGS, run_slots=2, ready_slots=2, init_slots=1)
    async with (
        playing() as paused,
        playing() as other,
        open_site(tmp_path, DO_IT, engines=0, settings=settings, run=Run("a", policy="paused")) as site,
    ):
        await new_run(site, Run("b", policy="free"))
        await add(site, paused, "paused", policy="paused", capacity=8)
        await add(site, other, "other", policy="free", capacity=8)
        await site.router.policies.pause("paused", holder="a")
        waiting = [await site.submit(patient_task()) for _ in range(6)]
        await until(lambda: site.router.waiting()["paused"] == 2)
        free = [await site.submit(patient_task(), run="b") for _ in range(6)]
        await completed(site, *free)
        assert site.pipeline.run_pool.active == 0
        await site.router.policies.resume("paused", 1)
        await completed(site, *waiting)
        await site.idle()
        assert_no_seat_taken(site)


async def test_a_policy_whose_engine_leaves_during_a_pause_has_seats_again_after_it(tmp_path: Path):
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "e", capacity=1)
        seats = site.router.seats("default")
        await site.router.policies.pause("default", holder="a")
        assert seats.free == 0
        await site.router.remove("e")
        assert seats.free == 0, "the policy is paused as a whole"
        await site.router.policies.resume("default", 1)
        assert seats.free is None


async def test_a_rollout_cancelled_while_it_waits_for_a_seat_leaves_nothing(tmp_path: Path):
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "e", capacity=1)
        hold(engine)
        first = await site.submit(patient_task())
        await until(lambda: engine.running == 1)
        waiting = [await site.submit(patient_task()) for _ in range(3)]
        await until(lambda: site.pipeline.unseated == 3)
        await site.pipeline.cancel(waiting[0])
        await site.pipeline.cancel(waiting[2])
        for rollout_id in (waiting[0], waiting[2]):
            ending = (await site.ended(rollout_id)).ending
            assert ending is not None and ending.outcome is Outcome.CANCELLED
        await until(lambda: len(site.pipeline.live) == 2)
        assert (site.pipeline.ready, site.pipeline.unseated, site.router.waiting()) == (
            1,
            1,
            {"default": 1},
        )
        let_go(engine)
        await completed(site, first, waiting[1])
        await site.idle()
        assert_no_seat_taken(site)


async def test_the_rollout_with_the_highest_priority_gets_the_next_seat(tmp_path: Path):
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "e", capacity=1)
        hold(engine)
        first = await site.submit(patient_task())
        await until(lambda: engine.running == 1)
        low = await site.submit(patient_task())
        await until(lambda: site.pipeline.unseated == 1)
        high = await site.submit(patient_task(), priority=5)
        await until(lambda: site.pipeline.unseated == 2)
        let_go(engine)
        await completed(site, first, low, high)
        call_order = [call.session_id for call in engine.calls]
        assert call_order.index(high) < call_order.index(low)


async def test_a_shrinking_cap_interrupts_no_rollout_and_the_next_ones_wait(tmp_path: Path):
    router_settings = RouterSettings(engine_wait_s=5.0, watch_s=0.02, cap_rules=CapRules(start=4, settle_s=0.0))
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0, router_settings=router_settings) as site:
        engine.kv_use = 0.9  # the cap neither grows nor shrinks
        await add(site, engine, "e", admission=Admission.ADAPTIVE)
        hold(engine)
        ids = [await site.submit(patient_task()) for _ in range(10)]
        await until(lambda: engine.running == 4 and site.pipeline.unseated == 4)
        engine.preemptions += 1
        await until(lambda: site.router.list()[0].cap == 3)
        assert (site.pipeline.run_pool.active, engine.running) == (4, 4)
        await site.pipeline.cancel(ids.pop(0))
        await until(
            lambda: site.router.seats("default").taken == 3 and site.pipeline.unseated == 4
        )  # the remaining rollouts already fill the new cap
        assert site.pipeline.run_pool.active == 3
        await site.pipeline.cancel(ids.pop(0))
        await until(
            lambda: engine.running == 3 and site.pipeline.unseated == 4
        )  # one gets a seat, and one comes from the queue
        let_go(engine)
        await completed(site, *ids)
        await site.idle()
        assert_no_seat_taken(site)


async def test_the_cap_grows_while_rollouts_wait_and_the_cache_has_room(tmp_path: Path):
    router_settings = RouterSettings(engine_wait_s=5.0, watch_s=0.02, cap_rules=CapRules(start=1, settle_s=0.0))
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0, router_settings=router_settings) as site:
        engine.kv_use = lambda: engine.running / 10
        await add(site, engine, "e", admission=Admission.ADAPTIVE, capacity=6)
        hold(engine)
        ids = [await site.submit(patient_task()) for _ in range(12)]
        await until(lambda: engine.running == 6)  # its capacity, though RUN has room for 8
        assert site.router.list()[0].cap == 6
        let_go(engine)
        await completed(site, *ids)


async def test_removing_an_engine_removes_its_seats(tmp_path: Path):
    async with playing() as staying, playing() as leaving, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, staying, "stays", capacity=1)
        await add(site, leaving, "leaves", capacity=1)
        hold(staying)
        hold(leaving)
        ids = [await site.submit(patient_task()) for _ in range(6)]
        await until(lambda: staying.running == leaving.running == 1 and site.pipeline.unseated == 4)
        await site.router.remove("leaves")
        seats = site.router.seats("default")
        assert (seats.bound, seats.taken) == (1, 2)
        let_go(staying)
        await completed(site, *ids)
        await site.idle()
        assert_no_seat_taken(site)


async def test_when_the_last_engine_is_removed_waiting_rollouts_wait_for_another(tmp_path: Path):
    async with playing() as leaving, playing() as coming, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, leaving, "leaves", capacity=1)
        hold(leaving)
        ids = [await site.submit(patient_task()) for _ in range(4)]
        await until(lambda: leaving.running == 1 and site.pipeline.unseated == 3)
        await site.router.remove("leaves")
        await until(lambda: site.pipeline.run_pool.active == 4)  # as without any engine
        await add(site, coming, "comes", capacity=1)
        await completed(site, *ids)
        await site.idle()
        assert_no_seat_taken(site)


async def test_an_agent_that_needs_no_model_needs_no_seat(tmp_path: Path):
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "e", capacity=1)
        hold(engine)
        first = await site.submit(patient_task())
        await until(lambda: engine.running == 1)
        idle = replace(patient_task(), agent=AgentSpec("noop"))
        ending = (await site.rolled(idle)).ending
        assert ending is not None and ending.outcome is Outcome.COMPLETED
        let_go(engine)
        await completed(site, first)
        await site.idle()
        assert_no_seat_taken(site)


async def test_a_drain_gives_back_rollouts_that_wait_for_a_seat(tmp_path: Path):
    async with playing() as engine, open_site(tmp_path, DO_IT, engines=0) as site:
        await add(site, engine, "e", capacity=1)
        hold(engine)
        first = await site.submit(patient_task())
        await until(lambda: engine.running == 1)
        second = await site.submit(patient_task())
        await until(lambda: site.pipeline.unseated == 1)
        draining = asyncio.create_task(site.pipeline.drain())
        await until(lambda: second not in site.pipeline.live)
        assert (await site.store.get(second)).state is State.QUEUED
        let_go(engine)
        await draining
        await completed(site, first)
        assert_no_seat_taken(site)
