"""A node as Ray runs it: an actor, which is a process on one Ray node, with the node's event loop in its own thread.

The actor starts nothing by itself. It waits until a head calls it (`meet`), because its arguments may be outdated: Ray
restarts an actor with its first arguments, and the head that gave those may be gone. Each head has an id; the actor
obeys the newest one, and its answer informs a head that was superseded.

Invariants. One node in one actor. A node that ends without a request to do so ends its process, too, so that Ray starts
a new one, at most one in RESTART_EVERY_S. This module never imports Ray: it is a plain class until a driver makes an
actor of it (`ray_driver.py`).

What Ray does to an actor's process that a node must undo (tested with 2.60): its threads have SIGINT blocked, which
every program that they start inherits; its oom_score_adj is 1000, so the kernel would kill the node, which holds
hundreds of rollouts, before any sandbox.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from rollyard.core import Json
from rollyard.core.exception_groups import first_error
from rollyard.core.locks import FileLock
from rollyard.observe import logs

log = logging.getLogger("rollyard.fleet")

RESTART_EVERY_S = 10.0
"""A node that cannot run (a package is missing, the token is wrong) costs one start of a process in this time."""

RUN_PER_CPU, INIT_PER_CPU, EVAL_PER_CPU = 32, 2, 4
"""RUN waits for engines most of the time; INIT and EVAL compute."""

RUN_BYTES = 256 << 20
"""Memory for a rollout in RUN, including its sandbox, if no number of slots is set."""

SLOTS = ("init_slots", "run_slots", "eval_slots", "ready_slots")


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """A head's address and token. `id` identifies one start of it."""

    id: str
    url: str
    token: str


@dataclass(frozen=True, slots=True)
class NodeState:
    """An actor's status, as returned to its head."""

    pid: int
    is_running: bool
    error: str
    is_ours: bool  # whether the calling head is the newest one


def sizes(
    settings: Mapping[str, Json], environ: Mapping[str, str], *, cpus: float, memory_bytes: float
) -> dict[str, int]:
    """Returns a node's slots: from its machine's environment (ROLLYARD_RUN_SLOTS …), else from the head's settings,
    else from what the Ray node offers."""
    by_memory = max(1, int(memory_bytes // RUN_BYTES)) if memory_bytes else sys.maxsize
    init = max(1, int(INIT_PER_CPU * cpus))
    slots: dict[str, int] = {
        "init_slots": init,
        "run_slots": min(max(1, int(RUN_PER_CPU * cpus)), by_memory),
        "eval_slots": max(1, int(EVAL_PER_CPU * cpus)),
        "ready_slots": init,
    }
    for name in SLOTS:
        variable = f"ROLLYARD_{name.upper()}"
        value = environ.get(variable) or settings.get(name)
        if value is None:
            continue
        least = 0 if name == "ready_slots" else 1
        try:
            slots[name] = int(str(value))
        except ValueError:
            raise ValueError(f"{variable} must be a number, not {value!r}") from None
        if slots[name] < least:
            raise ValueError(f"{variable} must be at least {least}, not {value}")
    return slots


def claim_folder(base: Path) -> tuple[Path, FileLock]:
    """Returns a folder that no other node of this machine uses, and its lock.

    Ray's ids change with every start of Ray; these folders do not, so fetched files are found again.
    """
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    host = socket.gethostname()  # all machines may share a home on a network file system
    for number in range(1000):
        lock = FileLock(base / f"{host}-{number}.lock")
        if not lock.try_acquire():
            lock.close()
            continue
        folder = base / f"{host}-{number}"
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder, lock
    raise OSError(f"all folders below {base} are taken")


def node_home(settings: Mapping[str, Json], environ: Mapping[str, str]) -> Path:
    """Returns the folder below which the nodes of a machine have their folders."""
    data_dir = environ.get("ROLLYARD_DATA_DIR") or settings.get("data_dir")
    if data_dir:
        return Path(str(data_dir)).expanduser() / "nodes"
    share = environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(share).expanduser() / "rollyard" / "nodes"


class NodeActor:
    """The actor's class. Ray calls its methods concurrently, in threads of its own."""

    def __init__(self, name: str, entry: str, settings: Mapping[str, Json], cpus: float, memory_bytes: float) -> None:
        self._name = name
        self._entry = entry
        self._settings = settings
        self._cpus = cpus
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._head: HeadAddress | None = None
        self._past: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_stopping = False
        self._error = ""

    def meet(self, head_id: str, url: str, token: str) -> NodeState:
        """Receives a head's address and returns this node's status."""
        with self._lock:
            is_newest_head = head_id not in self._past
            if is_newest_head:
                if self._head is not None and self._head.id != head_id:
                    self._past.add(self._head.id)
                self._head = HeadAddress(head_id, url, token)
                if self._thread is None and not self._is_stopping:
                    self._thread = threading.Thread(target=self._live, name="rollyard-node", daemon=True)
                    self._thread.start()
            is_running = self._stop is not None and not self._error
            return NodeState(os.getpid(), is_running, self._error, is_newest_head)

    def stop(self, bound_s: float) -> bool:
        """Requests the node to end what it has, and waits for it. Returns whether it did."""
        with self._lock:
            self._is_stopping = True
            thread, running = self._thread, self._stop
        if running is not None:
            loop, stop = running
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join(bound_s)
        return thread is None or not thread.is_alive()

    def _live(self) -> None:
        started_at_s = time.monotonic()
        try:
            _be_an_ordinary_process()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
            error = "the node ended by itself"
        except BaseException as caught:
            log.exception("node crashed", extra={"node": self._name})
            error = _one_line(caught)
        with self._lock:
            self._stop = None
            if self._is_stopping:
                return
            self._error = error
        # Meanwhile `meet` returns the error to the head.
        time.sleep(max(0.0, started_at_s + RESTART_EVERY_S - time.monotonic()))
        os._exit(1)  # sys.exit would only end this thread, and Ray does not restart an actor that exits normally

    async def _run(self) -> None:
        module_name, _, function = self._entry.partition(":")
        module: Any = importlib.import_module(module_name)
        slots = sizes(self._settings, os.environ, cpus=self._cpus, memory_bytes=self._memory_bytes)
        others = {name: value for name, value in self._settings.items() if name not in (*SLOTS, "data_dir")}
        folder, lock = claim_folder(node_home(self._settings, os.environ))
        with lock:
            url, token = self._where()
            options = module.NodeOptions(
                name=self._name,
                head_url=url,
                token=token,
                data_dir=folder,
                head=self._where,
                plain_http=True,  # the head's settings decide this; the URL comes from it
                **slots,
                **others,
            )
            stop = asyncio.Event()
            with self._lock:
                self._stop = (asyncio.get_running_loop(), stop)
                if self._is_stopping:
                    stop.set()
            await getattr(module, function)(options, stop)

    def _where(self) -> tuple[str, str]:
        """The newest head's URL and token."""
        with self._lock:
            assert self._head is not None  # `meet` sets it before it starts this thread
            return self._head.url, self._head.token


def _one_line(error: BaseException) -> str:
    """Returns an error in one line. Of a task group's error, it describes the first exception inside."""
    error = first_error(error)
    return f"{type(error).__name__}: {error}"[:500]


def _be_an_ordinary_process() -> None:
    """Undoes what Ray does to this process and thread, as listed in the module's docstring."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        Path("/proc/self/oom_score_adj").write_text("0")
    except OSError as error:
        log.warning("the kernel will kill this node first when memory runs out", extra={"error": str(error)})
    level = os.environ.get("ROLLYARD_LOG_LEVEL", "info").upper()
    logs.configure(level=level, style="json")  # written to the worker's file in Ray's session folder
