"""Health checks of engines: one watch task per engine, started by the router.

A watch checks the health of an engine that is up, and reads its load for its session cap (`engines/pool/admission.py`).
An engine that is down must sample a real token before sessions may use it again, so that no rollout is lost to find
out. A quarantined engine is left alone: it may be able to sample, but its weights are unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollyard.core import Sampling, new_id
from rollyard.core.failure import EngineFailure, EngineTimeout
from rollyard.engines.base import Engine, GenerateRequest, Generation, Kind, Role
from rollyard.engines.pool.pool import Health, PoolMember
from rollyard.engines.routing.settings import RouterSettings
from rollyard.engines.weights.provenance import verify

log = logging.getLogger("rollyard.engines")

Vet = Callable[[Engine], Awaitable[bool]]
"""Returns whether the engine's tokenizer was verified against the renderer's. Raises EngineFailure if the engine cannot
be used."""


class HealthWatch:
    """Probes engines, watches their health, and brings them up again."""

    def __init__(
        self, settings: RouterSettings, vet: Vet | None, admit_engine: Callable[[PoolMember], Awaitable[None]]
    ) -> None:
        """`admit_engine` is called for an engine that answers, for the first time or again."""
        self._settings = settings
        self._vet = vet
        self._admit_engine = admit_engine

    async def probe(self, member: PoolMember) -> None:
        """Determines an engine's properties."""
        seconds = self._settings.probe_s
        try:
            async with asyncio.timeout(seconds):
                await member.engine.probe()
                if self._vet is not None:
                    member.is_tokenizer_verified = await self._vet(member.engine)
        except TimeoutError:
            raise EngineTimeout(f"engine {member.id} did not answer its probe within {seconds} s") from None
        member.is_probed = True
        await self.read_load(member, is_anew=True)

    async def revive(self, member: PoolMember) -> None:
        """Checks that an engine that is not up can sample, so that it may be taken in again."""
        await (self.sample_once(member) if member.is_probed else self.probe(member))

    async def watch(self, member: PoolMember) -> None:
        while True:
            await asyncio.sleep(self._settings.watch_s)
            await self.watch_once(member)

    async def watch_once(self, member: PoolMember) -> None:
        if member.health is Health.UP:
            if not await member.engine.healthy() and member.health is Health.UP:
                member.failed("its health check failed", self._settings.trip_after)
                return
            await self.read_load(member)
            if self._may_be_another(member):
                await verify(member)
            return
        if member.health is Health.QUARANTINED:
            return
        try:
            await self.revive(member)
            await self._admit_engine(member)
        except EngineFailure as error:
            member.stats.set_error(error)
        except Exception as error:  # vetting loads arbitrary files and templates; the next check tries again
            member.stats.set_error(f"{type(error).__name__}: {error}")
            log.warning("an engine could not be vetted", extra={"engine": member.id, "error": str(error)})
        else:
            log.info("engine answers", extra={"engine": member.id, "health": str(member.health)})

    def _may_be_another(self, member: PoolMember) -> bool:
        spec = member.engine.spec
        is_policy = spec.role is Role.POLICY and spec.kind is not Kind.OPENAI
        is_named = member.pool.is_named and member.is_joined and not member.is_paused
        return is_policy and is_named and member.health is Health.UP and member.engine.contact != member.verified

    async def read_load(self, member: PoolMember, *, is_anew: bool = False) -> None:
        """Reads the engine's load for its cap, from before its first session on. The other kinds report no load, and
        judges have no sessions."""
        spec = member.engine.spec
        if spec.role is Role.POLICY and spec.kind in (Kind.VLLM, Kind.SGLANG):
            load = await member.engine.load()
            member.record_load(load, asyncio.get_running_loop().time(), is_anew=is_anew)

    async def sample_once(self, member: PoolMember) -> Generation | None:
        """Samples one real token, or makes only a health check if the engine returns no tokens."""
        engine, generation = member.engine, None
        try:
            async with asyncio.timeout(self._settings.probe_s):
                if not await engine.healthy():
                    raise EngineTimeout(f"engine {member.id}: its health check failed")
                if engine.spec.kind is not Kind.OPENAI:
                    request = GenerateRequest(new_id("trial"), (1, 2, 3), Sampling(), max_tokens=1)
                    generation = await engine.generate(request)
        except TimeoutError:
            raise EngineTimeout(f"engine {member.id} sampled nothing in {self._settings.probe_s} s") from None
        await self.read_load(member, is_anew=True)
        return generation
