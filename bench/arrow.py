"""`rollyard bench arrow`: the cost of encoding and decoding a trainer's batch, as Arrow and as JSON.

It uses one page of a draw with 256 traces of 8,000 tokens for both: encoded by the service's encoders, and decoded to
groups with numpy columns by the client's decoders, as `draw.batch()` does. The two alternate, round by round; the
result is the median in milliseconds of CPU time, which other processes affect little. The decoded pages are compared,
so neither format can omit anything. The store, HTTP and the network are not included.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Callable
from random import Random
from typing import TypeVar

import numpy as np
import orjson

from rollyard.client.groups import GroupsPage, read_arrow_page, read_json_page
from rollyard.core import Batch, Ending, Group, Json, Outcome, Rollout, Score, Span, Task, Trace, Trajectory
from rollyard.core.group import GroupState, GroupStats
from rollyard.core.rollout import Summary
from rollyard.core.state import Position, State
from rollyard.core.task import Sampling
from rollyard.service.schemas.arrow import groups_stream
from rollyard.service.schemas.group_pages import LoadedGroup, cursor, groups_page
from rollyard.service.schemas.records import encode

GROUPS, MEMBERS, TOKENS = 32, 8, 8_000
TURNS = 8  # of a trace; each has as many prompt or tool tokens as sampled ones

T = TypeVar("T")


async def bench_arrow(*, quick: bool = False) -> dict[str, Json]:
    """Returns `metrics` of Arrow and `versus` of JSON, with the same names."""
    rounds = 2 if quick else 9
    loaded = [_group(place) for place in range(1, GROUPS + 1)]
    batch = Batch("bench", 1, GROUPS, 3, 0, delivered=GROUPS, is_open=False)
    arrow, plain = _Measured(), _Measured()
    for _ in range(rounds + 1):
        from_arrow = arrow.round(lambda: groups_stream(loaded, cursor(GROUPS), batch), read_arrow_page)
        from_json = plain.round(
            lambda: encode(groups_page(loaded, cursor(GROUPS), batch)), lambda data: read_json_page(orjson.loads(data))
        )
        _check(from_arrow, from_json)
    shape: dict[str, Json] = {"traces": GROUPS * MEMBERS, "tokens_per_trace": TOKENS, "rounds": rounds}
    return {"metrics": {**arrow.figures(), **shape}, "versus": {"json": plain.figures()}}


class _Measured:
    """The measurements of one format, over all rounds."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._encode_ms: list[float] = []
        self._decode_ms: list[float] = []

    def round(self, encoder: Callable[[], bytes], decoder: Callable[[bytes], GroupsPage]) -> GroupsPage:
        data = _timed(self._encode_ms, encoder)
        self._size_bytes = len(data)
        return _timed(self._decode_ms, lambda: decoder(data))

    def figures(self) -> dict[str, Json]:
        """Returns medians without the first round, which only warms up."""
        return {
            "size_mb": round(self._size_bytes / 1e6, 3),
            "bytes_per_token": round(self._size_bytes / (GROUPS * MEMBERS * TOKENS), 2),
            "encode_ms": round(statistics.median(self._encode_ms[1:]), 2),
            "decode_ms": round(statistics.median(self._decode_ms[1:]), 2),
        }


def _timed(times_ms: list[float], work: Callable[[], T]) -> T:
    gc.collect()  # the garbage of the previous round must not count
    started_at = time.process_time()
    result = work()
    times_ms.append((time.process_time() - started_at) * 1000)
    return result


def _check(arrow_page: GroupsPage, json_page: GroupsPage) -> None:
    pairs = [
        (one, other)
        for left, right in zip(arrow_page.groups, json_page.groups, strict=True)
        for a, b in zip(left.rollouts, right.rollouts, strict=True)
        for one, other in zip(a.traces, b.traces, strict=True)
    ]
    if len(pairs) != GROUPS * MEMBERS:
        raise RuntimeError(f"{len(pairs)} traces were read, not {GROUPS * MEMBERS}")
    for one, other in pairs:
        for name in ("token_ids", "mask", "logprobs", "versions"):
            if not np.array_equal(getattr(one, name), getattr(other, name)):
                raise RuntimeError(f"{name} of a trace of {one.rollout_id} differs between Arrow and JSON")


def _group(place: int) -> LoadedGroup:
    id = f"bench-{place}"
    stats = GroupStats(MEMBERS, MEMBERS, MEMBERS, 0.5, 0.5, 0.5, 0.0, 1.0, MEMBERS * TOKENS // 2)
    group = Group(
        id,
        "bench",
        MEMBERS,
        state=GroupState.DELIVERED,
        started=MEMBERS,
        members=tuple(range(MEMBERS)),
        stats=stats,
        draw="bench",
        batch=1,
        place=place,
        batch_version=3,
    )
    task = Task("math", {"question": f"Question {place}: what is 2 + 2?", "answer": "4"})
    rollouts: list[Rollout] = []
    trajectories: dict[str, Trajectory] = {}
    for index in range(MEMBERS):
        summary = Summary(turns=TURNS, sampled_tokens=TOKENS // 2, traces=1, ended_by="stop")
        ending = Ending(Outcome.COMPLETED, Score(float(index % 2)), is_trainable=True, summary=summary)
        rollout = Rollout(f"{id}-{index}", "bench", task, Position(State.ENDED), id, index, ending=ending)
        rollouts.append(rollout)
        trajectories[rollout.id] = Trajectory(rollout.id, 1, (_trace(place * MEMBERS + index),), turns=TURNS)
    return LoadedGroup(group, tuple(rollouts), trajectories)


def _trace(seed: int) -> Trace:
    """Returns a trace with ids of a vocabulary of 150,000, and logprobs with full precision, as engines return them."""
    random = Random(seed)
    part = TOKENS // (2 * TURNS)
    mask = (bytes(part) + b"\1" * part) * TURNS
    spans = tuple(
        Span((2 * turn + 1) * part, (2 * turn + 2) * part, turn + 1, "stop", "0" * 64, "1" * 64, "e0", f"q-{turn}")
        for turn in range(TURNS)
    )
    return Trace(
        token_ids=array("i", (random.randrange(150_000) for _ in mask)),
        mask=bytearray(mask),
        logprobs=array("f", (-random.expovariate(2.0) if is_sampled else 0.0 for is_sampled in mask)),
        versions=array("i", (3 if is_sampled else -1 for is_sampled in mask)),
        spans=spans,
        sampling=Sampling(),
        policy="default",
        model="bench",
        logprobs_kind="processed",
    )
