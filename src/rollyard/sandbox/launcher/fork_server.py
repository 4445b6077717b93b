"""The service's client of the launcher process: starts it, sends requests, and starts it again if it ends.

Invariant: the launcher holds nothing that a running sandbox needs. If it ends, only starts in progress fail, and the
runtime retries those once.
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

_ENV_PASSED = ("LD_LIBRARY_PATH",)  # some Pythons need it to start; it does not reach a sandbox


class ForkServerClient:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: MessageSocket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def post(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a message to the running launcher, or to a new one."""
        if self._wire is None:
            self._open()
        assert self._wire is not None
        self._wire.post(message, fds)

    def _open(self) -> None:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            argv = [sys.executable, "-I", "-S", program.__file__, str(child_end.fileno()), self._kind]
            # Without preexec_fn and cwd, Popen uses vfork, which does not copy the service's page tables.
            self._process = subprocess.Popen(
                argv,
                pass_fds=(child_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={key: os.environ[key] for key in _ENV_PASSED if key in os.environ},
                start_new_session=True,
            )
        self._wire = MessageSocket(own_end, self._on_message)

    def _on_message(self, message: Message | None, fds: list[int]) -> None:
        if message is None and self._process is not None:  # it ended; the next `post` starts another
            log.warning("the launcher ended; the next request starts a new one", extra={"kind": self._kind})
            self._wire = None
            process, self._process = self._process, None
            process.kill()
            process.wait()

    async def remove(self, paths: Sequence[str], groups: Sequence[str] = ()) -> bool:
        """Deletes folders in a child of the launcher, and cgroups as soon as they are empty. Returns False if part of
        the folders is left."""
        for _ in range(3):
            answer = await self._remove(paths, groups)
            if answer:
                return answer == b"0"
            if self._wire is not None:
                self._wire.drain()  # the launcher ended, perhaps unnoticed so far: the next try starts a new one
        return False

    async def _remove(self, paths: Sequence[str], groups: Sequence[str]) -> bytes:
        """Returns the launcher's answer; empty if it ended."""
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
