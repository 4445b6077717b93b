"""Whether engines are up: one watch per engine, which the router starts.

A watch asks an engine that is up whether it is healthy, and how loaded it is, which its session cap follows
(`admission.py`). One that is down must sample a token, a real one, before sessions may have it again, so no rollout is
spent on finding out. One that is quarantined is left alone: it may well sample, but from which weights?
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rollyard.core import Sampling
from rollyard.core.failure import EngineFailure, EngineTimeout
from rollyard.engines.base import Engine, GenerateRequest, Generation, Kind, Role
from rollyard.engines.routing.pool import Health, PoolMember
from rollyard.engines.routing.settings import RouterSettings
from rollyard.engines.weights.provenance import verify

log = logging.getLogger("rollyard.engines")

Vet = Callable[[Engine], Awaitable[bool]]
"""Whether the engine's tokenizer was compared with ours; an EngineFailure if the engine cannot be used."""


class HealthWatch:
    """See the module."""

    def __init__(
        self, settings: RouterSettings, vet: Vet | None, welcome: Callable[[PoolMember], Awaitable[None]]
    ) -> None:
        """`welcome` is told of an engine that answers, at first or again."""
        self._settings = settings
        self._vet = vet
        self._welcome = welcome

    async def probe(self, member: PoolMember) -> None:
        """Has it say what it is."""
        seconds = self._settings.probe_s
        try:
            async with asyncio.timeout(seconds):
                await member.engine.probe()
                if self._vet is not None:
                    member.is_tokenizer_verified = await self._vet(member.engine)
        except TimeoutError:
            raise EngineTimeout(f"engine {member.id} did not say within {seconds} s what it is") from None
        member.is_probed = True
        await self.look(member, is_anew=True)

    async def revive(self, member: PoolMember) -> None:
        """Shows that it can sample: one that is not up may be taken in again then."""
        await (self.try_it(member) if member.is_probed else self.probe(member))

    async def watch(self, member: PoolMember) -> None:
        while True:
            await asyncio.sleep(self._settings.watch_s)
            await self.watch_once(member)

    async def watch_once(self, member: PoolMember) -> None:
        if member.health is Health.UP:
            if not await member.engine.healthy() and member.health is Health.UP:
                member.failed("its health check failed", self._settings.trip_after)
                return
            await self.look(member)
            if self._may_be_another(member):
                await verify(member)
            return
        if member.health is Health.QUARANTINED:
            return
        try:
            await self.revive(member)
            await self._welcome(member)
        except EngineFailure as error:
            member.stats.last_error = error.detail
        except Exception as error:  # the vetting loads files and templates that may be anything; we look again
            member.stats.last_error = f"{type(error).__name__}: {error}"
            log.warning("an engine could not be vetted", extra={"engine": member.id, "error": str(error)})
        else:
            log.info("engine answers", extra={"engine": member.id, "health": str(member.health)})

    def _may_be_another(self, member: PoolMember) -> bool:
        spec = member.engine.spec
        is_policy = spec.role is Role.POLICY and spec.kind is not Kind.OPENAI
        is_named = member.pool.is_named and member.is_joined and not member.is_paused
        return is_policy and is_named and member.health is Health.UP and member.engine.contact != member.verified

    async def look(self, member: PoolMember, *, is_anew: bool = False) -> None:
        """How loaded it is, for its cap: before it gets its first session, and from then on. The other kinds do not
        tell, and judges hold no sessions."""
        spec = member.engine.spec
        if spec.role is Role.POLICY and spec.kind in (Kind.VLLM, Kind.SGLANG):
            load = await member.engine.load()
            member.heard(load, asyncio.get_running_loop().time(), is_anew=is_anew)

    async def try_it(self, member: PoolMember) -> Generation | None:
        """One real token, or one health check of an engine that gives no tokens."""
        engine, generation = member.engine, None
        try:
            async with asyncio.timeout(self._settings.probe_s):
                if not await engine.healthy():
                    raise EngineTimeout(f"engine {member.id}: its health check failed")
                if engine.spec.kind is not Kind.OPENAI:
                    request = GenerateRequest(f"trial-{member.id}", (1, 2, 3), Sampling(), max_tokens=1)
                    generation = await engine.generate(request)
        except TimeoutError:
            raise EngineTimeout(f"engine {member.id} sampled nothing in {self._settings.probe_s} s") from None
        await self.look(member, is_anew=True)
        return generation
