"""Which node gets a rollout. Pure rules, no I/O.

A node says how many rollouts it wants; those are its free places. Among the nodes that want one, the emptiest goes
first, but one that has what the rollout needs may be somewhat fuller: the set-up that its group's other members stand
on, which is made once a node, or its image, which is fetched once a node.

Invariants. Nobody gets more than it wants. What a node is remembered to have is bounded, the oldest goes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollyard.core import Rollout
from rollyard.store.codec import to_json

SETUP_WORTH = 0.25
"""Of a node's places: how much fuller a node may be that has the set-up."""

IMAGE_WORTH = 0.1

REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rollout finds at a node that has had one like it: a set-up (environment, data, image), and the image."""

    setup: str
    image: str | None

    @classmethod
    def of(cls, rollout: Rollout) -> Needs:
        task = rollout.task
        image = task.sandbox.image
        text = f"{task.environment}\0{image}\0{to_json(task.data)}"
        return cls(hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), image)


@dataclass(slots=True)
class Room:
    """A node as placing sees it."""

    places: int = 1  # in all
    want: int = 0  # free ones
    setups: dict[str, None] = field(default_factory=dict[str, None])  # in order of last use
    images: dict[str, None] = field(default_factory=dict[str, None])  # likewise

    def remember(self, needs: Needs) -> None:
        _remember(self.setups, needs.setup)
        if needs.image is not None:
            _remember(self.images, needs.image)

    def worth(self, needs: Needs) -> float:
        has_setup = needs.setup in self.setups
        has_image = needs.image is not None and needs.image in self.images
        return self.want / max(1, self.places) + SETUP_WORTH * has_setup + IMAGE_WORTH * has_image


def _remember(known: dict[str, None], name: str) -> None:
    known.pop(name, None)
    known[name] = None
    while len(known) > REMEMBERED:
        del known[next(iter(known))]


def place(needs: Needs, rooms: Iterable[Room]) -> Room | None:
    """The best of those that want one; the caller counts it down. None: nobody wants one."""
    best, most = None, -1.0
    for room in rooms:
        if room.want > 0 and (worth := room.worth(needs)) > most:
            best, most = room, worth
    return best
