"""Everything a running service has, in one place for the routes: what `build.open_house` made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from rollyard.agents.session import SessionAgent
from rollyard.core import Run, check_id
from rollyard.core.failure import NotFound
from rollyard.engines.router import Router
from rollyard.fleet.head import HeadYard
from rollyard.fleet.ray_host import RayHost
from rollyard.pipeline import Workshop, Yard
from rollyard.sampling.sampler import Sampler
from rollyard.service.auth import Tokens
from rollyard.service.keys import SessionKeys
from rollyard.service.settings import Settings
from rollyard.store.base import Store

DEFAULT_RUN = "default"


@dataclass(slots=True)
class House:
    """See the module. `closing` is set when the drain is over: whoever still waits is answered then."""

    settings: Settings
    tokens: Tokens
    store: Store
    router: Router
    shop: Workshop
    yard: Yard
    sampler: Sampler
    keys: SessionKeys
    sessions: SessionAgent  # knows those that are open
    runtimes: Mapping[str, Mapping[str, str]]  # what each runtime's probe found at start
    refused_engines: dict[str, str]  # configured or remembered ones that could not be taken in, and why
    ray: RayHost | None = None  # of a fleet on Ray
    started_at: float = field(default_factory=time.monotonic)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, run_id: str) -> Run:
        """A run by its id; the default one is made on first use."""
        found = self.yard.run_of(check_id(run_id, "run"))
        if found is not None:
            return found
        if run_id != DEFAULT_RUN:
            raise NotFound(f"there is no run {run_id!r}; make it with POST /v1/runs")
        made = await self.store.put_run(Run(DEFAULT_RUN, created_at=time.time()), {})
        self.yard.know(made)
        return made

    @property
    def head(self) -> HeadYard:
        """The yard, of a service that has a fleet; `NotFound` otherwise."""
        if not isinstance(self.yard, HeadYard):
            raise NotFound("this service has no fleet: start it with --fleet")
        return self.yard

    def wait_s(self, asked_s: float) -> float:
        return min(asked_s, self.settings.max_wait_s)


def house_of(request: Request) -> House:
    return request.app.state.house
