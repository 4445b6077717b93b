"""Engines that are added and removed while the service runs: in the router and in the store, which must agree.

Both are changed under one lock. Otherwise a removal that overlaps with an addition of the same id could leave an engine
in one of them: it would work until the next restart, or come back after it.
"""

from __future__ import annotations

import asyncio

from rollyard.core.failure import NotFound
from rollyard.engines.base import EngineSpec
from rollyard.engines.pool.pool import EngineStatus
from rollyard.engines.routing.router import Router
from rollyard.observe import Metrics
from rollyard.store.base import Store


class StoredEngines:
    """Adds engines permanently, and removes them."""

    def __init__(self, router: Router, store: Store, metrics: Metrics) -> None:
        self._router, self._store, self._metrics = router, store, metrics
        self._lock = asyncio.Lock()

    async def add(self, spec: EngineSpec) -> EngineStatus:
        """Probes an engine, adds it and stores it: it is added again after a restart. Raises as `Router.add` does."""
        status = await self._router.add(spec)
        added = self._router.engine(spec.id)
        try:
            async with self._lock:
                if not self._has(spec.id) or self._router.engine(spec.id) is not added:
                    raise NotFound(f"engine {spec.id!r} was removed while it was being added")
                await self._store.put_engine(spec)
        except NotFound:
            raise
        except BaseException:
            await self._router.remove(spec.id)  # an engine that is not stored must not be used
            raise
        return status

    async def remove(self, engine_id: str) -> None:
        """Removes an engine. Its sessions continue on others, from the tokens that they have. Raises `NotFound`."""
        async with self._lock:
            self._router.engine(engine_id)
            await self._store.delete_engine(engine_id)
            closing = self._router.detach(engine_id)
        await closing
        if not self._has(engine_id):  # it may have been added again while its calls ended
            self._metrics.engine_removed(engine_id)

    def _has(self, engine_id: str) -> bool:
        return any(status.spec.id == engine_id for status in self._router.list())
