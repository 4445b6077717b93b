"""Groups as clients get them: with their members' records, with or without traces, as JSON (Arrow: `arrow.py`).

Invariant: a page that is requested again has the same content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from rollyard.core import Batch, Draw, Group, Rollout, Trajectory, id_of
from rollyard.core.loop_yield import LoopYield
from rollyard.sampling.draw_state import DrawState, before_filtering
from rollyard.sampling.membership import end_of
from rollyard.sampling.open_group import rollouts_of
from rollyard.service.schemas.records import JsonObject, encode, record, traces
from rollyard.store.base import Store

AT_ONCE = 16  # trajectories that are read concurrently

MOST_TOKENS = 4_000_000
"""Of one page, or those of one group if that has more: about 60 MB as Arrow, 160 MB as JSON."""

RECORD_TOKENS = 100
"""A rollout's record is as large as so many tokens."""


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """A group with its rollouts. `trajectories`: those of its members, if requested and not deleted."""

    group: Group
    rollouts: tuple[Rollout, ...]
    trajectories: dict[str, Trajectory]


async def load_group(store: Store, group: Group, *, with_traces: bool) -> LoadedGroup:
    rollouts = await rollouts_of(store, group)
    trajectories: dict[str, Trajectory] = {}
    if with_traces:
        indices = frozenset(group.members)
        member_ids = [rollout.id for rollout in rollouts if rollout.index in indices]
        for start in range(0, len(member_ids), AT_ONCE):
            ids = member_ids[start : start + AT_ONCE]
            loaded = await asyncio.gather(*map(store.trajectory, ids))
            trajectories |= {id: one for id, one in zip(ids, loaded, strict=True) if one is not None}
    return LoadedGroup(group, tuple(rollouts), trajectories)


async def load_groups(store: Store, groups: Sequence[Group], *, with_traces: bool) -> list[LoadedGroup]:
    """Returns the first of these groups, as many as fit on a page."""
    loaded: list[LoadedGroup] = []
    tokens = 0
    for group in groups:
        one = await load_group(store, group, with_traces=with_traces)
        tokens += _tokens_of(one)
        if loaded and tokens > MOST_TOKENS:
            break
        loaded.append(one)
    return loaded


def _tokens_of(loaded: LoadedGroup) -> int:
    traces = (trace for trajectory in loaded.trajectories.values() for trace in trajectory.traces)
    return sum(len(trace.token_ids) for trace in traces) + RECORD_TOKENS * len(loaded.rollouts)


def cursor(place: int) -> str:
    return f"d:{place}"


def group_object(group: Group, rollouts: Sequence[Rollout] = ()) -> JsonObject:
    members = frozenset(group.members)
    return {
        "id": id_of(group.id),
        "run": group.run,
        "draw": None if group.draw is None else id_of(group.draw),
        "state": group.state,
        "reason": group.reason,
        "size": group.size,
        "spares": group.spares,
        "min_members": group.min_members,
        "task": rollouts[0].task if rollouts else None,
        "epoch": group.epoch if group.draw else None,
        "item": group.item if group.draw else None,
        "batch": group.batch,
        "cursor": None if group.place is None else cursor(group.place),
        "admitted_version": group.admitted_version,
        "oldest_version": group.oldest_version,
        "newest_version": group.newest_version,
        "staleness": group.staleness,
        "stats": group.stats,
        "members": [_member(members, rollout) for rollout in rollouts],
        "created_at": group.created_at,
        "updated_at": group.updated_at,
    }


def _member(members: Set[int], rollout: Rollout) -> JsonObject:
    end = end_of(rollout) if rollout.ending else None
    failure = rollout.ending.failure if rollout.ending else None
    return {
        "index": rollout.index,
        "rollout": id_of(rollout.id),
        "is_member": rollout.index in members,
        "state": rollout.state,
        "outcome": rollout.ending.outcome if rollout.ending else None,
        "reward": end.reward if end else None,
        "trainable": end.is_trainable if end else False,
        "code": failure.code if failure else None,
        "blame": failure.blame if failure else None,
        "sampled_tokens": end.sampled_tokens if end else 0,
    }


def _with_rollouts(loaded: LoadedGroup, *, with_traces: bool) -> JsonObject:
    """A group with the complete records of its members. The task is in the group only, not in each record."""
    body = group_object(loaded.group, loaded.rollouts)
    members, indices = list[JsonObject](), frozenset(loaded.group.members)
    for rollout in loaded.rollouts:
        if rollout.index not in indices:
            continue
        one = {name: value for name, value in record(rollout).items() if name != "task"}
        trajectory = loaded.trajectories.get(rollout.id)
        if with_traces and trajectory is not None:
            one["traces"] = traces(trajectory, rollout)
        members.append(one)
    body["rollouts"] = members
    return body


def groups_page(
    groups: Sequence[LoadedGroup], next_cursor: str, batch: Batch | None, *, with_traces: bool = True
) -> JsonObject:
    return {
        "groups": [_with_rollouts(one, with_traces=with_traces) for one in groups],
        "next": next_cursor,
        "batch": None if batch is None else batch_object(batch),
    }


async def json_page(
    groups: Sequence[LoadedGroup], next_cursor: str, batch: Batch | None, *, with_traces: bool
) -> bytes:
    """The page as JSON. The event loop runs between its groups and while their rollouts are encoded."""
    page = groups_page((), next_cursor, batch)
    loop_yield = LoopYield()
    for loaded in groups:
        group = _with_rollouts(loaded, with_traces=with_traces)
        page["groups"].append(group)
        for place, rollout in enumerate(group["rollouts"]):
            group["rollouts"][place] = msgspec.Raw(encode(rollout))
            await loop_yield.step()
    return encode(page)


def batch_object(batch: Batch) -> JsonObject:
    return {
        "draw": id_of(batch.draw),
        "number": batch.number,
        "want": batch.want,
        "state": "open" if batch.is_open else "closed",
        "version": batch.version,
        "delivered": batch.delivered,
        "after": cursor(batch.after),
        "last": cursor(batch.after + batch.delivered) if batch.delivered else None,
        "reason": batch.reason,
        "is_last": batch.is_last,
        "figures": batch.figures or None,
    }


def draw_object(draw: Draw, draw_state: DrawState | None = None) -> JsonObject:
    progress = draw.progress
    figures: dict[str, Any] = asdict(progress.figures)
    figures |= before_filtering(figures)
    ends = ("delivered", "filtered", "failed", "cancelled", "dropped", "void")
    unfinished = figures["admitted"] - sum(figures[name] for name in ends)
    opened = draw_state.open_count if draw_state is not None else 0
    figures |= {
        "open": opened,
        "complete": max(0, unfinished - opened),
        "keep_rate": round(draw_state.keep_rate, 4) if draw_state is not None else None,
    }
    return {
        "id": id_of(draw.id),
        "run": draw.run,
        "state": "active" if draw.is_active else "ended",
        "reason": draw.reason,
        "detail": draw.detail,
        "config": msgspec.to_builtins(draw.config),
        "version": progress.version,
        "batch": progress.batch,
        "acked": progress.acked,
        "cursor": cursor(progress.place) if progress.place else None,
        "epoch": progress.epoch,
        "created_at": draw.created_at,
        "figures": figures,
    }
