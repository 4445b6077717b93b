"""The simulated world of `rollyard bench draw` and the bias tests: scripted groups, and a pipeline in virtual time.

Everything about a group follows from (seed, epoch, task, number of earlier starts): rewards, turns, the time and tokens
of each turn, which members are stragglers. So all policies get the same groups, whatever they do with them. A task that
is started again is a different group, as in reality.

Half of the tasks have no signal: all members pass, or all fail. In the others one to seven of eight pass. A turn takes
a log-normal time and samples a log-normal number of tokens. A straggler takes `slower` times as long in every turn (a
tool that hangs, a crowded machine) but has no more turns or tokens. So a rollout's time depends on its length, and on
nothing else unless `success_slower` is set.

The pipeline has rollout slots, first come first served, and a clock that jumps from event to event. Nothing sleeps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from random import Random

from rollyard.core.draw import DrawItem


@dataclass(frozen=True)
class Member:
    """The course of one rollout, unless it is cancelled."""

    reward: float
    is_straggler: bool
    seconds: tuple[float, ...]  # from the start to the end of each turn
    tokens: tuple[int, ...]  # sampled by the end of each turn

    @property
    def took_s(self) -> float:
        return self.seconds[-1]

    @property
    def sampled(self) -> int:
        return self.tokens[-1]

    def sampled_by(self, elapsed_s: float) -> int:
        """Returns the tokens sampled by that time: those of finished turns, and the current turn's share."""
        turn = bisect_right(self.seconds, elapsed_s)
        if turn >= len(self.seconds):
            return self.sampled
        since, before = (self.seconds[turn - 1], self.tokens[turn - 1]) if turn else (0.0, 0)
        share = (elapsed_s - since) / (self.seconds[turn] - since)
        return before + int(share * (self.tokens[turn] - before))


@dataclass(frozen=True)
class Script:
    """A group's members, unless it is cancelled."""

    members: tuple[Member, ...]

    @cached_property
    def has_signal(self) -> bool:
        return len({member.reward for member in self.members}) > 1

    @cached_property
    def has_straggler(self) -> bool:
        return any(member.is_straggler for member in self.members)

    @cached_property
    def pass_rate(self) -> float:
        return sum(member.reward for member in self.members) / len(self.members)

    @cached_property
    def tokens(self) -> int:
        return sum(member.sampled for member in self.members)


@dataclass(frozen=True, slots=True)
class World:
    """The parameters of the simulation. The benchmark's figures hold for these values."""

    seed: int = 0
    tasks: int = 4096
    want: int = 32
    group_size: int = 8
    slots: int = 512
    train_s: float = 150.0
    stragglers: float = 0.05  # share of rollouts
    slower: float = 10.0
    no_signal: float = 0.5  # share of tasks
    success_slower: float = 1.0  # a rollout that passes takes this many times as long
    turns: tuple[int, int] = (4, 20)  # uniform
    turn_s: tuple[float, float] = (4.0, 0.6)  # median, and sigma of the logarithm
    turn_tokens: tuple[float, float] = (250.0, 0.6)

    def script(self, item: DrawItem) -> Script:
        by_task = Random(f"{self.seed}/{item.index}")
        has_signal, is_easy = by_task.random() >= self.no_signal, by_task.random() < 0.5
        dice = Random(f"{self.seed}/{item.epoch}/{item.index}/{item.turn}")
        passes = dice.randint(1, self.group_size - 1) if has_signal else self.group_size * is_easy
        rewards = [1.0] * passes + [0.0] * (self.group_size - passes)
        dice.shuffle(rewards)
        return Script(tuple(self._member(reward, dice) for reward in rewards))

    def _member(self, reward: float, dice: Random) -> Member:
        is_straggler = dice.random() < self.stragglers
        pace = (self.slower if is_straggler else 1.0) * (self.success_slower if reward else 1.0)
        turns = range(dice.randint(*self.turns))
        (median_s, sigma_s), (median_tokens, sigma_tokens) = self.turn_s, self.turn_tokens
        seconds = [pace * median_s * math.exp(dice.gauss(0.0, sigma_s)) for _ in turns]
        tokens = [1 + int(median_tokens * math.exp(dice.gauss(0.0, sigma_tokens))) for _ in turns]
        return Member(reward, is_straggler, tuple(accumulate(seconds)), tuple(accumulate(tokens)))


@dataclass(slots=True)
class StartedGroup:
    """A group that a policy started. All figures are computed from these records."""

    item: DrawItem
    script: Script
    started_s: float
    end: str = "open"  # delivered, filtered (no signal), thrown (cancelled, dropped or discarded)
    ended_s: float = math.inf
    batch: int = 0
    staleness: int = 0
    sampled: int = 0  # tokens, delivered or not
    left: set[int] = field(default_factory=set[int])  # members that have not ended
    oldest: int = -1  # version that sampled its first token


@dataclass(slots=True)
class Ended:
    """A finished rollout, with the versions at its start and at its end."""

    started: StartedGroup
    index: int
    oldest: int
    newest: int


@dataclass(slots=True)
class _Running:
    since_s: float
    version: int


class VirtualPipeline:
    """Slots, a queue and a clock. `version` is that of the policy; the trainer increments it."""

    def __init__(self, slots: int) -> None:
        self.now_s = 0.0
        self.version = 0
        self.free = slots
        self.queued = deque[tuple[StartedGroup, int]]()
        self._running: dict[tuple[int, int], _Running] = {}
        self._events: list[tuple[float, int, StartedGroup | None, int]] = []
        self._count = 0

    def begin(self, started: StartedGroup) -> None:
        """Queues all members of a group."""
        started.left = set(range(len(started.script.members)))
        self.queued.extend((started, index) for index in sorted(started.left))
        self._fill()

    def alarm(self, after_s: float) -> None:
        """Makes `next` return None once, after that time."""
        self._push(self.now_s + after_s, None, 0)

    def next(self) -> Ended | None:
        """Advances to the next end of a rollout, or to the next alarm (None)."""
        while True:
            self.now_s, _, started, index = heappop(self._events)
            if started is None:
                return None
            running = self._running.pop((id(started), index), None)
            if running is None:
                continue  # it was cancelled
            self.free += 1
            started.left.discard(index)
            started.sampled += started.script.members[index].sampled
            self._fill()
            return Ended(started, index, running.version, self.version)

    def cancel(self, *cancelled: StartedGroup) -> None:
        """Cancels the remaining members of groups; their sampled tokens are counted."""
        for started in cancelled:
            for index in started.left:
                running = self._running.pop((id(started), index), None)
                if running is not None:
                    self.free += 1
                    started.sampled += started.script.members[index].sampled_by(self.now_s - running.since_s)
            started.left = set()
        self.queued = deque(entry for entry in self.queued if entry[1] in entry[0].left)
        self._fill()

    def _fill(self) -> None:
        while self.free and self.queued:
            started, index = self.queued.popleft()
            self.free -= 1
            if started.oldest < 0:
                started.oldest = self.version
            self._running[id(started), index] = _Running(self.now_s, self.version)
            self._push(self.now_s + started.script.members[index].took_s, started, index)

    def _push(self, at_s: float, started: StartedGroup | None, index: int) -> None:
        self._count += 1
        heappush(self._events, (at_s, self._count, started, index))
