"""`rollyard bench draw`: what a trainer waits for, throws away and never sees, by four ways to fill its batches.

A simulation in virtual time (`_draw_world.py`: the world; `_draw_policies.py`: the ways): the same tasks with the same
scripted latencies for all, our own rules as the service runs them, no engine. It says what the rules do, not how fast
this machine is; the same seed gives the same figures anywhere.

The defaults: rollout slots for what a batch needs at the share that has signal (two batches of rollouts), and a trainer
that takes as long for a batch as the reference's rollouts do, as where the two are bought to match.

How it is counted. The first batches are left out, until stragglers have had the time to arrive. Times and tokens are
those of the counted batches. Shares are of the groups with signal that were begun during them, each followed to its
end: the simulation goes on until the last one has ended, so what is in flight when the counting stops is neither for
nor against anybody. A task that is begun again is a new group. Tokens of groups without signal are counted apart:
everybody pays them for what is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from bench._draw_policies import Enough, Ours, Tally, plain, reference
from bench._draw_world import World
from rollyard.core import Json
from rollyard.core.draw import Surplus

WARM = 12
"""Batches before counting: a straggler takes as long as about five of them."""

FOLLOWED = 400
"""Batches after which a group that has not ended is a mistake of the policy, not of patience."""


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
    found = {name: figures(way(world, followed(count)), count, world) for name, way in WAYS.items()}
    ours, theirs = found.pop("ours"), found["reference"]
    ratios: dict[str, Json] = {
        "batch_time_ratio": _ratio(theirs["batch_time_s"], ours["batch_time_s"]),
        "waste_ratio": _ratio(ours["thrown_per_delivered"], theirs["thrown_per_delivered"]),
        "straggler_delivery_ratio": ours["straggler_delivery_ratio"],
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
    return {"metrics": {**ratios, **ours, **stated}, "versus": dict[str, Json](found)}


WAYS: Mapping[str, Callable[[World, Enough], Tally]] = {
    "ours": lambda world, enough: Ours(world).run(enough),
    "reference": reference,
    "ours_cancel": lambda world, enough: Ours(world, surplus=Surplus.CANCEL).run(enough),
    "plain": plain,
    "reference_overlapped": lambda world, enough: reference(world, enough, is_overlapped=True),
}


def followed(count: int, warm: int = WARM) -> Enough:
    """Until that many batches were counted, and every group that was begun in them has ended."""

    looked_at = warm + count - 1  # batches: between two of them nothing need be looked at

    def enough(tally: Tally) -> bool:
        nonlocal looked_at
        done = len(tally.trained_s)
        if done <= looked_at:
            return False
        looked_at = done
        since_s, until_s = window(tally, count, warm)
        is_left = any(since_s <= begun.begun_s < until_s and begun.end == "open" for begun in tally.begun)
        return not is_left or done >= warm + count + FOLLOWED

    return enough


def window(tally: Tally, count: int, warm: int = WARM) -> tuple[float, float]:
    """When the counted batches began and ended."""
    return tally.trained_s[warm - 1], tally.trained_s[warm + count - 1]


def figures(tally: Tally, count: int, world: World) -> dict[str, Json]:
    """See the module. Of one policy."""
    since_s, until_s = window(tally, count)
    ended = [begun for begun in tally.begun if since_s <= begun.ended_s < until_s]
    by_end = {how: [begun for begun in ended if begun.end == how] for how in ("delivered", "filtered", "thrown")}
    tokens = {how: sum(begun.sampled for begun in groups) for how, groups in by_end.items()}
    delivered = len(by_end["delivered"])
    admitted = [begun for begun in tally.begun if since_s <= begun.begun_s < until_s and begun.script.has_signal]
    arrived = [begun for begun in admitted if begun.end == "delivered"]
    share_admitted = fmean(begun.script.has_straggler for begun in admitted)
    share_arrived = fmean(begun.script.has_straggler for begun in arrived)
    lengths = [fmean(begun.script.tokens for begun in groups) / world.group_size for groups in (arrived, admitted)]
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
        "staleness_mean": round(fmean(begun.staleness for begun in by_end["delivered"]), 3),
        "staleness_most": max(begun.staleness for begun in by_end["delivered"]),
    }


def _ratio(one: Json, other: Json) -> float | None:
    """None: there is nothing to compare with."""
    assert isinstance(one, int | float) and isinstance(other, int | float)
    return round(one / other, 4) if other else None
