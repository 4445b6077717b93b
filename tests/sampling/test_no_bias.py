"""What reaches the trainer is what was started, however long it took: statistics over a simulation.

Successes take six times as long as failures here, and some rollouts ten times as long as others. With the default
rules, delivered groups must show no trace of that; the two settings that are documented as biased must, or these tests
could not fail. Seeds are fixed; a difference is measured in standard errors of the two means (which favours neither
result: most groups are in both, so by chance alone it stays well below one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean, pvariance

import pytest

from bench._draw_policies import RollyardSampler, reference
from bench._draw_world import StartedGroup, World
from bench.draw import followed, window
from rollyard.core.draw import KeepSpec, OnStale, Surplus

pytestmark = pytest.mark.slow

WORLD = World(want=16, slots=256, train_s=100.0, success_slower=6.0, stragglers=0.02, seed=7)
COUNT = 40
ALL = KeepSpec("all")

RULES: dict[str, dict[str, object]] = {
    "default": {},
    "default, keep all": {"keep": ALL},
    "wait": {"on_stale": OnStale.WAIT, "max_staleness": 2},
    "cancel": {"surplus": Surplus.CANCEL},
    "cancel, keep all": {"surplus": Surplus.CANCEL, "keep": ALL},
    "drop": {"on_stale": OnStale.DROP},
    "drop, keep all": {"on_stale": OnStale.DROP, "keep": ALL},
}
FAIR = ["default", "default, keep all", "wait"]
BIASED = ["cancel", "cancel, keep all", "drop", "drop, keep all"]


@cache
def drawn(rules: str) -> tuple[list[StartedGroup], list[StartedGroup]]:
    """Returns the groups that were started, and those that were delivered, during the counted batches; only groups that
    the filter keeps. Neither contains the other: groups that run at either end of the period are in only one of
    them."""
    sampler = RollyardSampler(WORLD, is_early=rules == "wait", **RULES[rules])
    tally = sampler.run(followed(COUNT))
    since_s, until_s = window(tally, COUNT)
    accepted = [group for group in tally.started if group.script.has_signal or "keep all" in rules]
    started = [one for one in accepted if since_s <= one.started_s < until_s]
    delivered = [one for one in accepted if one.end == "delivered" and since_s <= one.ended_s < until_s]
    return started, delivered


def pass_rate(group: StartedGroup) -> float:
    return group.script.pass_rate


def length(group: StartedGroup) -> float:
    return float(group.script.tokens)


def slowest_s(group: StartedGroup) -> float:
    return max(member.took_s for member in group.script.members)


def difference(
    started: Sequence[StartedGroup], delivered: Sequence[StartedGroup], of: Callable[[StartedGroup], float]
) -> float:
    """Returns how much more of it the delivered groups have, in standard errors."""
    delivered_values, started_values = [of(one) for one in delivered], [of(one) for one in started]
    error = math.sqrt(
        pvariance(delivered_values) / len(delivered_values) + pvariance(started_values) / len(started_values)
    )
    return (fmean(delivered_values) - fmean(started_values)) / error


@pytest.mark.parametrize("of", [pass_rate, length, slowest_s])
@pytest.mark.parametrize("rules", FAIR)
def test_delivered_groups_are_like_the_started_ones(rules: str, of: Callable[[StartedGroup], float]):
    started, delivered = drawn(rules)
    assert len(delivered) >= COUNT * WORLD.want
    assert abs(difference(started, delivered, of)) < 1.5


@pytest.mark.parametrize("rules", BIASED)
def test_settings_documented_as_biased_are_biased(rules: str):
    started, delivered = drawn(rules)
    assert difference(started, delivered, slowest_s) < -5
    assert any(one.end == "thrown" for one in started)


@pytest.mark.parametrize("rules", ["cancel", "cancel, keep all"])
def test_the_bias_reaches_the_pass_rate_and_the_length(rules: str):
    assert difference(*drawn(rules), pass_rate) < -3.5, "successes are slow, so they are missing"
    assert difference(*drawn(rules), length) < -2.5


@pytest.mark.parametrize("rules", FAIR)
def test_every_started_group_is_finally_delivered_or_filtered(rules: str):
    started, _ = drawn(rules)
    assert {one.end for one in started} == {"delivered"}


def test_the_reference_sampler_is_biased_against_stragglers_and_successes():
    tally = reference(WORLD, followed(COUNT))
    since_s, until_s = window(tally, COUNT)
    started = [one for one in tally.started if one.script.has_signal and since_s <= one.started_s < until_s]
    delivered = [one for one in started if one.end == "delivered"]
    assert difference(started, delivered, pass_rate) < -5
    assert fmean(one.script.has_straggler for one in delivered) < 0.5 * fmean(
        one.script.has_straggler for one in started
    )


def test_rewards_before_filtering_cover_all_judged_groups():
    sampler = RollyardSampler(WORLD)
    sampler.run(followed(COUNT))
    figures = sampler.draw_state.progress.figures
    judged = [one.script for one in sampler.tally.started if not one.left]
    assert figures.judged == len(judged)
    assert figures.reward_sum == sum(member.reward for script in judged for member in script.members)
    assert figures.all_zero == sum(script.pass_rate == 0.0 for script in judged)
    assert figures.all_one == sum(script.pass_rate == 1.0 for script in judged)


def test_under_wait_no_group_of_the_simulation_is_too_old():
    _, delivered = drawn("wait")
    assert max(one.staleness for one in delivered) <= 2
