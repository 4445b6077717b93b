"""The timeline of a rollout: its attempts, their stages and the calls of RUN, in seconds since its submission.

Stages are placed one after the other by their measured durations, which the machine that ran them took from its
monotonic clock. Only the end of the last attempt is placed by the wall clock of this service, so that clocks of nodes
do not have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollyard.core import Json, Rollout, State, Timings, id_of

Part = dict[str, Any]

BEFORE_EVAL = ("queued", "init", "ready", "run")
EVAL = ("eval_wait", "eval")


@dataclass(frozen=True, slots=True)
class LiveView:
    """What is known of a rollout that has left the queue and not ended."""

    state: State
    timings: Timings


def timeline(rollout: Rollout, live: LiveView | None, info: Mapping[str, Json], now: float) -> dict[str, Json]:
    """Returns the API's object. `info` has the calls of the last attempt, as `CallLog.info` returns them; `now` is the
    wall clock."""
    attempts: list[Json] = []
    at_s = 0.0
    for lost in rollout.lost:
        parts = _stages(at_s, lost.timings)
        attempts.append(_attempt(lost.attempt, at_s, parts, code=lost.code, detail=lost.detail))
        at_s += _total(lost.timings)
    state = rollout.state if live is None else live.state
    attempts.append(_last(rollout, live, info, at_s, now))
    dropped = info.get("calls_dropped", 0)
    return {
        "id": id_of(rollout.id),
        "run": rollout.run,
        "state": state,
        "origin": rollout.created_at,
        "at": now if rollout.ending is None else rollout.updated_at,
        "attempts": attempts,
        "dropped_calls": dropped,
    }


def _last(rollout: Rollout, live: LiveView | None, info: Mapping[str, Json], at_s: float, now: float) -> Json:
    changed_s = max(0.0, rollout.updated_at - rollout.created_at)
    ending = rollout.ending
    if ending is not None:
        start_s = _start_s(rollout, at_s, changed_s - _total(ending.timings))
        parts = _stages(start_s, ending.timings, end_s=changed_s)
        failure = ending.failure
        code, detail = (failure.code, failure.detail) if failure is not None else (None, "")
    elif live is not None:
        start_s = _start_s(rollout, at_s, now - rollout.created_at - _total(live.timings))
        parts, code, detail = _running(_stages(start_s, live.timings), live.state, start_s), None, ""
    else:
        start_s = _start_s(rollout, at_s, changed_s)
        is_queued = rollout.state is State.QUEUED
        parts, code, detail = [_part("queued", start_s, None)] if is_queued else [], None, ""
    return _attempt(rollout.attempt, start_s, _with_calls(parts, info), code=code, detail=detail)


def _start_s(rollout: Rollout, at_s: float, measured_s: float) -> float:
    """The start of the last attempt: exactly 0 if it is the only one."""
    return max(at_s, measured_s) if rollout.lost else 0.0


def _attempt(number: int, start_s: float, parts: Sequence[Part], *, code: str | None, detail: str) -> Json:
    rounded: list[Json] = [
        {**part, "start_s": _rounded(part["start_s"]), "end_s": _rounded(part["end_s"])} for part in parts
    ]
    return {"attempt": number, "code": code, "detail": detail, "start_s": _rounded(start_s), "parts": rounded}


def _stages(start_s: float, timings: Timings, end_s: float | None = None) -> list[Part]:
    """The stages that took time. EVAL ends at `end_s`, if that leaves a gap: it may have run in a later process."""
    parts: list[Part] = []
    at_s = start_s
    for kind in BEFORE_EVAL:
        seconds = _seconds(timings, kind)
        if seconds > 0.0:
            parts.append(_part(kind, at_s, at_s + seconds))
            if kind == "init" and timings.prepare_s > 0.0:  # INIT begins with it
                parts.append(_part("prepare", at_s, at_s + min(seconds, timings.prepare_s)))
        at_s += seconds
    if end_s is not None:
        at_s = max(at_s, end_s - timings.eval_wait_s - timings.eval_s)
    for kind in EVAL:
        seconds = _seconds(timings, kind)
        if seconds > 0.0:
            parts.append(_part(kind, at_s, at_s + seconds))
        at_s += seconds
    return parts


def _running(parts: list[Part], state: State, start_s: float) -> list[Part]:
    """Opens the current stage."""
    kinds = EVAL if state is State.EVAL else (state.value,)
    current = [part for part in parts if part["kind"] in kinds]
    if current:
        current[-1]["end_s"] = None
    else:
        parts.append(_part(kinds[-1], parts[-1]["end_s"] if parts else start_s, None))
    return parts


def _with_calls(parts: list[Part], info: Mapping[str, Json]) -> list[Part]:
    run = next((part for part in parts if part["kind"] == "run"), None)
    calls, errors = info.get("calls"), info.get("call_errors")
    if run is None or not isinstance(calls, Sequence):
        return parts
    failed = set(errors) if isinstance(errors, Sequence) else set[Json]()
    found: list[Part] = []
    for index, call in enumerate(calls):
        match call:
            case [str(kind), int(turn), int() | float() as start_s, int() | float() | None as end_s, str(name), tokens]:
                end = None if end_s is None else run["start_s"] + end_s
                part: Part = {**_part(kind, run["start_s"] + start_s, end), "turn": turn, "name": name}
                part |= {"engine": name, "tokens": tokens} if kind == "model" else {}
                found.append({**part, "is_error": index in failed})
            case _:  # an environment's own, in a trajectory of an older version
                return parts
    return [*parts, *found]


def _part(kind: str, start_s: float, end_s: float | None) -> Part:
    return {"kind": kind, "start_s": start_s, "end_s": end_s}


def _seconds(timings: Timings, kind: str) -> float:
    return max(0.0, getattr(timings, f"{kind}_s"))


def _total(timings: Timings) -> float:
    return sum(_seconds(timings, kind) for kind in (*BEFORE_EVAL, *EVAL))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
