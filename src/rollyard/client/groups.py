"""Groups and batches as a trainer reads them, and the two formats of a page of groups.

A page is JSON, or an Arrow stream with one row per trace and the same JSON, without traces, in the schema's metadata
("page"). Both give the same `Group`s. From Arrow, a trace's columns are views that keep the page's bytes alive.

Invariants. A group's `rollouts` are exactly its members, by index; a rollout that a spare replaced is only in `raw`. A
page that lacks a member's record, or a trace of a rollout, is an `UnexpectedReply`, never a smaller group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec

from rollyard.client._errors import UnexpectedReply
from rollyard.client.records import JsonObject, Record, Trace, read, read_object
from rollyard.client.traces import from_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class GroupRollout:
    """A member of a group. `reward` None: it has no reward, which is not 0. If not `trainable`, it stays in the group
    but is in neither loss nor baseline."""

    id: str
    index: int
    reward: float | None
    trainable: bool
    record: Record
    traces: tuple[Trace, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupFacts:
    """The fields of a group's JSON, without its rollouts."""

    id: str
    run: str = ""
    draw: str | None = None
    state: str = "open"  # open, complete, delivered, filtered, failed, cancelled, dropped, void
    reason: str | None = None
    size: int = 0
    task: JsonObject = field(default_factory=dict[str, Any])
    stats: JsonObject | None = None  # members, scored, trainable, mean, spread, pass_rate, lowest, highest…
    admitted_version: int | None = None  # of the weights when it was started
    oldest_version: int | None = None  # of the weights that sampled one of its tokens
    newest_version: int | None = None
    staleness: int | None = None  # its batch's version − oldest_version
    epoch: int | None = None
    item: int | str | None = None  # the index or id of its task in the source
    batch: int | None = None
    cursor: str | None = None  # its position in the order of delivery
    raw: JsonObject = field(default_factory=dict[str, Any], repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Group(GroupFacts):
    """n rollouts of one task. While it is open its members are not determined, and `rollouts` is empty."""

    rollouts: tuple[GroupRollout, ...] = ()

    @property
    def is_ended(self) -> bool:
        return self.state != "open"

    @property
    def rewards(self) -> NDArray[np.float64]:
        """The rewards of the members that have one, by index."""
        import numpy as np

        return np.array([r.reward for r in self.rollouts if r.reward is not None], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class BatchFacts:
    """The fields of a batch's JSON."""

    number: int
    draw: str = ""
    want: int = 0
    state: str = "open"  # open, closed
    version: int | None = None  # of the weights when it was opened
    delivered: int = 0
    after: str | None = None  # the cursor before its first group
    last: str | None = None  # the cursor of its last group
    reason: str | None = None  # why it has fewer groups than requested
    is_last: bool = False  # the draw has no more batches
    figures: JsonObject = field(default_factory=dict[str, Any])  # since the previous batch, before the filter
    raw: JsonObject = field(default_factory=dict[str, Any], repr=False)

    @property
    def is_closed(self) -> bool:
        return self.state == "closed"


@dataclass(frozen=True, slots=True, eq=False)
class Batch(BatchFacts):
    """A numbered batch of a draw. It has the same groups each time it is requested."""

    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupsPage:
    """One page of a draw. `next` is the cursor of the next page."""

    groups: tuple[Group, ...]
    next: str | None
    batch: BatchFacts | None


def batch_of(facts: BatchFacts, groups: Sequence[Group]) -> Batch:
    return Batch(**{each.name: getattr(facts, each.name) for each in fields(BatchFacts)}, groups=tuple(groups))


def read_group(body: object) -> Group:
    """A group on its own: without traces, and possibly with only a summary of its members."""
    return _group(read_object(body), {}, is_whole=False)


def read_json_page(body: object) -> GroupsPage:
    page = read_object(body)
    traces: dict[str, list[Trace]] = {}
    for group in page.get("groups") or ():
        for record in read_object(group).get("rollouts") or ():
            rollout = read_object(record)
            traces[str(rollout.get("id"))] = [from_json(read_object(item)) for item in rollout.get("traces") or ()]
    return _page(page, traces)


def read_arrow_page(data: bytes) -> GroupsPage:
    from rollyard.client.arrow import read_stream

    metadata, rows = read_stream(data)
    try:
        page = read_object(msgspec.json.decode(metadata[b"page"]))
    except (KeyError, msgspec.DecodeError) as error:
        raise UnexpectedReply("the stream of groups has no page in its metadata") from error
    traces: dict[str, list[Trace]] = defaultdict(list)
    for trace in rows:
        traces[trace.rollout_id].append(trace)
    return _page(page, traces)


def _page(page: JsonObject, traces: Mapping[str, list[Trace]]) -> GroupsPage:
    if not isinstance(page.get("groups"), list):
        raise UnexpectedReply("a page of groups was expected")
    groups = tuple(_group(read_object(body), traces, is_whole=True) for body in page["groups"])
    batch = page.get("batch")
    return GroupsPage(groups, page.get("next"), None if batch is None else read(batch, BatchFacts))


def _group(body: JsonObject, traces: Mapping[str, list[Trace]], *, is_whole: bool) -> Group:
    facts = read(body, GroupFacts)
    records = {str(read_object(record).get("id")): record for record in body.get("rollouts") or ()}
    members: list[JsonObject] = [read_object(member) for member in body.get("members") or ()]
    rollouts: list[GroupRollout] = []
    for member in members:
        if not member.get("is_member", True):
            continue
        id = str(member.get("rollout"))
        if is_whole and id not in records:
            raise UnexpectedReply(f"group {facts.id} lacks its member {id}")
        raw_record = records.get(id) or {**member, "id": id, "run": facts.run, "group": facts.id}
        record = read({"task": facts.task, **raw_record}, Record)  # the task is sent once, with the group
        rollouts.append(_rollout(record, member, traces.get(id, ())))
    rollouts.sort(key=lambda rollout: rollout.index)
    return Group(**{each.name: getattr(facts, each.name) for each in fields(GroupFacts)}, rollouts=tuple(rollouts))


def _rollout(record: Record, member: JsonObject, traces: Sequence[Trace]) -> GroupRollout:
    ordered = tuple(sorted(traces, key=lambda trace: trace.index))
    if ordered and [trace.index for trace in ordered] != list(range(ordered[0].siblings)):
        raise UnexpectedReply(
            f"only {len(ordered)} of {ordered[0].siblings} traces of rollout {record.id} were received"
        )
    index = int(member.get("index", record.index))
    return GroupRollout(record.id, index, record.reward, record.trainable, record, ordered)
