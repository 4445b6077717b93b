"""An open group in memory: its task, and how its rollouts have ended so far."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from rollyard.core import Group, GroupState, Rollout, Task
from rollyard.core.failure import InvalidRequest
from rollyard.sampling.membership import GroupStanding, MemberEnd, end_of, judged, standing, stats_of, versions_of
from rollyard.store.base import Store, Submission

PAGE = 1000

MOST_GROUP_BYTES = 1 << 30
"""Limit on the size of all its members' tasks together: each running rollout holds its own copy."""


@dataclass(slots=True)
class OpenGroup:
    """An open group. `group` is its record as last written."""

    group: Group
    task: Task = field(default_factory=lambda: Task(""))
    ends: dict[int, MemberEnd] = field(default_factory=dict[int, MemberEnd])

    @property
    def id(self) -> str:
        return self.group.id

    def take(self, rollout: Rollout) -> bool:
        """Records the end of one of its rollouts. Returns False if it is known or not of this group: any rollout may
        name any group and any index in it."""
        if rollout.index in self.ends or rollout.ending is None or not is_of(self.group, rollout):
            return False
        self.ends[rollout.index] = end_of(rollout)
        return True

    def standing(self) -> GroupStanding:
        return standing(self.group, self.ends)

    def rewards(self, members: Iterable[int]) -> list[float]:
        """Returns the environment's rewards of the members that are trained on."""
        return judged(self.ends, tuple(members))

    def scored(self) -> list[float]:
        """Returns the environment's rewards of all rollouts that have one, as reported before filtering."""
        return [end.own_reward for end in self.ends.values() if end.own_reward is not None]

    def begin(self, indices: Iterable[int]) -> list[Submission]:
        """Returns submissions of those rollouts. The group's record counts them as started from now on."""
        submissions = [
            Submission(
                Rollout(
                    id=self.group.rollout_id(index),
                    run=self.group.run,
                    task=self.task,
                    group=self.group.id,
                    index=index,
                    priority=self.group.priority,
                ),
                {"group": self.group.id, "index": index} | ({"draw": self.group.draw} if self.group.draw else {}),
            )
            for index in indices
        ]
        self.group = replace(self.group, started=self.group.started + len(submissions), updated_at=time.time())
        return submissions

    def over(self, state: GroupState, members: tuple[int, ...] = (), reason: str | None = None) -> Group:
        """Returns the group's record at its end."""
        chosen = members or tuple(sorted(self.ends))
        oldest, newest = versions_of(self.ends, chosen)
        self.group = replace(
            self.group,
            state=state,
            reason=reason,
            members=members,
            stats=stats_of(self.ends, chosen),
            oldest_version=oldest,
            newest_version=newest,
            updated_at=time.time(),
        )
        return self.group

    def at_work(self) -> list[str]:
        """Returns the ids of rollouts that have not ended."""
        return [self.group.rollout_id(index) for index in range(self.group.started) if index not in self.ends]


def is_of(group: Group, rollout: Rollout) -> bool:
    """Whether the group has started the rollout: any other may name it, with any index."""
    return rollout.index < group.started and rollout.id == group.rollout_id(rollout.index)


def check_members(task: Task, members: int) -> None:
    """Raises InvalidRequest for a group that is too large to be run and returned as one."""
    size = len(msgspec.json.encode(task))
    if size * members > MOST_GROUP_BYTES:
        raise InvalidRequest(
            f"{members} rollouts of a task of {size} bytes are more than {MOST_GROUP_BYTES >> 20} MiB: make the group"
            " smaller, or put large files into the sandbox's image"
        )


async def rollouts_of(store: Store, group: Group) -> list[Rollout]:
    """Returns all of a group's rollouts, by index. Reads no others, of which any number may name it."""
    rollouts: list[Rollout] = []
    for start in range(0, group.started, PAGE):
        indices = range(start, min(start + PAGE, group.started))
        page = await store.get_many([group.rollout_id(index) for index in indices])
        rollouts += [one for one in page if one.group == group.id and is_of(group, one)]
    return rollouts


async def catch_up(store: Store, opened: OpenGroup) -> None:
    """Reads from the store the rollouts of a group that an earlier process started. Ends that are reported while it
    reads are recorded once, too: register the group for these reports first."""
    rollouts = await rollouts_of(store, opened.group)
    if rollouts:
        opened.task = rollouts[0].task
    for rollout in rollouts:
        opened.take(rollout)
