"""The steps of a weight change at vLLM and SGLang: implementations of `base.Control`.

vLLM has these routes with VLLM_SERVER_DEV_MODE=1 (checked against 0.32.0). `/reset_prefix_cache` answers 200 and
reports in its body whether it succeeded. It fails while blocks are held, for example by a call that is just ending.
With `reset_running_requests` the kept calls are computed again, so that no KV of old weights is left.

SGLang's `/update_weight_version` aborts everything unless `abort_all_requests` is false, and its `/flush_cache` answers
400 while a call runs. SGLang does not report which token of a call had which weights, so no call is kept running there:
other clients' calls in flight are put back into its queue ("retract"), which allows the cache to be cleared.
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
    "it has no routes to pause it ({how}): a weight change holds its calls in Rollyard, and relies on the cache salt "
    "instead of clearing its prefix cache"
)


class _Cleared(msgspec.Struct):
    success: bool = True


class _Weights(msgspec.Struct):
    weight_version: str | None = None


class NoControl:
    """For engines whose weights Rollyard does not change."""

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
    """Sends control requests to an engine and interprets its replies."""

    def __init__(self, wire: EngineTransport) -> None:
        self._wire = wire

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> bool:
        try:
            await self._wire.post(path, body or {})
        except EngineRefused as error:
            if error.data.get("status") in NO_ROUTE:
                return False
            raise
        return True

    async def _get_version(self, *paths: str) -> str | None:
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
                if (is_cleared := await self._clear()) is not None:
                    return is_cleared
            except EngineFailure as error:
                why = error.detail
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)
        raise EngineUnavailable(f"its cache could not be cleared in {CLEAR_TRIES} tries: {why}")

    @abstractmethod
    async def _clear(self) -> bool | None:
        """One attempt; returns None if it has to be repeated."""
        ...


class VllmControl(_ControlledEngine):
    """The control routes of vLLM."""

    async def pause(self, mode: PauseMode) -> bool:
        return await self._post(f"/pause?mode={_VLLM_MODES[mode]}")

    async def set_version(self, version: int) -> bool:
        return await self._post("/update_weight_version", {"new_version": str(version)})

    async def resume(self) -> bool:
        return await self._post("/resume")

    async def version(self) -> str | None:
        return await self._get_version("/weight_info")

    async def exists(self) -> bool:
        """Whether the engine has the control routes. Called by the probe."""
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
        # older versions return an empty body, and always succeed
        return True if not raw.strip() or self._wire.read(raw, _Cleared, path).success else None


class SglangControl(_ControlledEngine):
    """The control routes of SGLang."""

    async def pause(self, mode: PauseMode) -> bool:
        return await self._post("/pause_generation", {"mode": "abort" if mode is PauseMode.ABORT else "retract"})

    async def set_version(self, version: int) -> bool:
        body = {"new_version": str(version), "abort_all_requests": False}
        return await self._post("/update_weight_version", body)

    async def resume(self) -> bool:
        return await self._post("/continue_generation")

    async def version(self) -> str | None:
        return await self._get_version("/get_weight_version", "/model_info")

    async def _clear(self) -> bool | None:
        return await self._post("/flush_cache")
