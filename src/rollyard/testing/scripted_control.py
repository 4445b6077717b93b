"""The control routes of a scripted engine: pause, set the weight version, clear the cache, resume.

Each step can be made to fail: `fail("clear", 2, 500)`. `log` contains all steps in order, as "pause abort",
"version 3", "clear", "resume"; a failed step is followed by its fault: "clear 500".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rollyard.testing.scripted_work import ScriptedGenerations

Step = Literal["pause", "version", "clear", "resume"]
ControlFault = int | Literal["hang", "held"]
"""An HTTP status; "hang": no response; or "held": a response that reports failure (for a clear)."""

PATHS: Mapping[str, Step] = {
    "/pause": "pause",
    "/pause_generation": "pause",
    "/update_weight_version": "version",
    "/reset_prefix_cache": "clear",
    "/flush_cache": "clear",
    "/resume": "resume",
    "/continue_generation": "resume",
}

Answer = tuple[int, Mapping[str, Any]]


class Controls:
    """Handles the control routes. With `is_there` off they do not exist, like in a vLLM started without them."""

    def __init__(self, work: ScriptedGenerations, abort: Callable[[Sequence[str]], None]) -> None:
        self.is_there = True
        self.log: deque[str] = deque(maxlen=1000)
        self.version = "default"
        self.clears = 0
        self._work = work
        self._abort = abort
        self._faults: dict[Step, deque[ControlFault]] = {}

    @property
    def is_paused(self) -> bool:
        return not self._work.open.is_set()

    def fail(self, step: Step, count: int, fault: ControlFault) -> None:
        """Makes the next `count` steps of this kind fail with `fault`."""
        faults = self._faults.setdefault(step, deque())
        for _ in range(count):
            faults.append(fault)

    async def handle(self, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
        step = PATHS[path]
        mode = query.get("mode") or body.get("mode") or "abort"
        entry = {"pause": f"pause {mode}", "version": f"version {body.get('new_version')}"}.get(step, step)
        faults = self._faults.get(step)
        if faults:
            fault = faults.popleft()
            self.log.append(f"{entry} {fault}")
            if fault == "held":
                return 200, {"success": False}
            if fault == "hang":
                await asyncio.get_running_loop().create_future()
            return fault if isinstance(fault, int) else 500, {
                "error": {"message": f"a fault of {step} was requested", "code": fault}
            }
        self.log.append(entry)
        if step == "pause":
            self._pause(mode)
        elif step == "version":
            self.version = str(body["new_version"])
            self._work.new_version(self.version)
            if path == "/update_weight_version" and body.get("abort_all_requests", False):
                self._abort(list(self._work.running))
        elif step == "clear":
            self.clears += 1
        else:
            self._work.thaw()
        return 200, {"success": True, "new_version": self.version}

    def _pause(self, mode: str) -> None:
        self._work.open.clear()
        if mode == "abort":
            self._abort(list(self._work.running))
        elif mode == "keep":
            self._work.freeze()
