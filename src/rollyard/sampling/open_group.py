"""A group at work, in memory: its task, and how its rollouts have ended so far."""

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
"""Of all its members' tasks together: while they run, each has its own."""


@dataclass(slots=True)
class OpenGroup:
    """See the module. `group` is its record as it was last written."""

    group: Group
    task: Task = field(default_factory=lambda: Task(""))
    ends: dict[int, MemberEnd] = field(default_factory=dict[int, MemberEnd])

    @property
    def id(self) -> str:
        return self.group.id

    def take(self, rollout: Rollout) -> bool:
        """Takes in the end of one of its rollouts; False if it knew, or if this is somebody else's: any rollout may
        name any group and any place in it."""
        if rollout.index in self.ends or rollout.ending is None or rollout.id != self.group.rollout_id(rollout.index):
            return False
        self.ends[rollout.index] = end_of(rollout)
        return True

    def standing(self) -> GroupStanding:
        return standing(self.group, self.ends)

    def rewards(self, members: Iterable[int]) -> list[float]:
        """Of those that are trained on, as the environment gave them."""
        return judged(self.ends, tuple(members))

    def scored(self) -> list[float]:
        """Of all that have one, as the environment gave it: what is reported before filtering."""
        return [end.own_reward for end in self.ends.values() if end.own_reward is not None]

    def begin(self, indices: Iterable[int]) -> list[Submission]:
        """Submissions of those rollouts; the group says from now on that they exist."""
        begun = [
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
        self.group = replace(self.group, started=self.group.started + len(begun), updated_at=time.time())
        return begun

    def over(self, state: GroupState, members: tuple[int, ...] = (), reason: str | None = None) -> Group:
        """Its record at its end."""
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
        """Rollouts that have not ended."""
        return [self.group.rollout_id(index) for index in range(self.group.started) if index not in self.ends]


def check_members(task: Task, members: int) -> None:
    """InvalidRequest for a group that would be too large to be run and returned as one."""
    size = len(msgspec.json.encode(task))
    if size * members > MOST_GROUP_BYTES:
        raise InvalidRequest(
            f"{members} rollouts of a task of {size} bytes are more than {MOST_GROUP_BYTES >> 20} MiB: make the group"
            " smaller, or bring large files into the sandbox by its image"
        )


async def rollouts_of(store: Store, group_id: str) -> list[Rollout]:
    """All of a group's rollouts, by index; not those that only name it."""
    found: list[Rollout] = []
    after: str | None = None
    while True:
        page = await store.list(group=group_id, after=after, limit=PAGE)
        found += [one for one in page.rollouts if one.id == f"{group_id}-{one.index}"]
        after = page.next_cursor
        if after is None:
            return sorted(found, key=lambda rollout: rollout.index)


async def catch_up(store: Store, opened: OpenGroup) -> None:
    """Takes in what the store knows of a group that an earlier process began. Ends that are told while it reads are
    taken in as well, once: so let it be found by those who tell them first."""
    rollouts = await rollouts_of(store, opened.id)
    if rollouts:
        opened.task = rollouts[0].task
    for rollout in rollouts:
        opened.take(rollout)
