"""Chooses the node for a rollout. Pure rules, no I/O.

A node reports how many rollouts it wants; those are its free places. Among the nodes that want one, the emptiest is
chosen, but a node that has what the rollout needs may be somewhat fuller: the set-up of its group's other members,
which is made once per node, or its image, which is fetched once per node. A node that has lost an attempt of the
rollout gets it again only if no other node wants it.

Invariants. A node never gets more than it wants, nor what it cannot serve: a rollout that needs a model goes where one
of its policy's engines can be reached. What is remembered of a node is bounded; the oldest entry is dropped first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rollyard.core import Rollout
from rollyard.store.codec import to_json

SETUP_WORTH = 0.25
"""By what share of its places a node that has the set-up may be fuller."""

IMAGE_WORTH = 0.1

REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class PlacementKeys:
    """What a rollout can reuse where a similar one has run: a set-up (environment, data, image), and the image."""

    setup: str
    image: str | None

    @classmethod
    def of(cls, rollout: Rollout) -> PlacementKeys:
        task = rollout.task
        image = task.sandbox.image
        text = f"{task.environment}\0{image}\0{to_json(task.data)}"
        return cls(hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), image)


@dataclass(slots=True)
class NodeRoom:
    """What placement uses of a node."""

    places: int = 1  # in total
    want: int = 0  # free ones
    setups: dict[str, None] = field(default_factory=dict[str, None])  # in order of last use
    images: dict[str, None] = field(default_factory=dict[str, None])  # likewise
    reaches: frozenset[str] = frozenset()  # engines that can be used from there

    def remember(self, needs: PlacementKeys) -> None:
        _remember(self.setups, needs.setup)
        if needs.image is not None:
            _remember(self.images, needs.image)

    def serves(self, engines: Collection[str]) -> bool:
        """Whether one of these engines can be reached. `engines` is empty for what needs no model."""
        return not engines or not self.reaches.isdisjoint(engines)

    def preference(self, needs: PlacementKeys) -> float:
        has_setup = needs.setup in self.setups
        has_image = needs.image is not None and needs.image in self.images
        return self.want / max(1, self.places) + SETUP_WORTH * has_setup + IMAGE_WORTH * has_image


def _remember(recent: dict[str, None], name: str) -> None:
    recent.pop(name, None)
    recent[name] = None
    while len(recent) > REMEMBERED:
        del recent[next(iter(recent))]


def place(
    needs: PlacementKeys, rooms: Iterable[NodeRoom], engines: Collection[str] = (), avoided: Collection[NodeRoom] = ()
) -> NodeRoom | None:
    """Returns the best room that wants a rollout and can serve it, or None. The caller decrements its `want`."""
    best, most = None, (False, -1.0)
    for room in rooms:
        if room.want <= 0 or not room.serves(engines):
            continue
        preference = (all(room is not one for one in avoided), room.preference(needs))
        if best is None or preference > most:
            best, most = room, preference
    return best
