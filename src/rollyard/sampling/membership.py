"""Pure rules of a group: which rollouts are its members, when it is complete, and when it needs a spare.

The members are the first `size` rollouts, by index, that did not fail because of infrastructure. So a spare takes a
place only if a member was lost, in the order of indices, never because it was faster; and no rollout is left out for
being slow. A rollout that was cancelled, or that the policy itself kept from being scored, keeps its place: a spare
does not replace it.

A task that cannot be done fails the whole group at once: its other rollouts would end in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollyard.core import Blame, Group, Rollout
from rollyard.core.group import GroupStats, mean_of, pass_rate_of, spread_of
from rollyard.core.overlong import COMPONENT


class MemberFate(StrEnum):
    """How a rollout ended, as its group counts it."""

    STOOD = "stood"  # it keeps its place, with or without a reward
    LOST = "lost"  # because of infrastructure: a spare may take its place
    HOPELESS = "hopeless"  # the task cannot be done as given
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class MemberEnd:
    """A rollout that has ended."""

    index: int
    fate: MemberFate
    reward: float | None = None
    penalty: float = 0.0  # part of the reward, for being overlong; 0 or less
    is_trainable: bool = False
    sampled_tokens: int = 0  # of all its attempts
    oldest_version: int = -1
    newest_version: int = -1
    code: str = ""

    @property
    def own_reward(self) -> float | None:
        """The environment's reward, without the penalty."""
        return None if self.reward is None else self.reward - self.penalty


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """What follows from the ends so far. If `is_over`, nothing more can change, and `members` are those of a complete
    group or of one that may be delivered short."""

    start: range = range(0)  # spares to start
    is_over: bool = False
    members: tuple[int, ...] = ()
    failure: str | None = None  # why it is over without being complete


_FATES = {Blame.INFRA: MemberFate.LOST, Blame.TASK: MemberFate.HOPELESS, Blame.CLIENT: MemberFate.CANCELLED}


def fate_of(is_scored: bool, blame: Blame | None) -> MemberFate:
    return MemberFate.STOOD if is_scored or blame is None else _FATES.get(blame, MemberFate.STOOD)


def end_of(rollout: Rollout) -> MemberEnd:
    """Returns a rollout's end as its group counts it. The rollout must have ended."""
    ending = rollout.ending
    assert ending is not None
    failure, summary = ending.failure, ending.summary
    return MemberEnd(
        index=rollout.index,
        fate=fate_of(ending.score is not None, failure.blame if failure else None),
        reward=None if ending.score is None else ending.score.reward,
        penalty=0.0 if ending.score is None else ending.score.components.get(COMPONENT, 0.0),
        is_trainable=ending.is_trainable,
        sampled_tokens=summary.sampled_tokens + sum(lost.tokens_lost for lost in rollout.lost),
        oldest_version=summary.oldest_version,
        newest_version=summary.newest_version,
        code=failure.code if failure else "",
    )


def standing(group: Group, ends: Mapping[int, MemberEnd]) -> GroupStanding:
    """Applies the rules. `group.started` rollouts exist; those that are not in `ends` are running."""
    hopeless = next((end for end in ends.values() if end.fate is MemberFate.HOPELESS), None)
    if hopeless is not None:
        return GroupStanding(is_over=True, failure=hopeless.code)
    lost = {index for index, end in ends.items() if end.fate is MemberFate.LOST}
    places = [index for index in range(group.size + group.spares) if index not in lost][: group.size]
    missing = [index for index in places if index >= group.started]
    if missing:
        return GroupStanding(start=range(group.started, missing[-1] + 1))
    if any(index not in ends for index in places):
        return GroupStanding()
    members = tuple(index for index in places if ends[index].fate is MemberFate.STOOD)
    if len(members) >= (group.size if group.min_members is None else group.min_members):
        return GroupStanding(is_over=True, members=members)
    cancelled = len(places) - len(members)
    return GroupStanding(is_over=True, failure="cancelled" if cancelled else "short_of_members")


def counted(ends: Mapping[int, MemberEnd], members: Sequence[int]) -> list[float]:
    """Returns the rewards that count in loss and baseline: one per member that is trained on."""
    return [end.reward for end in _trained(ends, members) if end.reward is not None]


def judged(ends: Mapping[int, MemberEnd], members: Sequence[int]) -> list[float]:
    """Returns the environment's own rewards of the same members, by which a filter decides."""
    return [end.own_reward for end in _trained(ends, members) if end.own_reward is not None]


def _trained(ends: Mapping[int, MemberEnd], members: Sequence[int]) -> list[MemberEnd]:
    return [ends[index] for index in members if index in ends and ends[index].is_trainable]


def stats_of(ends: Mapping[int, MemberEnd], members: Sequence[int]) -> GroupStats:
    rewards = counted(ends, members)
    return GroupStats(
        members=len(members),
        scored=sum(ends[index].reward is not None for index in members if index in ends),
        trainable=len(rewards),
        mean=mean_of(rewards),
        spread=spread_of(rewards),
        pass_rate=pass_rate_of(judged(ends, members)),
        lowest=min(rewards, default=None),
        highest=max(rewards, default=None),
        sampled_tokens=sum(end.sampled_tokens for end in ends.values()),
        infra_failures=sum(end.fate is MemberFate.LOST for end in ends.values()),
    )


def versions_of(ends: Mapping[int, MemberEnd], members: Sequence[int]) -> tuple[int, int]:
    """Returns the oldest and newest weight version that sampled for its members; −1 if nothing was sampled."""
    sampled = [ends[index] for index in members if index in ends and ends[index].oldest_version >= 0]
    if not sampled:
        return -1, -1
    return min(end.oldest_version for end in sampled), max(end.newest_version for end in sampled)
