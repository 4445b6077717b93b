"""The steps that one engine takes when its weights change, each bounded in time. The order is told in `policies.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rollyard.core.failure import EngineFailure
from rollyard.core.policy import PauseMode
from rollyard.engines.routing.pool import Health, PoolMember
from rollyard.engines.weights.provenance import OtherWeights, UnknownWeights, compare, remember
from rollyard.engines.weights.state import PolicySettings

log = logging.getLogger("rollyard.engines")


async def pause_engine(
    member: PoolMember, mode: PauseMode, bounds: PolicySettings, settled: Callable[[], Awaitable[None]]
) -> None:
    """Its calls end, or are frozen, as the mode says, here and (`settled`) at nodes; then it is told to pause. One that
    fails to is quarantined."""
    if mode is PauseMode.DRAIN:
        await member.idle.wait()
    else:
        await all_of(member.cut(is_sparing=mode is PauseMode.KEEP))
    await settled()
    try:
        async with asyncio.timeout(bounds.control_s):
            member.is_told = await member.engine.control.pause(mode)
    except (EngineFailure, TimeoutError) as error:
        member.quarantine(f"it did not pause: {_detail(error, bounds)}")
    if not member.is_told:
        await all_of(member.cut(is_sparing=False))  # nothing freezes what was to be kept
        await settled()
    elif mode is PauseMode.ABORT:
        try:
            async with asyncio.timeout(bounds.abort_grace_s):
                await member.idle.wait()  # calls of text, which only the engine can end
        except TimeoutError:
            log.warning("a paused engine has calls in flight", extra={"engine": member.id})


async def renew_engine(
    member: PoolMember, version: int, bounds: PolicySettings, revive: Callable[[PoolMember], Awaitable[None]]
) -> str | None:
    """Its version, its caches, and on it goes; what went wrong, if anything did."""
    control = member.engine.control
    step = "take its version"
    try:
        async with asyncio.timeout(bounds.control_s):
            member.is_given = await control.set_version(version)
            step = "clear its cache"
            await control.clear_cache()
            step = "resume"
            if not await control.resume() and member.is_told:
                return "it was told to pause and cannot be told to resume"
        if member.health is not Health.UP or not member.is_probed:
            step = "sample a token"
            await revive(member)
        await remember(member)
    except Exception as error:  # the vetting of an engine that was never up loads files that may be anything
        return f"it did not {step}: {_detail(error, bounds)}"
    return None


async def take_in(member: PoolMember, bounds: PolicySettings, *, is_to_pause: bool, is_new: bool) -> str | None:
    """An engine comes, or comes back: it waits, or has the version of its policy. Why it must not take calls, if so."""
    control = member.engine.control
    try:
        async with asyncio.timeout(bounds.control_s):
            if is_to_pause:
                member.is_told = await control.pause(PauseMode.ABORT)
                return None
            if member.is_told:
                await control.resume()
            if not member.pool.is_named:
                return None
            if is_new:
                member.is_given = await control.set_version(member.version)
                await remember(member)
            else:
                member.is_given = member.is_given or await control.version() is not None
                await compare(member)
    except OtherWeights as error:
        return str(error)
    except UnknownWeights:
        member.verified = None  # it takes calls, and their tokens are untrainable until a resume names a version
    except (EngineFailure, TimeoutError) as error:
        return f"it could not be given its version: {_detail(error, bounds)}"
    return None


async def all_of(ended: Sequence[asyncio.Future[None]]) -> None:
    if ended:
        await asyncio.wait(ended)  # bounded by abort_grace_s, in the sessions whose calls they are


def _detail(error: BaseException, bounds: PolicySettings) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {bounds.control_s:g} s"
    return error.detail if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
