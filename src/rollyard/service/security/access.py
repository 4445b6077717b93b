"""Access rules: what each kind of token may read and change.

|                                   | admin | trainer | submitter | reader |
| --------------------------------- | ----- | ------- | --------- | ------ |
| read the contents of a run        | all   | its own | its own   | all, or those it is bound to |
| rollouts, groups, evals, sessions | all   | its own | its own   | none   |
| create, acknowledge, delete runs; draws | all | its own | none  | none   |
| pause, resume, name versions      | all   | policies it owns | none | none  |
| engines, pools, nodes, tokens     | yes   | no      | no        | no     |

A token owns the runs that were created with it and the runs that it is bound to by name. A token that is bound to runs
cannot create others, and no other token can take a name that it is bound to. The owner of a policy is the first token
that changes its weights, a token that is bound to it, or the token that an admin sets.

Invariant: resources that a caller may not read are not found (404), so that callers cannot learn the ids of others.
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
    """An authenticated caller. `name` identifies it and grants nothing: the id or the fingerprint of its token."""

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
        """The run of work that names no run. Each caller has its own."""
        if self.is_admin or self._reads_all or matches(DEFAULT_RUN, self.runs):
            return DEFAULT_RUN
        if self.runs:
            raise Forbidden(
                f"this token is bound to the runs {', '.join(self.runs)}: name one of them", runs=[*self.runs]
            )
        return f"{DEFAULT_RUN}.{self.name}"

    @property
    def sees_all_tenants(self) -> bool:
        """Whether it may read what the work of every tenant shows: an admin, or a reader of all runs."""
        return self.is_admin or self._reads_all

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
"""The caller on paths that need no token. The gate sets it."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name matches one of the patterns, in which `*` matches any text."""
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
    """For responses that include the work of every tenant."""
    caller = caller_of(request)
    if not caller.sees_all_tenants:
        raise Forbidden(f"{request.method} {request.url.path} is for admins, and for readers of all runs")


def require_write(caller: Caller, run: Run) -> None:
    """For work in a run that the caller may read."""
    if not caller.writes(run):
        raise Forbidden(f"a {caller.access} token cannot submit work to run {run.id!r}")


def require_manage(caller: Caller, run: Run) -> None:
    if not caller.manages(run):
        raise Forbidden(f"a {caller.access} token cannot change run {run.id!r}, or draw from it")


def require_new_run(caller: Caller, run_id: str, policy: str, bound: Sequence[Caller]) -> None:
    """For a run that does not exist yet. `bound`: all known callers."""
    if caller.is_admin:
        return
    if caller.runs and not matches(run_id, caller.runs):
        raise Forbidden(f"this token is bound to the runs {', '.join(caller.runs)}", runs=[*caller.runs])
    if not caller.runs and (
        run_id == DEFAULT_RUN
        or run_id.startswith(f"{DEFAULT_RUN}.")
        or any(matches(run_id, one.runs) for one in bound if one.name != caller.name)
    ):
        raise Forbidden(f"the run name {run_id!r} is reserved for another token")
    require_policy_use(caller, policy)


def require_priority(caller: Caller, priority: int) -> None:
    most = caller.quota.priority
    if most is not None and priority > most:
        raise Forbidden(f"priority: this token allows {most} at most, not {priority}")


def require_policy_use(caller: Caller, policy: str) -> None:
    if not caller.is_admin and caller.policies and not matches(policy, caller.policies):
        raise Forbidden(
            f"this token is bound to the policies {', '.join(caller.policies)}", policies=[*caller.policies]
        )


def owns_policy(caller: Caller, policy: str, owners: Mapping[str, str], bound: Sequence[Caller]) -> bool:
    """Whether the caller may change the policy's weights. Any trainer may do so if the policy has no owner yet."""
    if caller.is_admin:
        return True
    if caller.access is not Access.TRAINER:
        return False
    if caller.policies:
        return matches(policy, caller.policies)
    if any(matches(policy, one.policies) for one in bound if one.name != caller.name):
        return False
    return owners.get(policy, caller.name) == caller.name
