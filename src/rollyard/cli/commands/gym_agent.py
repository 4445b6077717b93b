"""`rollyard gym-agent`: an agent server for NeMo Gym that runs its rows on a Rollyard service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from rollyard.cli._console import CommandError, Token, Url, connect, note
from rollyard.cli._tasks import read_defaults
from rollyard.core.texts import cannot_listen

if TYPE_CHECKING:
    import socket

RETRY_S = 300.0
"""How long to wait for a service that restarts, so that rows in progress are not lost."""

BACKLOG = 2048  # a trainer sends a batch of rows at once


def gym_agent(
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 8130,
    host: Annotated[str, typer.Option(help="Address to listen on. The agent requires no token.")] = "127.0.0.1",
    server: Annotated[
        str | None,
        typer.Option(help="Resources server of rows that name no task: its name in the service's gym_servers."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Run of its rollouts; created if missing. [default: a new one at each start]")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy of the run, if it is created here.")] = None,
    defaults: Annotated[
        str | None, typer.Option(help="Defaults of the run's tasks, a partial task as JSON, if it is created here.")
    ] = None,
    failures: Annotated[
        str, typer.Option(help="How to report infrastructure failures: row (with _ng_failure_class) or status (503).")
    ] = "row",
    url: Url = None,
    token: Token = None,
) -> None:
    """Serve rollouts to NeMo Gym and NeMo RL: POST /run runs a row of a dataset and returns tokens and reward."""
    if failures not in ("row", "status"):
        raise CommandError(f"--failures {failures}: expected row or status", status=2)
    partial = read_defaults(defaults)

    import uvicorn

    from rollyard.core import new_id
    from rollyard.trainers.nemo_gym import GymAgent, create_app

    agent = GymAgent(
        connect(url, token, retry_s=RETRY_S),
        run=run or new_id("gym"),
        server=server or "",
        policy=policy,
        defaults=partial or None,
        failures=cast("Literal['row', 'status']", failures),
    )
    listener = _bind(host, port)
    note(f"rollyard gym-agent at http://{host}:{listener.getsockname()[1]}, run {agent.run}")
    serving = uvicorn.Server(uvicorn.Config(create_app(agent), log_level="warning", lifespan="on"))
    serving.run(sockets=[listener])
    if not serving.started:
        raise CommandError(
            "the agent could not be started: see above", "check that the service is up: rollyard rollouts list"
        )


def _bind(host: str, port: int) -> socket.socket:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # before the address is printed: early calls wait until the service is connected
    except OSError as error:
        listener.close()
        raise CommandError(*cannot_listen(host, port, error)) from error
    return listener
