"""Rescoring: what may be scored again, what it holds meanwhile, and what never gets a score."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.agents import Agent
from rollyard.core import Outcome, Rollout, Run, State
from rollyard.core.access import Quota
from rollyard.core.failure import InvalidRequest, QuotaExceeded, UnknownAgent
from rollyard.engines import RouterSettings
from rollyard.pipeline import rescoring
from rollyard.pipeline.attempts.runner import StageRunner
from rollyard.testing.script import Reply
from tests.pipeline.site import SETTINGS, Site, finish, new_run, open_site, says, shell, shell_task

pytestmark = pytest.mark.slow

DO_IT = says(shell("touch done"), finish())


async def test_a_run_interrupted_by_infrastructure_cannot_get_a_reward_later(tmp_path: Path):
    script = says(shell("touch done"), Reply(text="hello", fault="fewer_logprobs"))
    settings = replace(SETTINGS, max_attempts=1)
    async with open_site(
        tmp_path, script, settings=settings, router_settings=RouterSettings(engine_wait_s=0.5)
    ) as site:
        rollout = await site.rolled(shell_task(checks=["true"]))
        assert rollout.ending is not None
        assert rollout.ending.score is None
        assert await site.store.trajectory(rollout.id) is not None, "its tokens are available"
        with pytest.raises(InvalidRequest, match="cut short"):
            await site.pipeline.rescore(rollout.id)
        assert (await site.store.get(rollout.id)).scores == ()


async def test_a_rollout_is_rescored_after_its_agent_was_uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())

        def uninstalled(name: str) -> Agent:
            raise UnknownAgent(f"there is no agent {name!r}")

        monkeypatch.setattr(site.pipeline.resources.agents, "get", uninstalled)
        again = await site.pipeline.rescore(rollout.id)
        assert [score["reward"] for score in again.scores] == [1.0]


async def test_a_rollout_has_a_bounded_number_of_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rescoring, "MOST_SCORES", 1)
    async with open_site(tmp_path, DO_IT) as site:
        rollout = await site.rolled(shell_task())
        both = [site.pipeline.rescore(rollout.id) for _ in range(2)]
        results = await asyncio.gather(*both, return_exceptions=True)
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["InvalidRequest", "Rollout"], "one of them waited for the other"
        with pytest.raises(InvalidRequest, match="1 later scores"):
            await site.pipeline.rescore(rollout.id)
        assert len((await site.store.get(rollout.id)).scores) == 1


async def test_the_lease_of_a_rescoring_sandbox_is_renewed(tmp_path: Path):
    settings = replace(SETTINGS, lease_s=1.0)
    async with open_site(tmp_path, DO_IT, settings=settings) as site:
        rollout = await site.rolled(shell_task(checks=["sleep 2.5; test -f done"]))
        assert rollout.ending is not None
        assert rollout.ending.outcome is Outcome.COMPLETED
        again = await site.pipeline.rescore(rollout.id)
        assert [score["reward"] for score in again.scores] == [1.0]


async def test_a_rescoring_takes_a_place_in_the_budget_of_live_sandboxes(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, max_live=1)) as site:
        rollout = await site.rolled(shell_task())
        other = await site.submit(shell_task(setup=["sleep 60"]))
        await site.until(other, State.INIT)
        rescoring = asyncio.create_task(site.pipeline.rescore(rollout.id))
        third = await site.submit(shell_task())
        while not site.pipeline.pools()["live"]["waiting"]:  # type: ignore[index,call-overload]
            await asyncio.sleep(0)
        assert site.pipeline.eval_pool.active == 0, "it waits: the one place is taken"
        await site.pipeline.cancel(other)
        assert len((await rescoring).scores) == 1
        assert (await site.ended(third)).ending.outcome is Outcome.COMPLETED  # type: ignore[union-attr]
        site.nothing_left()


async def waiting(site: Site, rescorings: int, *, for_eval: int = 1) -> None:
    """Waits until so many rescorings wait, and so many rollouts and rescorings wait for an EVAL slot."""
    async with asyncio.timeout(60):
        while (site.pipeline.rescoring.waiting, site.pipeline.eval_pool.waiting) != (rescorings, for_eval):
            await asyncio.sleep(0)


def rescore_all(site: Site, *rollouts: Rollout) -> list[asyncio.Task[Rollout]]:
    return [asyncio.create_task(site.pipeline.rescore(rollout.id)) for rollout in rollouts]


def order_of_evals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of rollouts whose EVAL has started, in that order."""
    order: list[str] = []
    evaluate = StageRunner.evaluate

    async def noting(self: StageRunner, *args: object, **options: object) -> object:
        order.append(self._rollout.id)  # pyright: ignore[reportPrivateUsage]
        return await evaluate(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(StageRunner, "evaluate", noting)
    return order


async def test_rescorings_that_wait_for_eval_take_no_place_from_rollouts(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, max_live=2)) as site:
        rollout = await site.rolled(shell_task())
        site.pipeline.resize({"eval": 0})
        rescorings = rescore_all(site, rollout, rollout, rollout)
        await waiting(site, 3)
        for other in [await site.submit(shell_task()) for _ in range(2)]:
            await site.until(other, State.EVAL)
        site.pipeline.resize({"eval": 1})
        assert max(len(rescored.scores) for rescored in await asyncio.gather(*rescorings)) == 3
        site.nothing_left()
        assert (site.pipeline.places_free, site.pipeline.rescoring.waiting) == (2, 0)


async def test_a_rescoring_evaluates_after_the_rollouts_that_wait_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_site(tmp_path, DO_IT) as site:
        old = await site.rolled(shell_task(), rollout_id="old")
        order = order_of_evals(monkeypatch)
        site.pipeline.resize({"eval": 0})
        for name in ("a", "b"):
            await site.submit(shell_task(), name)
        await waiting(site, 0, for_eval=2)
        rescorings = rescore_all(site, old, old)
        await waiting(site, 2, for_eval=3)
        site.pipeline.resize({"eval": 1})
        await asyncio.gather(*rescorings)
        assert order[2:] == ["old", "old"]


async def test_owners_take_turns_to_rescore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with open_site(tmp_path, DO_IT) as site:
        for owner in ("flood", "small"):
            await new_run(site, Run(owner, owner=owner))
        flood = await site.rolled(shell_task(), rollout_id="f", run="flood")
        small = await site.rolled(shell_task(), rollout_id="s", run="small")
        order = order_of_evals(monkeypatch)
        site.pipeline.resize({"eval": 0})
        rescorings = rescore_all(site, flood, flood, flood, flood)
        await waiting(site, 4)
        rescorings += rescore_all(site, small)
        await waiting(site, 5)
        site.pipeline.resize({"eval": 1})
        await asyncio.gather(*rescorings)
        assert order == ["f", "s", "f", "f", "f"]


async def test_a_rescoring_of_higher_priority_does_not_wait_for_one_of_lower_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_site(tmp_path, DO_IT) as site:
        low = await site.rolled(shell_task(), rollout_id="low")
        high = await site.rolled(shell_task(), rollout_id="high", priority=5)
        order = order_of_evals(monkeypatch)
        site.pipeline.resize({"eval": 0})
        rescorings = rescore_all(site, low, low)
        await waiting(site, 2)
        rescorings += rescore_all(site, high)
        await waiting(site, 3, for_eval=2)
        site.pipeline.resize({"eval": 1})
        await asyncio.gather(*rescorings)
        assert order == ["high", "low", "low"]


async def test_rescorings_count_in_the_quotas_of_queued_and_live_rollouts(tmp_path: Path):
    async with open_site(tmp_path, DO_IT) as site:
        site.pipeline.quota_of = lambda owner: Quota(queued=2, live=1) if owner == "t" else Quota()
        await new_run(site, Run("tenant", owner="t"))
        rollout = await site.rolled(shell_task(), run="tenant")
        site.pipeline.resize({"eval": 0})
        (first,) = rescore_all(site, rollout)
        await waiting(site, 1)  # it has its turn, and has left the queue
        rescorings = rescore_all(site, *[rollout] * 4)
        async with asyncio.timeout(60):
            while sum(one.done() for one in rescorings) < 2:
                await asyncio.sleep(0)
        refused = [one for one in rescorings if one.done()]
        assert all(isinstance(one.exception(), QuotaExceeded) for one in refused), "two are queued"
        with pytest.raises(QuotaExceeded):
            await site.submit(shell_task(), run="tenant")
        site.pipeline.resize({"eval": 4})
        await asyncio.gather(first, *[one for one in rescorings if one not in refused])
        site.pipeline.resize({"init": 0})
        await site.submit(shell_task(), run="tenant")
        assert site.pipeline.queued_of("tenant") == 1


async def test_a_cancelled_rescoring_leaves_its_turn_to_the_next(tmp_path: Path):
    async with open_site(tmp_path, DO_IT, settings=replace(SETTINGS, max_live=1)) as site:
        rollout = await site.rolled(shell_task())
        site.pipeline.resize({"eval": 0})
        rescorings = rescore_all(site, *[rollout] * 4)
        await waiting(site, 4)
        for position in (0, 2, 1):  # it has its turn; it does not; it has just got it
            rescorings[position].cancel()
        await asyncio.wait(rescorings[:3])
        await waiting(site, 1)
        site.pipeline.resize({"eval": 1})
        assert len((await rescorings[3]).scores) == 1
        assert site.pipeline.places_free == 1
        assert (await site.rolled(shell_task())).ending is not None
