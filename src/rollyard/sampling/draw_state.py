"""The decisions of one draw: which groups to start, deliver and end. No I/O and no clock of its own.

The service drives it with real rollouts (`draw_runner.py`), the benchmark with simulated ones: both use the same rules.

*Whether a rollout reaches the trainer may depend on its reward, by the declared filter, and on infrastructure; never on
how long it took.* So every admitted group ends as exactly one of delivered, filtered or failed, whichever batch is open
meanwhile; complete groups are delivered oldest first. A group ends otherwise only by what the trainer explicitly
requested (`surplus: cancel`, `on_stale: drop`, a rewind, a close), and is counted.

Pace. A group that is started now is delivered after the complete groups and the measured share of the open ones. With
`want` groups and one new version per batch, it stays within `max_staleness` S if

    complete + open × keep rate  <  want × (S + 1) − handed

where `handed` is the number delivered since the last batch was opened or the version changed. Under `deliver`, an open
group that half a batch of later ones has overtaken is not counted: a straggler ages and is delivered when it is
complete, but it delays nothing (measured: with one rollout in twenty ten times slower, batches come 1.5 times as fast
as if it counted). In any case enough groups are started to fill the batch that is being waited for, and no more than
the budget allows: so a draw never stalls while there are tasks, and does not end with work that is never delivered.

`on_stale: wait`. Here the keep rate is taken as 1, and a newer group gets a place only if this batch and later ones
have a place left in time for every older group. Then no group is ever too old: at most want × (S + 1) are ahead of a
new one, S + 1 batches come before it is too old, and each takes `want` groups, the oldest first where necessary. If a
trainer skips versions or asks for fewer groups than before, groups that are then too old are dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache

from rollyard.core import Batch, Draw, Group, GroupState, Json
from rollyard.core.draw import DrawItem, OnStale, Surplus
from rollyard.core.group import GroupStats
from rollyard.core.passk import TOLERANCE, is_correct
from rollyard.sampling.task_order import TaskOrder

RECENT = 256
"""Judged groups over which the keep rate is measured: a few batches, so that it follows a policy that learns."""

LEAST_RATE = 0.05
"""Lower bound of the keep rate: it limits open groups to twenty times the number started at a rate of 1."""

MOST_TRIES = 2
"""How often a task is repeated after infrastructure failures."""

LEAST_PATIENCE = 64
"""Groups rejected in a row before a draw may give up: a source of three hard tasks gets more than one chance."""

PUSHED_PATIENCE = 1000
"""The same for a pushed source, which has no epochs."""


@dataclass(frozen=True, slots=True)
class ActiveGroup:
    """A group that is open, or complete and waiting for a batch."""

    id: str
    order: int
    item: DrawItem
    version: int
    is_complete: bool = False


@dataclass(frozen=True, slots=True)
class DeliveredGroup:
    """A group that is put into a batch."""

    id: str
    batch: int
    place: int
    version: int  # of the batch


class DrawState:
    """The state and decisions of one draw. It owns `draw.progress` and updates it with every decision."""

    def __init__(
        self, draw: Draw, order: TaskOrder, batch: Batch | None = None, in_flight: Iterable[ActiveGroup] = ()
    ) -> None:
        self.draw = draw
        self.config = draw.config
        self.progress = draw.progress
        self.order = order
        self.batch = batch if batch is not None and batch.is_open else None
        self.in_flight: dict[str, ActiveGroup] = {one.id: one for one in in_flight}
        self.closed: list[Batch] = []  # since the caller last cleared it
        self.elapsed_s = 0.0  # since the draw was created; set by the caller
        self._open = sum(not one.is_complete for one in self.in_flight.values())

    # --- facts ----------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        if version != self.progress.version:
            self.progress.version = version
            self.progress.handed = 0

    def ask(self, want: int, at: float = 0.0) -> Batch:
        """Opens the next batch. The caller has checked that no batch is open."""
        progress = self.progress
        progress.batch += 1
        progress.want = want
        progress.handed = 0
        self.batch = Batch(self.draw.id, progress.batch, want, progress.version, progress.place, created_at=at)
        return self.batch

    def ended(
        self, group_id: str, state: GroupState, stats: GroupStats, *, is_infra: bool = False, returns: bool = False
    ) -> None:
        """Records that a group is over, or complete (kept). The task of a group that failed because of infrastructure
        is repeated, at most twice, and so is that of a group that the draw itself ended (`returns`); any other task is
        used up for its epoch."""
        one = self.in_flight[group_id]
        figures, progress = self.progress.figures, self.progress
        if not one.is_complete:
            self._open -= 1
            figures.tokens_sampled += stats.sampled_tokens
            figures.infra_rollouts += stats.infra_failures
        if state is GroupState.COMPLETE:
            self.in_flight[group_id] = replace(one, is_complete=True)
            self._judged(is_accepted=True)
            return
        del self.in_flight[group_id]
        if state is GroupState.FILTERED:
            figures.filtered += 1
            figures.tokens_filtered += stats.sampled_tokens
            self._judged(is_accepted=False)
            return
        figures.tokens_lost += stats.sampled_tokens
        if state is GroupState.FAILED:
            figures.failed += 1
            progress.rejected_in_a_row += 1
            if is_infra and one.item.tries < MOST_TRIES:
                figures.returned += 1
                progress.returned.append(replace(one.item, tries=one.item.tries + 1, turn=one.item.turn + 1))
        elif state is GroupState.DROPPED:
            figures.dropped += 1
            figures.dropped_tokens += stats.sampled_tokens
        elif state is GroupState.VOID:
            figures.void += 1
        else:
            figures.cancelled += 1
        if returns:
            progress.returned.append(replace(one.item, turn=one.item.turn + 1))

    def came_late(self, state: GroupState, sampled_tokens: int) -> None:
        """Counts the tokens of a rollout that ended after its group was over."""
        figures = self.progress.figures
        figures.tokens_sampled += sampled_tokens
        if state is GroupState.FILTERED:
            figures.tokens_filtered += sampled_tokens
        else:
            figures.tokens_lost += sampled_tokens
            figures.dropped_tokens += sampled_tokens if state is GroupState.DROPPED else 0

    def seen(self, rewards: Iterable[float]) -> None:
        """Counts the scores of a group with all its members, before any filter."""
        figures, values = self.progress.figures, list(rewards)
        figures.judged += 1
        figures.rewards += len(values)
        figures.reward_sum += math.fsum(values)
        passes = sum(map(is_correct, values))
        figures.passes += passes
        figures.all_zero += bool(values) and all(reward <= TOLERANCE for reward in values)
        figures.all_one += bool(values) and passes == len(values)

    def _judged(self, *, is_accepted: bool) -> None:
        progress = self.progress
        progress.recent = (progress.recent + "01"[is_accepted])[-RECENT:]
        progress.rejected_in_a_row = 0 if is_accepted else progress.rejected_in_a_row + 1

    # --- decisions ------------------------------------------------------------------------------------

    @property
    def keep_rate(self) -> float:
        """The share of recently judged groups that was kept; 1 before there are any."""
        recent = self.progress.recent
        return max(LEAST_RATE, (recent.count("1") + 1) / (len(recent) + 1))

    @property
    def _likely_rate(self) -> float:
        """The keep rate that pace uses. The groups judged first are the fast ones, often all failures: until twice as
        many are judged as are open, open groups count as kept. Otherwise a draw would start a thousand groups for its
        first batch of 32."""
        recent, figures = self.progress.recent, self.progress.figures
        unknown = max(0, self._open - (figures.judged + figures.rejected_early) // 2)
        return max(LEAST_RATE, (recent.count("1") + 1 + unknown) / (len(recent) + 1 + unknown))

    @property
    def open_count(self) -> int:
        return self._open

    def admit(self, at_most: int | None = None) -> list[ActiveGroup]:
        """Returns the groups to start now. They count as open from here on."""
        admitted: list[ActiveGroup] = []
        counted = self._counted()
        while (
            (at_most is None or len(admitted) < at_most)
            and self._has_room(counted + len(admitted))  # each new group counts and leaves the other counts unchanged
            and self.order.has_more(self.progress)
        ):
            item, progress = self.order.take(self.progress), self.progress
            progress.order += 1
            name = f"{self.draw.id}.{item.epoch}.{item.index}.{item.turn}"
            one = ActiveGroup(name, progress.order, item, progress.version)
            self.in_flight[name] = one
            self._open += 1
            progress.figures.admitted += 1
            progress.figures.rollouts += self.config.group_size
            admitted.append(one)
        return admitted

    def _has_room(self, counted: int) -> bool:
        config, progress = self.config, self.progress
        if not self.draw.is_active or self._spent() is not None or progress.rejected_in_a_row >= self._patience:
            return False
        opened = self._open
        if config.max_groups_in_flight is not None and opened >= config.max_groups_in_flight:
            return False
        if self.batch is None and config.surplus is Surplus.CANCEL:
            return False
        missing = self.batch.want - self.batch.delivered if self.batch else 0
        room = max(progress.want * (config.max_staleness + 1) - progress.handed, missing)
        return self._ahead(counted) < min(room, self._remaining_groups())

    def _remaining_groups(self) -> float:
        """Groups that the budget still allows to be delivered."""
        budget, progress = self.config.budget, self.progress
        remaining = math.inf if budget.groups is None else budget.groups - progress.figures.delivered
        if budget.batches is not None:
            in_batch = self.batch.delivered if self.batch else 0
            to_come = budget.batches - progress.batch + (self.batch is not None)
            remaining = min(remaining, to_come * progress.want - in_batch)
        return remaining

    def _ahead(self, counted: int) -> float:
        """Groups that are expected to be delivered before one that is started now."""
        if self.config.on_stale is OnStale.WAIT:
            return len(self.in_flight)
        return len(self.in_flight) - self._open + counted * self._likely_rate

    def _counted(self) -> int:
        """Open groups that count as ahead of a new one. Under `deliver`, an open group is late if half a batch of those
        started after it has overtaken it. A late group need not come before a new one and must not delay the others, so
        it does not count. It is still delivered when it is complete."""
        if self.config.on_stale is not OnStale.DELIVER:
            return self._open
        orders = sorted((one.order for one in self.in_flight.values() if not one.is_complete), reverse=True)
        most = max(1, self.progress.want // 2)
        return sum(self.progress.order - order - newer < most for newer, order in enumerate(orders))

    def hand_out(self) -> Iterator[DeliveredGroup]:
        """Yields complete groups that go into the open batch now, and closes the batch when it is full. Yields one at a
        time: what the caller reports of each (`delivered`) is in the figures of the batch that it closes."""
        most = self.config.budget.groups
        complete = [one for one in self.in_flight.values() if one.is_complete] if self.batch is not None else []
        spare_places = cache(self._spare_places)  # the open groups stay the same meanwhile
        for one in sorted(complete, key=lambda one: one.order):
            if self.batch is None or not self._may_go(one, spare_places):
                break
            if most is not None and self.progress.figures.delivered >= most:
                break
            batch, progress = self.batch, self.progress
            del self.in_flight[one.id]
            progress.place += 1
            progress.handed += 1
            progress.figures.delivered += 1
            self.batch = replace(batch, delivered=batch.delivered + 1)
            yield DeliveredGroup(one.id, batch.number, progress.place, batch.version)
            if self.batch.delivered >= self.batch.want:
                self._close(None)

    def _may_go(self, oldest: ActiveGroup, spare_places: Callable[[int], int]) -> bool:
        """Whether the open batch takes the oldest complete group now: what remains of it must suffice for open groups
        of older versions."""
        assert self.batch is not None
        if self.config.on_stale is not OnStale.WAIT:
            return True
        return self.batch.want - self.batch.delivered - 1 + spare_places(oldest.version) >= 0

    def _spare_places(self, version: int) -> int:
        """Returns the least number of places, over the versions before this one, that remain when the open groups which
        are too old after that version are delivered. Each version is expected to have a batch, of which the open one is
        not counted."""
        assert self.batch is not None
        want, first_due = self.batch.want, self.batch.version - self.config.max_staleness
        if first_due >= version:
            return 0
        older = sorted(one.version for one in self.in_flight.values() if not one.is_complete and one.version < version)
        due = enumerate(older, 1)
        return min((want * (max(one, first_due) - first_due) - count for count, one in due), default=0)

    def too_old(self) -> list[ActiveGroup]:
        """Returns groups too old for the open batch; the caller ends them as dropped. Empty under `deliver`."""
        if self.batch is None or self.config.on_stale is OnStale.DELIVER:
            return []
        oldest = self.batch.version - self.config.max_staleness
        return [one for one in self.in_flight.values() if one.version < oldest]

    def surplus(self) -> list[ActiveGroup]:
        """Returns the groups to cancel while no batch is open."""
        if self.batch is not None or self.config.surplus is not Surplus.CANCEL:
            return []
        return [one for one in self.in_flight.values() if not one.is_complete]

    def delivered(self, group: Group) -> None:
        """Counts a delivered group."""
        figures = self.progress.figures
        figures.tokens_delivered += group.stats.sampled_tokens if group.stats else 0
        figures.stale += (group.staleness or 0) > self.config.max_staleness

    def rewind(
        self, to: int, place: int, version: int, groups: Iterable[Group], *, acked_place: int = 0
    ) -> list[Group]:
        """Undoes the batches after `to`, which ended at `place`.

        `groups` are the groups of those batches and all complete ones. A group with tokens of a version after `version`
        becomes void, and so does one with a place up to `acked_place`, because it was acknowledged and its traces were
        deleted; their tasks are repeated. The other groups are complete again. Returns the changed groups. The caller
        then ends open groups as void.
        """
        progress, changed = self.progress, list[Group]()
        for group in groups:
            if group.place is not None:
                progress.figures.delivered -= 1
                progress.figures.tokens_delivered -= group.stats.sampled_tokens if group.stats else 0
                progress.figures.stale -= (group.staleness or 0) > self.config.max_staleness
                item = DrawItem(group.epoch, group.item, group.tries, group.turn)
                self.in_flight[group.id] = ActiveGroup(
                    group.id, group.order, item, group.admitted_version, is_complete=True
                )
            if group.newest_version > version or (group.place is not None and group.place <= acked_place):
                self.ended(group.id, GroupState.VOID, group.stats or GroupStats(), returns=True)
                changed.append(replace(group, state=GroupState.VOID, reason="rewound", batch=None, place=None))
            elif group.place is not None:
                changed.append(replace(group, state=GroupState.COMPLETE, batch=None, place=None, batch_version=None))
        if to < progress.batch:  # otherwise nothing is undone, and an ended draw stays ended
            progress.rejected_in_a_row = 0
            self.draw = replace(self.draw, is_active=True, reason=None, detail=None)
        progress.batch, progress.place, progress.version, progress.handed = to, place, version, 0
        for name in ("delivered", "tokens_delivered", "stale"):  # the next batch's figures exclude what is undone
            then = min(getattr(progress.figures_then, name), getattr(progress.figures, name))
            setattr(progress.figures_then, name, then)
        self.batch = None
        self.closed.clear()
        return changed

    # --- the end --------------------------------------------------------------------------------------

    def check_end(self) -> str | None:
        """Ends the draw if it cannot deliver more, and returns the reason. An open batch is closed as it is.

        When tasks, rollouts, tokens or time run out, open groups still count, and complete ones are delivered first.
        Only a bound on delivered groups or batches ends everything at once.
        """
        if not self.draw.is_active:
            return None
        progress, spent = self.progress, self._spent()
        if spent is not None and spent.startswith(("budget.groups", "budget.batches")):
            self.end("budget", spent)
        elif self.in_flight:
            return None
        elif spent is not None:
            self.end("budget", spent)
        elif progress.rejected_in_a_row >= self._patience:
            self.end("nothing_kept", f"{progress.rejected_in_a_row} groups in a row were rejected or failed")
        elif self.order.is_dry(progress):
            self.end("exhausted", "the source has no more tasks")
        return self.draw.reason

    def end(self, reason: str, detail: str | None = None) -> None:
        self.draw = replace(self.draw, is_active=False, reason=reason, detail=detail)
        if self.batch is not None:
            self._close(reason)

    def _close(self, reason: str | None) -> None:
        assert self.batch is not None
        now, then = asdict(self.progress.figures), asdict(self.progress.figures_then)
        since: dict[str, Json] = {name: now[name] - then[name] for name in now}
        self.progress.figures_then = replace(self.progress.figures)
        since |= before_filtering(since) | {"keep_rate": round(self.keep_rate, 4)}
        closed = replace(self.batch, is_open=False, reason=reason, is_last=reason is not None, figures=since)
        self.closed.append(closed)
        self.batch = None

    @property
    def _patience(self) -> int:
        if self.config.patience is not None:
            return self.config.patience
        size = self.config.source.size
        return PUSHED_PATIENCE if size is None else max(size, LEAST_PATIENCE)

    def _spent(self) -> str | None:
        budget, figures = self.config.budget, self.progress.figures
        budgets = {
            "groups": (figures.delivered, budget.groups),
            "rollouts": (figures.rollouts, budget.rollouts),
            "tokens": (figures.tokens_sampled, budget.tokens),
            "batches": (self.progress.batch - (self.batch is not None), budget.batches),
            "seconds": (self.elapsed_s, budget.seconds),
        }
        for name, (spent, bound) in budgets.items():
            if bound is not None and spent >= bound:
                return f"budget.{name}: {spent:g} of {bound:g}"
        return None


def before_filtering(figures: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the mean reward and pass rate of all judged groups, kept or not."""
    count, total, passes = figures["rewards"], figures["reward_sum"], figures["passes"]
    assert isinstance(count, (int, float)) and isinstance(total, (int, float)) and isinstance(passes, (int, float))
    return {
        "reward_before": total / count if count else None,
        "pass_rate_before": passes / count if count else None,
    }
