"""The parts of a running service, for the routes. `build.open_app` creates them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from rollyard.agents.session import SessionAgent
from rollyard.catalog import Catalog
from rollyard.core import DEFAULT_RUN, Json, Run, check_id, key_of
from rollyard.core.access import AuditEntry
from rollyard.core.failure import AmbiguousId, Forbidden, NotFound
from rollyard.engines.routing.router import Router
from rollyard.fleet.head import FleetHead
from rollyard.fleet.ray_host import RayHost
from rollyard.fleet.tokenizer_files import TokenizerServer
from rollyard.pipeline import Pipeline, StageResources
from rollyard.sampling.sampler import Sampler
from rollyard.service.history import History
from rollyard.service.security.access import Caller, caller_of, owns_policy
from rollyard.service.security.keys import SessionKeys
from rollyard.service.security.logins import Logins
from rollyard.service.security.quotas import CreationQuotas
from rollyard.service.security.tokens import Tokens
from rollyard.service.settings import Settings
from rollyard.service.stored_engines import StoredEngines
from rollyard.store.base import ItemKind, Store

_NAMES = {ItemKind.ROLLOUT: "rollout", ItemKind.GROUP: "group", ItemKind.DRAW: "draw", ItemKind.EVAL: "evaluation"}
_LISTED = {
    ItemKind.ROLLOUT: "`rollyard rollouts list` shows the rollouts, newest first.",
    ItemKind.DRAW: "`rollyard draws list` shows the draws.",
}
NO_RUN = "`rollyard runs list` shows the runs; create one with `rollyard runs create NAME` or POST /v1/runs."


@dataclass(slots=True)
class AppState:
    """The parts of a running service. `closing` is set when the drain is over: calls that still wait then return."""

    settings: Settings
    tokens: Tokens
    logins: Logins
    store: Store
    router: Router
    engines: StoredEngines
    resources: StageResources
    pipeline: Pipeline
    sampler: Sampler
    catalog: Catalog
    history: History
    quotas: CreationQuotas
    keys: SessionKeys
    sessions: SessionAgent  # holds the open sessions
    runtimes: Mapping[str, Mapping[str, str]]  # the result of each runtime's probe at start
    refused_engines: dict[str, str]  # configured or stored engines that could not be added, and why
    owners: dict[str, str]  # policy → the token that may change its weights
    ray: RayHost | None = None  # only with fleet = ray
    tokenizers: TokenizerServer = field(default_factory=TokenizerServer)
    overviews: dict[str, tuple[float, bytes]] = field(
        default_factory=dict[str, tuple[float, bytes]]
    )  # by caller, until
    started_at: float = field(default_factory=time.monotonic)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, caller: Caller, run_id: str) -> Run:
        """A run that the caller may read. "default" is the caller's own default run, created on first use."""
        name = caller.default_run if run_id == DEFAULT_RUN else check_id(run_id, "run")
        stored_run = self.pipeline.run_of(name)
        if stored_run is None and run_id == DEFAULT_RUN and caller.can_write:
            owner = "" if name == DEFAULT_RUN else caller.name
            stored_run = await self.store.put_run(Run(name, created_at=time.time(), owner=owner), {})
            self.pipeline.register_run(stored_run)
        if stored_run is None or not caller.reads(stored_run):
            raise NotFound(f"there is no run {run_id!r}", remedy=NO_RUN)
        return stored_run

    def require_still_readable(self, caller: Caller, run_id: str) -> None:
        """For a call that has waited: raises `NotFound` if the caller may not read the run any more. It may have been
        deleted meanwhile, and its name may be that of another tenant's run."""
        if not self.is_still_readable(caller, run_id):
            raise NotFound(f"there is no run {run_id!r}", remedy=NO_RUN)

    def is_still_readable(self, caller: Caller, run_id: str) -> bool:
        run = self.pipeline.run_of(run_id)
        return run is not None and caller.reads(run)

    def admission(self, request: Request) -> Callable[[], bool]:
        """Returns a function: whether the request would still be admitted. False once its token has been revoked or
        rotated or has expired, or its sign-in has ended. For responses without an end."""
        caller, login = caller_of(request), request.scope.get("rollyard.login")
        token = self.tokens.named(caller.name)

        def is_admitted() -> bool:
            now = self.tokens.named(caller.name)
            is_same = now is not None and token is not None and now.digest == token.digest
            return is_same and (login is None or self.logins.is_open(login))

        return is_admitted

    def readable(self, caller: Caller) -> list[Run]:
        """All runs that the caller may read."""
        return [run for run in self.pipeline.runs if caller.reads(run)]

    def breakers(self, caller: Caller, runtime: str) -> list[Mapping[str, Json]]:
        """The failing starts of a runtime. A tenant gets those without an image, except other owners': an image's name,
        and the output of its start, belong to the tenant whose tasks name it."""
        if caller.sees_all_tenants:
            return self.resources.breakers.status(runtime)
        return [one for one in self.resources.breakers.status(runtime, caller.name) if one["image"] is None]

    async def find(self, caller: Caller, kind: ItemKind, id: str, run_id: str | None) -> str:
        """The key of the object with that id, in that run or in any run that the caller may read."""
        name = _NAMES[kind]
        check_id(id, f"{name} id")
        if run_id is None:
            run_ids = await self.store.named(kind, id)
            keys = [key for key, name in run_ids.items() if (run := self.pipeline.run_of(name)) and caller.reads(run)]
        else:
            run = await self.run(caller, run_id)
            run_ids = await self.store.runs_of(kind, [key_of(run.id, id), id])  # id: in a store older than keys
            keys = [key for key, name in run_ids.items() if name == run.id]
        if not keys:
            raise NotFound(f"there is no {name} {id!r}", remedy=_LISTED.get(kind, ""))
        if len(keys) > 1:
            within = sorted(run_ids[key] for key in keys)
            raise AmbiguousId(f"the runs {', '.join(within)} each have a {name} {id!r}: add ?run=", runs=[*within])
        return keys[0]

    async def own_policy(self, request: Request, policy: str) -> None:
        """Raises `Forbidden` unless the caller may change the policy's weights. Sets the owner if there is none."""
        caller = caller_of(request)
        self.router.policies.status(policy)  # NotFound
        if not owns_policy(caller, policy, self.owners, self.tokens.callers):
            raise Forbidden(f"only its owner and admins may change the weights of policy {policy!r}")
        if not caller.is_admin and policy not in self.owners:
            self.owners[policy] = caller.name
            await self.store.put_owner(policy, caller.name)

    async def audit(self, request: Request, action: str, target: str, **detail: Json) -> None:
        """Records an administrative action in the audit log."""
        await self.store.add_audit(AuditEntry(time.time(), caller_of(request).name, action, target, detail))

    @property
    def fleet(self) -> FleetHead | None:
        """The fleet, if the service has one."""
        executor = self.pipeline.executor
        return executor if isinstance(executor, FleetHead) else None

    @property
    def head(self) -> FleetHead:
        """The fleet. Raises `NotFound` if there is none."""
        if self.fleet is None:
            raise NotFound("this service has no fleet: start it with --fleet")
        return self.fleet

    def wait_s(self, requested_s: float) -> float:
        return min(requested_s, self.settings.max_wait_s)


def app_state_of(request: Request) -> AppState:
    return request.app.state.app_state
