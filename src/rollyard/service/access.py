"""What a caller may reach: the rules, in one place.

|                                   | admin | trainer | submitter | reader |
| --------------------------------- | ----- | ------- | --------- | ------ |
| read what is in a run             | all   | its own | its own   | all, or those it is bound to |
| rollouts, groups, evals, sessions | all   | its own | its own   | none   |
| make, acknowledge, delete runs; draws | all | its own | none    | none   |
| pause, resume, name versions      | all   | policies it owns | none | none  |
| engines, pools, nodes, tokens     | yes   | no      | no        | no     |

A run is a token's own if it was made with it, or if the token is bound to it by name. A token that is bound to runs can
make no others; a name that another token is bound to is not free. A policy is owned by the first token that changes its
weights, by a token that is bound to it, or by whom an admin names.

Invariant: what a caller may not read is not found (404), so that no caller learns which ids others use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from starlette.requests import Request

from rollyard.core import DEFAULT_RUN, Run
from rollyard.core.access import Access, Quota
from rollyard.core.failure import Forbidden


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. `name` identifies it and grants nothing: the id of its token, or the fingerprint."""

    access: Access
    name: str
    runs: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    quota: Quota = field(default_factory=Quota)

    @property
    def is_admin(self) -> bool:
        return self.access is Access.ADMIN

    @property
    def can_write(self) -> bool:
        return self.access in (Access.ADMIN, Access.TRAINER, Access.SUBMITTER)

    @property
    def default_run(self) -> str:
        """The run of what names none: everyone has one of their own."""
        if self.is_admin or self._reads_all or matches(DEFAULT_RUN, self.runs):
            return DEFAULT_RUN
        if self.runs:
            raise Forbidden(f"this token is bound to the runs {', '.join(self.runs)}: say which one", runs=[*self.runs])
        return f"{DEFAULT_RUN}.{self.name}"

    def reads(self, run: Run) -> bool:
        return self.is_admin or self._reads_all or self._has(run)

    def writes(self, run: Run) -> bool:
        return self.is_admin or (self.can_write and self._has(run))

    def manages(self, run: Run) -> bool:
        return self.is_admin or (self.access is Access.TRAINER and self._has(run))

    @property
    def _reads_all(self) -> bool:
        return self.access is Access.READER and not self.runs

    def _has(self, run: Run) -> bool:
        return run.owner == self.name or matches(run.id, self.runs)


OPERATOR = Caller(Access.ADMIN, "operator")
"""Whoever calls where no token is asked for: the gate puts it there."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of these, or fits one with `*` in it."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def caller_of(request: Request) -> Caller:
    return request.scope["rollyard.caller"]


def require_admin(request: Request) -> Caller:
    caller = caller_of(request)
    if not caller.is_admin:
        raise Forbidden(f"{request.method} {request.url.path} is for admins")
    return caller


def require_node(request: Request) -> None:
    if caller_of(request).access not in (Access.NODE, Access.ADMIN):
        raise Forbidden(f"{request.method} {request.url.path} is for nodes")


def require_operator(request: Request) -> None:
    """For answers that include the work of every tenant."""
    caller = caller_of(request)
    if not caller.is_admin and (caller.access is not Access.READER or caller.runs):
        raise Forbidden(f"{request.method} {request.url.path} is for admins, and for readers of all runs")


def require_write(caller: Caller, run: Run) -> None:
    """For work in a run that the caller may read."""
    if not caller.writes(run):
        raise Forbidden(f"a {caller.access} token cannot submit work to run {run.id!r}")


def require_manage(caller: Caller, run: Run) -> None:
    if not caller.manages(run):
        raise Forbidden(f"a {caller.access} token cannot change run {run.id!r}, or draw from it")


def require_new_run(caller: Caller, run_id: str, policy: str, bound: Sequence[Caller]) -> None:
    """For a run that is not there yet. `bound`: all callers there are."""
    if caller.is_admin:
        return
    if caller.runs and not matches(run_id, caller.runs):
        raise Forbidden(f"this token is bound to the runs {', '.join(caller.runs)}", runs=[*caller.runs])
    if not caller.runs and (
        run_id == DEFAULT_RUN
        or run_id.startswith(f"{DEFAULT_RUN}.")
        or any(matches(run_id, one.runs) for one in bound if one.name != caller.name)
    ):
        raise Forbidden(f"the run name {run_id!r} is kept for another token")
    require_policy_use(caller, policy)


def require_priority(caller: Caller, priority: int) -> None:
    most = caller.quota.priority
    if most is not None and priority > most:
        raise Forbidden(f"priority: this token may ask for {most} at most, not {priority}")


def require_policy_use(caller: Caller, policy: str) -> None:
    if not caller.is_admin and caller.policies and not matches(policy, caller.policies):
        raise Forbidden(
            f"this token is bound to the policies {', '.join(caller.policies)}", policies=[*caller.policies]
        )


def owns_policy(caller: Caller, policy: str, owners: Mapping[str, str], bound: Sequence[Caller]) -> bool:
    """Whether the caller may change its weights. One without an owner can be had by the first trainer that does so."""
    if caller.is_admin:
        return True
    if caller.access is not Access.TRAINER:
        return False
    if caller.policies:
        return matches(policy, caller.policies)
    if any(matches(policy, one.policies) for one in bound if one.name != caller.name):
        return False
    return owners.get(policy, caller.name) == caller.name
