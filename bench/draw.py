"""`rollyard bench draw`: time, waste and bias of four policies that fill a trainer's batches.

A simulation in virtual time (`_draw_world.py`: the world; `_draw_policies.py`: the policies). All policies get the same
tasks with the same scripted latencies; ours uses the rules of the service; there is no engine. It measures the rules,
not this machine: the same seed gives the same figures anywhere.

The defaults: as many rollout slots as a batch needs at the share of groups with signal (two batches of rollouts), and a
trainer that takes as long for a batch as the reference's rollouts do, as if the two were sized to match.

How it counts. The first batches are left out, until stragglers have had time to arrive. Times and tokens are those of
the counted batches. Shares are of the groups with signal that started during them, each followed to its end: the
simulation continues until the last one has ended, so groups in flight at the end of counting favour no policy. A task
that is started again is a new group. Tokens of groups without signal are counted separately: every policy pays them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from bench._draw_policies import Enough, RollyardSampler, Tally, plain, reference
from bench._draw_world import World
from rollyard.core import Json
from rollyard.core.draw import Surplus

WARM = 12
"""Batches before counting: a straggler takes about as long as five of them."""

FOLLOWED = 400
"""Batches after the counted ones. A group that has not ended by then is a defect of the policy."""


async def bench_draw(
    *,
    quick: bool = False,
    batches: int = 48,
    want: int = 32,
    slots: int | None = None,
    train_s: float = 150.0,
    stragglers: float = 0.05,
    seed: int = 0,
) -> dict[str, Json]:
    world = World(
        seed=seed,
        want=want,
        slots=2 * want * 8 if slots is None else slots,
        train_s=train_s,
        stragglers=stragglers,
    )
    count = max(1, batches // 4) if quick else batches
    results = {name: figures(way(world, followed(count)), count, world) for name, way in WAYS.items()}
    rollyard, baseline = results.pop("ours"), results["reference"]
    ratios: dict[str, Json] = {
        "batch_time_ratio": _ratio(baseline["batch_time_s"], rollyard["batch_time_s"]),
        "waste_ratio": _ratio(rollyard["thrown_per_delivered"], baseline["thrown_per_delivered"]),
        "straggler_delivery_ratio": rollyard["straggler_delivery_ratio"],
    }
    stated: dict[str, Json] = {
        "batches": count,
        "want": want,
        "group_size": world.group_size,
        "slots": world.slots,
        "train_s": train_s,
        "straggler_share": stragglers,
        "seed": seed,
    }
    return {"metrics": {**ratios, **rollyard, **stated}, "versus": dict[str, Json](results)}


WAYS: Mapping[str, Callable[[World, Enough], Tally]] = {
    "ours": lambda world, enough: RollyardSampler(world).run(enough),
    "reference": reference,
    "ours_cancel": lambda world, enough: RollyardSampler(world, surplus=Surplus.CANCEL).run(enough),
    "plain": plain,
    "reference_overlapped": lambda world, enough: reference(world, enough, is_overlapped=True),
}


def followed(count: int, warm: int = WARM) -> Enough:
    """Returns a function that is True once that many batches are counted and every group started in them has ended."""

    looked_at = warm + count - 1  # in batches: checked only after a new batch

    def enough(tally: Tally) -> bool:
        nonlocal looked_at
        trained = len(tally.trained_s)
        if trained <= looked_at:
            return False
        looked_at = trained
        since_s, until_s = window(tally, count, warm)
        has_open = any(since_s <= group.started_s < until_s and group.end == "open" for group in tally.started)
        return not has_open or trained >= warm + count + FOLLOWED

    return enough


def window(tally: Tally, count: int, warm: int = WARM) -> tuple[float, float]:
    """Returns the start and end of the counted batches."""
    return tally.trained_s[warm - 1], tally.trained_s[warm + count - 1]


def figures(tally: Tally, count: int, world: World) -> dict[str, Json]:
    """Returns the figures of one policy; the module docstring defines how they are counted."""
    since_s, until_s = window(tally, count)
    ended = [group for group in tally.started if since_s <= group.ended_s < until_s]
    by_end = {how: [group for group in ended if group.end == how] for how in ("delivered", "filtered", "thrown")}
    tokens = {how: sum(group.sampled for group in groups) for how, groups in by_end.items()}
    delivered = len(by_end["delivered"])
    admitted = [group for group in tally.started if since_s <= group.started_s < until_s and group.script.has_signal]
    arrived = [group for group in admitted if group.end == "delivered"]
    share_admitted = fmean(group.script.has_straggler for group in admitted)
    share_arrived = fmean(group.script.has_straggler for group in arrived)
    lengths = [fmean(group.script.tokens for group in groups) / world.group_size for groups in (arrived, admitted)]
    return {
        "batch_time_s": round((until_s - since_s) / count, 1),
        "delivered_groups": delivered,
        "tokens_sampled": sum(tokens.values()),
        "tokens_filtered": tokens["filtered"],
        "tokens_thrown": tokens["thrown"],
        "thrown_per_delivered": round(tokens["thrown"] / delivered, 1),
        "stragglers_admitted": round(share_admitted, 4),
        "stragglers_delivered": round(share_arrived, 4),
        "straggler_delivery_ratio": _ratio(share_arrived, share_admitted),
        "length_ratio": _ratio(*lengths),
        "staleness_mean": round(fmean(group.staleness for group in by_end["delivered"]), 3),
        "staleness_most": max(group.staleness for group in by_end["delivered"]),
    }


def _ratio(one: Json, other: Json) -> float | None:
    """Returns None if `other` is 0."""
    assert isinstance(one, int | float) and isinstance(other, int | float)
    return round(one / other, 4) if other else None
