"""Changes a policy's weights while rollouts are in flight. Created by `AsyncClient.policy`.

    async with client.policy("actor").update(version=4):
        push_weights()                        # the engines are paused; deadlines do not run

Invariants. A block that ends without an error resumes with its version. One that raises does not resume: the weights
are unknown then, so the engines stay paused, and the error contains how to continue. While the block runs, its lease is
renewed; if this process dies, the service keeps the policy paused until another client pauses it or a resume sets a
version. A body that blocks the event loop for longer than `lease_s` belongs in a thread. `Policy` and `Update` are the
same without `await`.

Each client has its own name as the holder of a pause. Another client cannot end that pause before its lease expires,
even with the same token. If the policy gets a version that a client did not set, the client's next pause or resume
raises `PolicyConflict`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import quote

from rollyard.client._bodies import without_none
from rollyard.client._transport import Transport
from rollyard.client._waiting import POLL_S
from rollyard.client.records import JsonObject, read_object
from rollyard.core import RollyardError, new_id
from rollyard.core.failure import PolicyConflict, PolicyPinned, RequestError

log = logging.getLogger("rollyard.client")

LEASE_S = 600.0  # of a pause that is not renewed
UPDATE_LEASE_S = 60.0
"""Of a pause that is renewed. If a trainer is killed, others wait at most this long."""
OUTLAST_S = 2 * UPDATE_LEASE_S
CHECK_EVERY_S = 1.0  # interval at which the expiry of another's lease is checked
RESUME_S = 300.0  # for the steps of all engines, in parallel; the service bounds each of them


@dataclass(slots=True)
class Holder:
    """The client's name in a pause, and the versions that it set last, by policy."""

    id: str = field(default_factory=lambda: new_id("client"))
    named: dict[str, int] = field(default_factory=dict[str, int])


class AsyncPolicy:
    """A handle of a policy, without state of its own."""

    name: str

    def __init__(self, wire: Transport, name: str, holder: Holder) -> None:
        self._wire = wire
        self._path = f"/policies/{quote(name, safe=':')}"
        self._holder = holder
        self.name = name

    async def status(self) -> JsonObject:
        """Its version, state, holder and lease, and its engines."""
        return read_object(await self._wire.json("GET", self._path))

    async def pause(
        self,
        *,
        mode: str = "abort",
        lease_s: float = LEASE_S,
        engines: Sequence[str] | None = None,
        timeout_s: float | None = None,
        outlast_s: float = 0.0,
    ) -> JsonObject:
        """Pauses the engines and returns when they are paused. `mode`: abort, drain or keep calls in flight.

        Raises PolicyConflict while another holder has it paused, unless that lease expires within `outlast_s`, as it
        does if a trainer died. After `timeout_s`, raises TimeoutError, and the pausing continues; or PolicyPinned, with
        nothing paused, if an evaluation still needs the current weights."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        outlasted_at = time.monotonic() + outlast_s
        ids = None if engines is None else [*engines]
        while True:
            poll_s = POLL_S if give_up is None else min(POLL_S, max(0.0, give_up - time.monotonic()))
            after = self._holder.named.get(self.name)
            body = without_none(mode=mode, lease_s=lease_s, engines=ids, wait_s=poll_s, after=after)
            try:
                status = await self._post("pause", body, poll_s)
            except PolicyPinned:
                if give_up is not None and time.monotonic() >= give_up:
                    raise
                continue
            except PolicyConflict as conflict:
                await self._wait_for_expiry(conflict, outlasted_at)
                continue
            if status.get("state") != "pausing":
                return status
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"policy {self.name} is still pausing after {timeout_s:g} s")

    async def _wait_for_expiry(self, conflict: PolicyConflict, until: float) -> None:
        """Waits until the holder's lease has expired. Raises the conflict if the holder is alive: it renews the lease,
        or resumes."""
        holder = conflict.data.get("holder")
        while holder is not None and time.monotonic() < until:
            await asyncio.sleep(CHECK_EVERY_S)
            status = await self.status()
            if status.get("holder") != holder:
                break
            if status.get("state") == "abandoned":
                return
        raise conflict

    async def resume(
        self,
        version: int,
        *,
        engines: Sequence[str] | None = None,
        after: int | None = None,
        take_over: bool = False,
    ) -> JsonObject:
        """Resumes the engines with weights of this version. Raises PolicyStuck if no engine can resume. Raises
        PolicyConflict while another holder has it paused, unless `take_over` is set, or if the policy's version has
        changed since `after`."""
        self._holder.named.pop(self.name, None)  # unknown until the response arrives
        ids = None if engines is None else [*engines]
        body = without_none(version=version, engines=ids, after=after, take_over=take_over or None)
        status = await self._post("resume", body, RESUME_S)
        self._holder.named[self.name] = version
        return status

    async def renew(self, lease_s: float = LEASE_S) -> JsonObject:
        """Extends the lease of the pause, from now; possible even after it has expired."""
        return await self._post("renew", {"lease_s": lease_s})

    def update(
        self,
        version: int,
        *,
        mode: str = "abort",
        lease_s: float = UPDATE_LEASE_S,
        engines: Sequence[str] | None = None,
        timeout_s: float | None = None,
        outlast_s: float = OUTLAST_S,
    ) -> AsyncUpdate:
        """A context manager that pauses for the block and resumes with the version at its end."""
        return AsyncUpdate(self, version, mode, lease_s, engines, timeout_s, outlast_s)

    async def _post(self, verb: str, body: dict[str, object], wait_s: float = 0.0) -> JsonObject:
        path, body = f"{self._path}/{verb}", {**body, "holder": self._holder.id}
        return read_object(await self._wire.json("POST", path, body=body, wait_s=wait_s, is_repeatable=True))


class AsyncUpdate:
    """One change of weights, as an asynchronous context manager."""

    version: int

    def __init__(
        self,
        policy: AsyncPolicy,
        version: int,
        mode: str,
        lease_s: float,
        engines: Sequence[str] | None,
        timeout_s: float | None,
        outlast_s: float,
    ) -> None:
        self._policy = policy
        self._mode = mode
        self._lease_s = lease_s
        self._engines = engines
        self._timeout_s = timeout_s
        self._outlast_s = outlast_s
        self._before: int | None = None  # the version at the pause
        self._renewing: asyncio.Task[None] | None = None
        self.version = version

    async def __aenter__(self) -> JsonObject:
        """Pauses the policy and returns its status, with the engines to write to."""
        try:
            status = await self._policy.pause(
                mode=self._mode,
                lease_s=self._lease_s,
                engines=self._engines,
                timeout_s=self._timeout_s,
                outlast_s=self._outlast_s,
            )
        except RequestError:
            raise  # refused: nothing was paused
        except BaseException as error:
            self._report_failure(error)
            raise
        self._before = int(status["version"])
        self._renewing = asyncio.create_task(self._renew(), name=f"renew {self._policy.name}")
        return status

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        if error is not None:
            self._report_failure(error)
            return
        await self._policy.resume(self.version, engines=self._engines, after=self._before)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            try:
                await self._policy.renew(self._lease_s)
            except RollyardError as failure:  # the resume at the end also works without a lease
                log.warning("a lease could not be renewed", extra={"policy": self._policy.name, "code": failure.code})

    def _report_failure(self, error: BaseException) -> None:
        name = self._policy.name
        how = (
            f"policy {name!r} stays paused, because its weights are unknown now: write them, then resume with their "
            f"version (policy({name!r}).resume(VERSION), or rollyard policies resume {name} VERSION)"
        )
        error.add_note(how)
        log.error("a change of weights failed: the policy stays paused", extra={"policy": name})
