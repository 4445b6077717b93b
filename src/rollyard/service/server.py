"""The server: one process, uvloop, Rollyard's own HTTP server; signals stop it in an orderly way.

On the first SIGTERM or SIGINT, /readyz returns 503, submits are refused, rollouts that have not started RUN are queued
again, and RUN and EVAL get `drain_s`. On the second signal, those are queued again too, at once; their sandboxes are
still verified to be gone. Where a batch system sends SIGTERM to every process of a job, sandboxes included, one SIGTERM
counts as both (`on_term`): what an agent's commands do after it is not the agent's doing. Then waiting calls return the
current state, and everything closes in reverse order. A kill -9 loses nothing either; the next start cleans up.

Invariant: the port is bound before anything is opened (a port in use costs nothing), and the server responds only after
the work of an earlier process has been recovered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from rollyard.agents.registry import Agents
from rollyard.core.address import split_pin, with_pin
from rollyard.core.files import replacing
from rollyard.core.texts import cannot_listen
from rollyard.core.version import __version__
from rollyard.envs.registry import Environments
from rollyard.fleet.ray_host import RayHost, RayUnavailable
from rollyard.http import HttpServer, ListenerBounds, Refusals
from rollyard.observe import TracingUnavailable, logs
from rollyard.service.app import create_app
from rollyard.service.app_state import AppState
from rollyard.service.build import open_app
from rollyard.service.machine import open_data_dir
from rollyard.service.security.logins import CODE_S
from rollyard.service.security.tls import Tls, open_tls
from rollyard.service.security.tokens import node_token
from rollyard.service.settings import Settings, SettingsError
from rollyard.service.unserved import unserved_policies
from rollyard.store.base import StoreLocked, StoreUnusable

log = logging.getLogger("rollyard.service")

GC_THRESHOLDS = (20_000, 20, 50)
"""Thresholds of the garbage collector. Python's defaults (700, 10, 10) traverse all live objects again and again, which
is expensive with a thousand rollouts in flight."""

BACKLOG = 2048  # a trainer may open a thousand connections at once
LINGER_S = 5.0  # for replies in flight when the server closes
TURNED_AWAY = 64  # connections beyond `max_connections` that get a 503 at a time
BODY_BYTES_PER_S = 1024.0  # the lowest rate of a body after `http_body_s`


@dataclass(frozen=True, slots=True)
class Served:
    """A running service."""

    url: str
    app_state: AppState
    http: HttpServer


@asynccontextmanager
async def serve(
    settings: Settings, *, environments: Environments | None = None, agents: Agents | None = None
) -> AsyncGenerator[Served, None]:
    """Serves on a port in the running loop. Leaving the block stops the service at once, cleanly; `drain` it first to
    let work finish."""
    with bind(settings) as listener:
        open_data_dir(settings.data_dir)
        tls = open_tls(settings)
        async with open_app(settings, environments=environments, agents=agents) as app_state:
            refusals = Refusals(app_state.pipeline.metrics.http_refused)
            server = HttpServer(create_app(app_state), bounds_of(settings), refusals=refusals)
            url = url_of(listener, tls)
            await server.start(listener, backlog=BACKLOG, tls=tls.context if tls is not None else None)
            try:
                async with AsyncExitStack() as stack:
                    stack.enter_context(_announced(settings.data_dir / "url", _local_url(url, tls)))
                    if settings.fleet == "ray":
                        app_state.ray = await stack.enter_async_context(_ray(settings, url))
                    yield Served(url, app_state, server)
            finally:
                app_state.pipeline.stop_now()
                app_state.closing.set()
                await server.drain(LINGER_S)


def bounds_of(settings: Settings) -> ListenerBounds:
    """Bounds on connections to the port. Half of the process's open files are kept for sandboxes and engines."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = settings.max_connections
    return ListenerBounds(
        connections=connections if files == resource.RLIM_INFINITY else max(1, min(connections, files // 2)),
        connections_per_address=settings.max_connections_per_address,
        turned_away=TURNED_AWAY,
        header_bytes=settings.max_header_bytes,
        headers=settings.max_headers,
        header_s=settings.http_header_s,
        idle_s=settings.http_idle_s,
        body_s=settings.http_body_s,  # the app bounds the size, because nodes may send larger bodies
        body_bytes_per_s=BODY_BYTES_PER_S,
        unread_s=settings.http_unread_s,
    )


def _ray(settings: Settings, url: str) -> RayHost:
    """Runs a node on every machine of the Ray cluster. Sizes depend on the machine, unless the operator set them."""
    sizes = ("init_slots", "run_slots", "eval_slots", "ready_slots")
    node_settings = {name: getattr(settings, name) for name in sizes if name in settings.model_fields_set}
    token = node_token(settings)
    return RayHost(settings.ray_address or None, settings.head_url or url, token, node_settings=node_settings)


def bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # IPPROTO_TCP explicitly: asyncio disables Nagle's algorithm only for such sockets, and with it a response in two
    # writes waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(*cannot_listen(settings.host, settings.port, error)) from error
    return listener


def url_of(listener: socket.socket, tls: Tls | None = None) -> str:
    """The URL of the service. With `tls = own` it contains the certificate's digest, so that clients can verify it."""
    address, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, str(address))
    url = f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return with_pin(url, tls.digest) if tls is not None and tls.is_self_signed else url


def _local_url(url: str, tls: Tls | None) -> str:
    """The URL for commands on this machine. An operator's certificate need not name the address, so they verify its
    digest."""
    return with_pin(url, tls.digest) if tls is not None and not tls.is_self_signed else url


@contextlib.contextmanager
def _announced(path: Path, url: str) -> Generator[None, None, None]:
    """Writes the URL to a file below data_dir, where the CLI finds it, and removes the file at the end."""
    with replacing(path) as file:
        file.write(f"{url}\n".encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def run_server(settings: Settings) -> int:
    """Serves until a signal arrives. Returns the exit status; errors are printed on stderr."""
    logs.configure(level=settings.log_level.upper(), style=settings.log_format)
    for name in ("httpx2", "mcp"):  # Rollyard logs the same at INFO, without URLs
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(settings))
    except (SettingsError, StoreLocked, StoreUnusable, TracingUnavailable, RayUnavailable) as error:
        _print_line(f"rollyard: {error}")
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        what = f"data_dir {settings.data_dir} cannot be written: {error.strerror}"
        _print_line(f"rollyard: {what} — free some space there, or give another folder with --data-dir")
        return 1


async def _main(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    signals = _Signals(on_first=main.cancel)  # during start: what is open already is closed again
    signals.is_term_final = settings.on_term == "stop"
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, signals.receive, signum)
    try:
        async with serve(settings) as served:
            signals.on_first = lambda: None
            signals.on_second = served.app_state.pipeline.stop_now  # it may arrive right after the first
            settle_memory()
            token = "" if settings.admin_tokens else f", token in {settings.token_path}"
            _print_line(f"rollyard {__version__} at {served.url}{token}")
            if settings.is_loopback and settings.log_format == "console" and sys.stderr.isatty():
                _print_line(f"dashboard: {dashboard_link(served)} (works once, for {CODE_S / 60:.0f} minutes)")
            for reason in unserved_policies(served.app_state.pipeline, served.app_state.refused_engines).values():
                log.info(reason)  # programs that add their engines later run at "warning"
            await _first_of(signals.first, served.app_state.pipeline.broke)
            if served.app_state.pipeline.broken is not None:
                raise _with_remedy(served.app_state.pipeline.broken, settings)
            log.info("draining", extra={"within_s": settings.drain_s})
            await served.app_state.pipeline.drain()
    except asyncio.CancelledError:
        if not signals.first.is_set():
            raise
    return 0


def dashboard_link(served: Served) -> str:
    """A link that signs in to the dashboard as an admin, once. It is printed on terminals only: files of logs may have
    other readers."""
    admin = next(caller for caller in served.app_state.tokens.callers if caller.is_admin)
    return f"{split_pin(served.url)[0]}/#code={served.app_state.logins.new_code(admin)}"


def _with_remedy(broken: StoreUnusable, settings: Settings) -> StoreUnusable:
    """The error of a store that failed while the service ran, with what to do."""
    is_full = "full" in str(broken) and isinstance(settings.store_place, Path)
    first = f"free some space on the disk of {settings.store_place}" if is_full else "check its disk or its server"
    return StoreUnusable(f"{broken} — {first}, then start the service again: it continues with what it acknowledged")


def settle_memory() -> None:
    """Excludes everything loaded so far from garbage collection, and makes collections less frequent."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class _Signals:
    """Counts signals and runs the callback of the first and of the second."""

    def __init__(self, on_first: Callable[[], object]) -> None:
        self.first = asyncio.Event()
        self.on_first = on_first
        self.on_second: Callable[[], object] = lambda: None
        self.is_term_final = False  # a SIGTERM counts as the second one, too

    def receive(self, signum: int) -> None:
        log.info("signal", extra={"signal": signal.Signals(signum).name})
        is_first = not self.first.is_set()
        self.first.set()
        if is_first:
            self.on_first()
        if not is_first or (self.is_term_final and signum == signal.SIGTERM):
            self.on_second()


def _print_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
