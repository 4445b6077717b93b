"""The service's handle of the launcher process: starts it, sends it work, starts it again if it dies.

Invariant: the launcher holds nothing that a running sandbox needs. Its death costs only the starts in progress,
which the runtime tries once more.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.sandbox.launcher import program
from rollyard.sandbox.launcher.message_socket import Message, MessageSocket, end_process, readable

log = logging.getLogger("rollyard.sandbox")

_ENV_KEPT = ("LD_LIBRARY_PATH",)  # some Pythons need it to start; no sandbox sees it


class ForkServerClient:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: MessageSocket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def post(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends it to the running launcher, or to a new one."""
        if self._wire is None:
            self._open()
        assert self._wire is not None
        self._wire.post(message, fds)

    def _open(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-I", "-S", program.__file__, str(theirs.fileno()), self._kind]
            # Popen with neither preexec_fn nor cwd takes the vfork path: no copy of the service's page tables.
            self._process = subprocess.Popen(
                argv,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: os.environ[key] for key in _ENV_KEPT if key in os.environ},
                start_new_session=True,
            )
        self._wire = MessageSocket(ours, self._on_message)

    def _on_message(self, message: Message | None, fds: list[int]) -> None:
        if message is None and self._process is not None:  # it died; whoever comes next starts another
            log.warning("the launcher ended; the next start begins a new one", extra={"kind": self._kind})
            self._wire = None
            process, self._process = self._process, None
            process.kill()
            process.wait()

    async def remove(self, paths: Sequence[str], groups: Sequence[str] = ()) -> bool:
        """Deletes folders in a child of the launcher, and empty cgroups as soon as it can. False: something of the
        folders is still there."""
        for _ in range(3):
            answer = await self._remove(paths, groups)
            if answer:
                return answer == b"0"
            if self._wire is not None:
                self._wire.drain()  # it died under it, and we may not have read of it yet: the next one does it
        return False

    async def _remove(self, paths: Sequence[str], groups: Sequence[str]) -> bytes:
        """What it answered; nothing if it died."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        try:
            try:
                self.post({"op": "remove", "paths": list(paths), "groups": list(groups)}, [writer])
            finally:
                os.close(writer)
            await readable(reader)
            return os.read(reader, 1)
        finally:
            os.close(reader)

    async def close(self, bound_s: float = 5.0) -> None:
        process, self._process = self._process, None
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        if process is not None:
            await end_process(process, bound_s)
