"""What vLLM and SGLang are told when their weights change, in their own words. See `base.Control`.

vLLM has these routes with VLLM_SERVER_DEV_MODE=1 (checked against 0.32.0). `/reset_prefix_cache` answers 200 and says
in its body whether it worked: not while blocks are held, by a call that is just ending, say. With
`reset_running_requests` the calls that were kept are computed anew, so that no KV of old weights is left.

SGLang's `/update_weight_version` aborts everything unless it is told not to, and its `/flush_cache` answers 400 while
something runs. It cannot say which token of a call had which weights, so nothing is ever kept running there: what
others have in flight is put back into its queue ("retract"), which allows the cache to be cleared.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from rollyard.core.failure import EngineBroken, EngineFailure, EngineRefused, EngineUnavailable
from rollyard.core.policy import PauseMode
from rollyard.engines.clients.transport import EngineTransport

NO_ROUTE = frozenset({403, 404, 405})

_VLLM_MODES = {PauseMode.ABORT: "abort", PauseMode.DRAIN: "wait", PauseMode.KEEP: "keep"}

CLEAR_TRIES = 8
CLEAR_PAUSE_S = (0.05, 1.0)  # first and longest pause between two tries: together about 4 s

UNCONTROLLED_NOTE = (
    "it cannot be told to pause ({how}): a change of weights holds its calls here, and leaves its prefix cache to the "
    "cache salt"
)


class _Cleared(msgspec.Struct):
    success: bool = True


class _Weights(msgspec.Struct):
    weight_version: str | None = None


class NoControl:
    """For engines whose weights are not ours to change."""

    async def pause(self, mode: PauseMode) -> bool:
        return False

    async def set_version(self, version: int) -> bool:
        return False

    async def clear_cache(self) -> bool:
        return False

    async def resume(self) -> bool:
        return False

    async def version(self) -> str | None:
        return None


class _ControlledEngine(ABC):
    """An engine's wire, and what its answers mean here."""

    def __init__(self, wire: EngineTransport) -> None:
        self._wire = wire

    async def _tell(self, path: str, body: Mapping[str, Any] | None = None) -> bool:
        try:
            await self._wire.post(path, body or {})
        except EngineRefused as error:
            if error.data.get("status") in NO_ROUTE:
                return False
            raise
        return True

    async def _says(self, *paths: str) -> str | None:
        for path in paths:
            try:
                return self._wire.read(await self._wire.get(path), _Weights, path).weight_version
            except (EngineRefused, EngineBroken):
                continue
        return None

    async def clear_cache(self) -> bool:
        pause_s, longest_s = CLEAR_PAUSE_S
        why = "blocks are still held"
        for _ in range(CLEAR_TRIES):
            try:
                if (found := await self._clear()) is not None:
                    return found
            except EngineFailure as error:
                why = error.detail
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)
        raise EngineUnavailable(f"its cache could not be cleared in {CLEAR_TRIES} tries: {why}")

    @abstractmethod
    async def _clear(self) -> bool | None:
        """None: not yet."""
        ...


class VllmControl(_ControlledEngine):
    """See the module."""

    async def pause(self, mode: PauseMode) -> bool:
        return await self._tell(f"/pause?mode={_VLLM_MODES[mode]}")

    async def set_version(self, version: int) -> bool:
        return await self._tell("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> bool:
        return await self._tell("/resume")

    async def version(self) -> str | None:
        return await self._says("/weight_info")

    async def exists(self) -> bool:
        """Whether it has the routes: asked when it is probed."""
        try:
            await self._wire.get("/is_paused")
        except EngineFailure:
            return False
        return True

    async def _clear(self) -> bool | None:
        path = "/reset_prefix_cache"
        try:
            raw = await self._wire.post(f"{path}?reset_running_requests=true", {})
        except EngineRefused as error:
            if error.data.get("status") in NO_ROUTE:
                return False
            raise
        # older versions answer nothing, and have always succeeded
        return True if not raw.strip() or self._wire.read(raw, _Cleared, path).success else None


class SglangControl(_ControlledEngine):
    """See the module."""

    async def pause(self, mode: PauseMode) -> bool:
        return await self._tell("/pause_generation", {"mode": "abort" if mode is PauseMode.ABORT else "retract"})

    async def set_version(self, version: int) -> bool:
        body = {"new_version": str(version), "abort_all_requests": False}
        return await self._tell("/update_weight_version", body)

    async def resume(self) -> bool:
        return await self._tell("/continue_generation")

    async def version(self) -> str | None:
        return await self._says("/get_weight_version", "/model_info")

    async def _clear(self) -> bool | None:
        return await self._tell("/flush_cache")
