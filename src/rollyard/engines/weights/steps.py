"""The steps of a weight update at one engine, each bounded in time. `policies.py` has their order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from rollyard.core.failure import EngineFailure
from rollyard.core.policy import PauseMode
from rollyard.engines.pool.pool import Health, PoolMember
from rollyard.engines.weights.provenance import OtherWeights, UnknownWeights, compare, remember
from rollyard.engines.weights.state import PolicySettings

log = logging.getLogger("rollyard.engines")


async def pause_engine(
    member: PoolMember, mode: PauseMode, bounds: PolicySettings, settled: Callable[[], Awaitable[None]]
) -> None:
    """Ends or freezes its calls as the mode requires, here and (`settled`) at nodes; then pauses the engine. An engine
    that fails to pause is quarantined."""
    if mode is PauseMode.DRAIN:
        await member.idle.wait()
    else:
        await all_of(member.cut(is_sparing=mode is PauseMode.KEEP))
    await settled()
    try:
        async with asyncio.timeout(bounds.control_s):
            member.is_pause_accepted = await member.engine.control.pause(mode)
    except (EngineFailure, TimeoutError) as error:
        member.quarantine(f"it did not pause: {_detail(error, bounds)}")
    if not member.is_pause_accepted:
        await all_of(member.cut(is_sparing=False))  # the engine does not freeze the calls to be kept
        await settled()
    elif mode is PauseMode.ABORT:
        try:
            async with asyncio.timeout(bounds.abort_grace_s):
                await member.idle.wait()  # for chat calls, which only the engine can end
        except TimeoutError:
            log.warning("a paused engine has calls in flight", extra={"engine": member.id})


async def renew_engine(
    member: PoolMember, version: int, bounds: PolicySettings, revive: Callable[[PoolMember], Awaitable[None]]
) -> str | None:
    """Sets the version, clears the caches and resumes the engine. Returns an error message, or None."""
    control = member.engine.control
    step = "take its version"
    try:
        async with asyncio.timeout(bounds.control_s):
            member.is_version_accepted = await control.set_version(version)
            step = "clear its cache"
            await control.clear_cache()
            step = "resume"
            if not await control.resume() and member.is_pause_accepted:
                return "it was paused and has no route to resume"
        if member.health is not Health.UP or not member.is_probed:
            step = "sample a token"
            await revive(member)
        await remember(member)
    except Exception as error:  # vetting an engine that was never up loads arbitrary files
        return f"it did not {step}: {_detail(error, bounds)}"
    return None


async def prepare_engine(member: PoolMember, bounds: PolicySettings, *, is_to_pause: bool, is_new: bool) -> str | None:
    """Pauses an engine that was added or came back, or checks that it has its policy's version. Returns why it must not
    take calls, or None."""
    control = member.engine.control
    try:
        async with asyncio.timeout(bounds.control_s):
            if is_to_pause:
                member.is_pause_accepted = await control.pause(PauseMode.ABORT)
                return None
            if member.is_pause_accepted:
                await control.resume()
            if not member.pool.is_named:
                return None
            if is_new:
                member.is_version_accepted = await control.set_version(member.version)
                await remember(member)
            else:
                member.is_version_accepted = member.is_version_accepted or await control.version() is not None
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
        await asyncio.wait(ended)  # the sessions of these calls bound it by abort_grace_s


def _detail(error: BaseException, bounds: PolicySettings) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {bounds.control_s:g} s"
    return error.detail if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
