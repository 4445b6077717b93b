"""Whether jobs are taken in, in which period, and with which weights: three facts that must outlive the process.

A period is what lies between two `/start`s, that is, one batch of the trainer's. It tells a job that is asked for
again from the same task's job of a later batch, for its trainer sends no job ids. It begins anew with every `/start`,
even one that is refused because the intake is open (its trainer died, and began again), and with `/clear_llm_server`,
with which a trainer's life begins.

Weights: its trainer changes them between `/stop` and `/start` and tells nobody, so every `/start` names a new version
(see `jobs.py`).

Invariant: what was answered is on disk, whole, before the answer. The store's lock keeps a second service from the
file.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rollyard.service.settings import SettingsError

FILE = "prorl.json"  # below data_dir


@dataclass(frozen=True, slots=True)
class Intake:
    is_open: bool = False
    period: int = 0
    version: int = 0  # of weights: the last that was named here

    def next(self, *, is_open: bool) -> Intake:
        return replace(self, is_open=is_open, period=self.period + 1)


class IntakeFile:
    """See the module. `now` is what is on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()
        self.now = self._load()

    async def begin(self) -> bool:
        """Opens it, in a new period. False: it was open before."""
        async with self._lock:
            was_open = self.now.is_open
            await self._keep(self.now.next(is_open=True))
            return not was_open

    async def name_version(self, version: int) -> None:
        """Kept before it is told to anyone: a version that was told is never named again."""
        async with self._lock:
            await self._keep(replace(self.now, version=version))

    async def renew(self) -> None:
        """A new period, open or not."""
        async with self._lock:
            await self._keep(self.now.next(is_open=self.now.is_open))

    async def end(self) -> bool:
        """Shuts it. False: it was shut before."""
        async with self._lock:
            was_open = self.now.is_open
            if was_open:
                await self._keep(replace(self.now, is_open=False))
            return was_open

    async def _keep(self, intake: Intake) -> None:
        await asyncio.to_thread(self._write, intake)
        self.now = intake

    def _write(self, intake: Intake) -> None:
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(intake))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _load(self) -> Intake:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Intake)
        except FileNotFoundError:
            return Intake()
        except (OSError, msgspec.DecodeError) as error:
            raise SettingsError(f"{self._path} cannot be read: {error}; delete it to begin anew") from error
