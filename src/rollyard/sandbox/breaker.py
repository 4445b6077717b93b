"""A circuit breaker per runtime, image and owner: what keeps failing to start is not tried for a while.

    closed ── 5 failures in a row ──▶ open (5 s, then twice as long each time, at most 60 s)
       ▲                                │ the time has passed
       └── the probe starts ── half open: one start may try; if it fails, open again

Invariants. While a breaker is open, a start fails at once with the last real error and the time until the next try.
Only infrastructure failures count. A task's own failure and a cancelled start do not, unless the caller reports by
`failed` that it waited long enough. What a task asks for, or leaves in its image's layer, can make its starts fail: so
the failures of one owner do not stop another's starts. A successful start removes the state; at most `MOST` are held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rollyard.core import Blame, Json, RollyardError
from rollyard.core.failure import SandboxStartFailed

log = logging.getLogger("rollyard.sandbox")

FAILURES = 5
FIRST_S = 5.0
LONGEST_S = 60.0
MOST = 1024
"""Failing combinations that are held; beyond it, the one that failed longest ago is dropped."""


_Key = tuple[str, str, str]  # runtime, image ("" for none), owner


@dataclass(slots=True)
class _Circuit:
    failures: int = 0  # in a row
    last_error: str = ""
    open_s: float = 0.0  # how long it was last opened for; 0: never opened
    until: float = 0.0
    is_probing: bool = False


class Breakers:
    """All circuit breakers of a service."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._circuits: OrderedDict[_Key, _Circuit] = OrderedDict()

    @contextmanager
    def guard(self, runtime: str, image: str | None, owner: str = "") -> Generator[None, None, None]:
        """Wraps one start. Raises SandboxStartFailed at once while the breaker is open."""
        key = (runtime, image or "", owner)
        is_probe = self._admit(key)
        try:
            yield
        except RollyardError as error:
            if error.blame is Blame.INFRA:
                self._failed(key, error.detail)
            raise
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failed(key, f"{type(error).__name__}: {error}")
            raise
        else:
            self._circuits.pop(key, None)
        finally:
            if is_probe and key in self._circuits:
                self._circuits[key].is_probing = False

    def failed(self, runtime: str, image: str | None, detail: str, owner: str = "") -> None:
        """Counts a start that its caller gave up after waiting long enough."""
        self._failed((runtime, image or "", owner), detail)

    def open_by_runtime(self) -> dict[str, int]:
        """For how many images (or none) a breaker is not closed, for each runtime that has any."""
        return Counter(runtime for runtime, _ in {key[:2] for key, circuit in self._circuits.items() if circuit.open_s})

    def status(self, runtime: str, owner: str | None = None) -> list[Mapping[str, Json]]:
        """The failing images of a runtime, for display: those of one owner and of no owner, or those of all. Of several
        owners with one image, that with the longest wait."""
        circuits: dict[str, _Circuit] = {}
        for (name, image, whose), circuit in self._circuits.items():
            if owner is not None and whose not in ("", owner):
                continue
            if name == runtime and (image not in circuits or circuit.until > circuits[image].until):
                circuits[image] = circuit
        return [
            {
                "image": image or None,
                "state": self._state(circuit),
                "failures": circuit.failures,
                "retry_after_s": round(max(0.0, circuit.until - self._now()), 3),
                "last_error": circuit.last_error,
            }
            for image, circuit in circuits.items()
        ]

    def _state(self, circuit: _Circuit) -> str:
        if not circuit.open_s:
            return "closed"
        return "open" if self._now() < circuit.until else "half_open"

    def _admit(self, key: _Key) -> bool:
        """Returns whether this start is the probe. Raises if no start is allowed now."""
        circuit = self._circuits.get(key)
        if circuit is None or not circuit.open_s:
            return False
        wait_s = circuit.until - self._now()
        if wait_s <= 0 and not circuit.is_probing:
            circuit.is_probing = True
            return True
        what = f"runtime {key[0]}" + (f" with image {key[1]}" if key[1] else "")
        raise SandboxStartFailed(
            f"{what} failed to start {circuit.failures} times in a row and is not tried for"
            f" {max(0.0, wait_s):.1f} s; the last error: {circuit.last_error}",
            step="breaker",
            retry_after_s=max(FIRST_S / 5, wait_s),
        )

    def _failed(self, key: _Key, detail: str) -> None:
        circuit = self._circuits.setdefault(key, _Circuit())
        self._circuits.move_to_end(key)
        circuit.failures += 1
        circuit.last_error = detail
        if circuit.failures >= FAILURES and self._now() >= circuit.until:
            circuit.open_s = min(LONGEST_S, 2 * circuit.open_s) if circuit.open_s else FIRST_S
            circuit.until = self._now() + circuit.open_s
            log.error(
                "starts keep failing; the breaker is open",
                extra={"runtime": key[0], "image": key[1], "open_s": circuit.open_s, "error": detail},
            )
        if len(self._circuits) > MOST:
            self._circuits.popitem(last=False)
