"""`rollyard node`: runs one node of a fleet in this process, until SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._console import CommandError, note
from rollyard.cli._quick_imports import quick_imports


def node(
    head: Annotated[
        str | None, typer.Option("--head", metavar="URL", help="URL of the head; else $ROLLYARD_URL.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the node's token; else $ROLLYARD_TOKEN.", dir_okay=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the node; else this machine's host name.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder for its sandboxes, layers and images.")] = None,
    init_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in INIT at once.")] = None,
    run_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in RUN at once.")] = None,
    eval_slots: Annotated[int | None, typer.Option(min=1, help="Rollouts in EVAL at once.")] = None,
    ready_slots: Annotated[int | None, typer.Option(min=0, help="Rollouts that may wait in READY for RUN.")] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Connect to a head beyond loopback without TLS, on a trusted network.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
) -> None:
    """Run rollouts that a head (`rollyard serve --fleet nodes`) leases to this machine.

    The head decides how rollouts run: runtimes, limits, and sizes unless given here. The token is in the file
    node-token in the head's data folder. A head with a certificate of its own prints its URL with the certificate's
    digest, https://HOST:PORT#sha256:…; a node with that URL connects to no other head. SIGTERM drains the node:
    rollouts that have not started are returned to the head, the others finish first. A second SIGTERM returns all of
    them. With Ray this command is not needed: `rollyard serve --fleet ray` starts the nodes itself.
    """
    url = head or os.environ.get("ROLLYARD_URL")
    if not url:
        raise CommandError("no head was given", "give --head https://HOST:PORT", 2)
    token = _token(token_file)
    if log_level not in ("debug", "info", "warning", "error") or log_format not in ("console", "json"):
        raise CommandError(
            "--log-level must be debug, info, warning or error, and --log-format console or json", status=2
        )

    import asyncio

    with quick_imports():
        import uvloop

        from rollyard.core.paths import data_home
        from rollyard.fleet.head_connection import NodeRefused
        from rollyard.observe import logs
        from rollyard.service.node import NodeOptions, run_node
        from rollyard.service.settings import SettingsError

    logs.configure(level=log_level.upper(), style=log_format)
    called = name or socket.gethostname()
    folder = data_dir or data_home(os.environ).with_name("rollyard-node") / called
    options = NodeOptions(
        called, url, token, folder, init_slots, run_slots, eval_slots, ready_slots, plain_http=plain_http
    )

    async def main() -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        await run_node(options, stop, on_joined=lambda: note(f"node {called} has joined {url}"), hurry=hurry)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except NodeRefused as error:
        raise CommandError(
            f"the head refused this node: {error}", "check the token, the name and the version"
        ) from error
    except SettingsError as error:
        raise CommandError(str(error)) from error


def _token(file: Path | None) -> str:
    if file is None:
        if not os.environ.get("ROLLYARD_TOKEN"):
            raise CommandError("a node needs a token", "--token-file FILE: node-token in the service's data folder", 2)
        return os.environ["ROLLYARD_TOKEN"]
    try:
        words = file.read_text().split()
    except OSError as error:
        raise CommandError(f"the token file {file} cannot be read: {error.strerror}") from error
    if not words:
        raise CommandError(f"the token file {file} is empty")
    return words[0]
