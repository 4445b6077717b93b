"""`CallLog`: when each model call and each tool call of RUN started and ended, for people who look at a rollout.

Times are seconds of the monotonic clock since the start of RUN, as the timings of stages are: a call that waits for a
paused policy counts as running. Calls are in the order in which they started.

A log keeps the first and the last `MOST_CALLS` / 2 calls; those between are counted and dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rollyard.core import Json

MOST_CALLS = 2000
MOST_NAME_CHARS = 100
"""The length of a name: MCP servers and plugins choose the names of their tools."""

CallKind = Literal["model", "tool"]


@dataclass(slots=True, eq=False)
class Call:
    """One call. `name` is the engine or the tool."""

    kind: CallKind
    turn: int  # of the sampled span; for a tool call, of the turn that made it
    start_s: float
    name: str
    tokens: int = 0  # sampled
    end_s: float | None = None  # None: it runs
    is_error: bool = False


class CallLog:
    """The calls of one RUN. It starts when it is created."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most: int = MOST_CALLS) -> None:
        self._clock = clock
        self._started_at = clock()
        self._half = max(1, most // 2)
        self._first: list[Call] = []
        self._last: deque[Call] = deque()
        self.dropped = 0

    def now_s(self) -> float:
        """Seconds since the start of RUN."""
        return self._clock() - self._started_at

    def begin(self, kind: CallKind, turn: int, name: str) -> Call:
        call = Call(kind, turn, self._clock() - self._started_at, name[:MOST_NAME_CHARS])
        if len(self._first) < self._half:
            self._first.append(call)
        else:
            self._last.append(call)
            if len(self._last) > self._half:
                self._last.popleft()
                self.dropped += 1
        return call

    def end(self, call: Call, *, is_error: bool = False) -> None:
        call.end_s = self._clock() - self._started_at
        call.is_error = is_error

    def info(self, *, is_over: bool = True) -> dict[str, Json]:
        """Returns the log for `Trajectory.info`: `calls`, each [kind, turn, start_s, end_s, name, tokens]. The indices
        of calls that failed are in `call_errors`, the number of calls that were dropped in `calls_dropped`, which is
        where the second half of `calls` begins. Unless RUN is over, a running call has no end."""
        calls = [*self._first, *self._last]
        now_s = self.now_s() if is_over else None
        rows: list[Json] = []
        for call in calls:
            end_s = now_s if call.end_s is None else call.end_s
            end = None if end_s is None else round(end_s, 6)
            rows.append([call.kind, call.turn, round(call.start_s, 6), end, call.name, call.tokens])
        info: dict[str, Json] = {"calls": rows}
        if errors := [index for index, call in enumerate(calls) if call.is_error]:
            info["call_errors"] = list[Json](errors)
        if self.dropped:
            info["calls_dropped"] = self.dropped
        return info
