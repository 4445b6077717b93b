"""Limits on what one owner creates: runs, active draws and open sessions.

Invariant. Something new is counted from before it is stored until it is found where the others are counted, so parallel
calls together cannot exceed a limit. What is created again under its own id needs no further room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Set
from contextlib import contextmanager

from rollyard.agents.session import NAME as SESSION
from rollyard.core import Run
from rollyard.core.failure import QuotaExceeded
from rollyard.pipeline import Pipeline
from rollyard.sampling.sampler import Sampler
from rollyard.service.security.access import Caller


class CreationQuotas:
    """Counts the runs, draws and sessions of each owner, with those that are being created."""

    def __init__(self, pipeline: Pipeline, sampler: Sampler, *, max_runs: int, max_draws: int) -> None:
        self._pipeline = pipeline
        self._sampler = sampler
        self._max_runs = max_runs
        self._max_draws = max_draws
        self._runs, self._draws, self._sessions = _Reservations(), _Reservations(), _Reservations()
        self._submitted: dict[str, set[str]] = {}  # by owner: sessions that may still be queued

    @contextmanager
    def new_run(self, caller: Caller, run_id: str) -> Generator[None, None, None]:
        """Reserves room for a run. Raises `QuotaExceeded` if the caller may create no more: all runs are in memory,
        with their defaults, and every listing goes through them."""
        most = None if caller.is_admin else self._max_runs
        existing = {run.id for run in self._pipeline.runs if run.owner == caller.name}
        full = QuotaExceeded(
            f"this token has created {most} runs, which is the limit (max_runs)", remedy="Delete runs."
        )
        with self._runs.hold(caller.name, run_id, existing, most, full):
            yield

    @contextmanager
    def active_draw(self, caller: Caller, run: Run, key: str) -> Generator[None, None, None]:
        """Reserves room for a draw that becomes active. Raises `QuotaExceeded` if the owner of its run may have no
        more: their tasks and samples are in memory."""
        most = None if caller.is_admin else self._max_draws
        full = QuotaExceeded(
            f"the runs of this token have {most} active draws, which is the limit (max_draws)",
            remedy="Close draws that no trainer reads.",
        )
        with self._draws.hold(run.owner, key, self._sampler.active_of(run.owner), most, full):
            yield

    @contextmanager
    def open_session(self, run: Run, key: str) -> Generator[None, None, None]:
        """Reserves room for a session while it is submitted. From then on it counts until it has ended. Raises
        `QuotaExceeded` if the owner of its run may have no more."""
        most = self._pipeline.quota_of(run.owner).sessions
        full = QuotaExceeded(f"the token may have {most} sessions open at once")
        with self._sessions.hold(run.owner, key, self._sessions_of(run.owner), most, full):
            yield
            if most is not None:
                self._submitted.setdefault(run.owner, set()).add(key)

    def _sessions_of(self, owner: str) -> Set[str]:
        """The keys of an owner's sessions that are open or queued."""
        pipeline = self._pipeline
        queued = {key for key in self._submitted.pop(owner, ()) if pipeline.has(key)}
        if queued:
            self._submitted[owner] = queued
        live = [one.rollout for one in pipeline.live.values() if one.run.owner == owner]
        return queued | {rollout.id for rollout in live if rollout.task.environment == SESSION}


class _Reservations:
    """The things of one kind that are being created, by owner."""

    def __init__(self) -> None:
        self._held: dict[str, Counter[str]] = {}

    @contextmanager
    def hold(
        self, owner: str, key: str, existing: Set[str], most: int | None, full: QuotaExceeded
    ) -> Generator[None, None, None]:
        """Counts the key as the owner's. Raises `full` if there would be more than `most` with the existing ones."""
        held = self._held.setdefault(owner, Counter())
        if most is not None and key not in existing and len({*existing, *held, key}) > most:
            raise full
        held[key] += 1
        try:
            yield
        finally:
            held[key] -= 1
            if not held[key]:
                del held[key]
            if not held:
                self._held.pop(owner, None)
