"""`rollyard bench draw`: reproducible figures for a seed, and properties that hold for every seed."""

import pytest

from bench._draw_policies import RollyardSampler, plain, reference
from bench._draw_world import World
from bench.draw import WAYS, bench_draw, followed

from .conftest import Cli

SMALL = {"batches": 8, "want": 4, "train_s": 150.0}


async def test_a_seed_gives_the_same_consistent_figures():
    report = await bench_draw(**SMALL)
    assert report == await bench_draw(**SMALL)
    metrics, versus = report["metrics"], report["versus"]
    assert isinstance(metrics, dict) and isinstance(versus, dict)
    assert {"ours", *versus} == set(WAYS)
    assert metrics["slots"] == 64 and metrics["tokens_thrown"] == 0 and metrics["waste_ratio"] == 0.0
    assert metrics["straggler_delivery_ratio"] == metrics["length_ratio"] == 1.0
    reference_figures = versus["reference"]
    assert isinstance(reference_figures, dict)
    assert (
        isinstance(reference_figures["straggler_delivery_ratio"], float)
        and reference_figures["straggler_delivery_ratio"] < 0.5
    )
    for name, figures in {"ours": metrics, **versus}.items():
        assert isinstance(figures, dict)
        assert figures["delivered_groups"] == 8 * 4, name
        assert isinstance(figures["batch_time_s"], float) and figures["batch_time_s"] >= 150.0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gets_the_same_groups(way: str):
    world = World(want=4, slots=64)
    tally = WAYS[way](world, followed(4))
    assert all(group.script == world.script(group.item) for group in tally.started[:40])
    assert [group.item.index for group in tally.started[:8]] == [group.item.index for group in first(world)]
    assert all(group.sampled <= group.script.tokens for group in tally.started)
    assert all(
        group.sampled == group.script.tokens for group in tally.started if group.end in ("delivered", "filtered")
    )


def first(world: World):
    return plain(world, lambda tally: len(tally.trained_s) >= 1).started[:8]


def test_without_stragglers_or_training_the_slots_are_the_limit():
    """No way can be faster than its slots allow: that would be an error of the virtual clock."""
    world = World(want=4, slots=16, train_s=0.0, stragglers=0.0)
    for tally in (RollyardSampler(world).run(followed(6)), reference(world, followed(6))):
        work_s = sum(
            member.took_s
            for group in tally.started
            if group.end in ("delivered", "filtered")
            for member in group.script.members
        )
        assert work_s <= 16 * max(group.ended_s for group in tally.started if group.end == "delivered") * 1.001


async def test_options_of_draw_are_refused_by_other_benches(cli: Cli):
    refused = await cli("bench", "restart", "--train-s", "5")
    assert (
        refused.status == 2 and "benchmark restart has no option train_s" in refused.err and "--train-s" in refused.err
    )
    accepted = await cli("bench", "draw", "--quick", "--batches", "8", "--want", "2", "--seed", "3", "--json")
    (figures,) = accepted.json
    assert figures["bench"] == "draw" and (figures["metrics"]["batches"], figures["metrics"]["seed"]) == (2, 3)
