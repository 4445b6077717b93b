"""`rollyard nodes`: lists the nodes of a fleet, and drains them without losing a rollout."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    CommandError,
    Token,
    Url,
    connect,
    note,
    number,
    plain,
    print_lines,
    seconds,
    show,
    table,
)
from rollyard.cli._console import run as go

nodes = typer.Typer(help="The machines of a fleet: list, drain, resume.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `rollyard nodes list` shows it.")]

POLL_S = 0.5


NODES_GIVE_WAY = ("engines", "host", "node")
NODES_OPTIONAL = ("wants", "ready", "host", "ended", "init", "eval")


@nodes.command("list", epilog="Example: rollyard nodes list --json")
def list_nodes(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the nodes: state, pools, and the time since their last report."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.nodes()

    rows = go(work())
    if as_json:
        print_lines(rows)
    elif rows:
        show(nodes_table(rows), *NODES_GIVE_WAY, optional=NODES_OPTIONAL)
    else:
        note("no node has joined yet; start one: rollyard node --head URL, or a Ray cluster with nodes")


@nodes.command("drain", epilog="Example: rollyard nodes drain gpu-07 && ssh gpu-07 sudo reboot")
def drain(
    name: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name, as `rollyard nodes list` shows it.")
    ] = None,
    all_nodes: Annotated[
        bool, typer.Option("--all", help="Drain all nodes, before the whole fleet is stopped.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until their rollouts have ended.")] = True,
    timeout_s: Annotated[
        float | None, typer.Option(help="Stop waiting after so many seconds; the drain continues.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Drain a node: it takes no more rollouts. Those not yet started go to other nodes; the others finish."""
    if (name is None) is not all_nodes:
        raise CommandError("either a node or --all is required", "see `rollyard nodes list`", 2)

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            names = {node["name"] for node in await client.nodes()} if name is None else {name}
            drained = {one: await client.drain_node(one) for one in sorted(names)}
            try:
                async with asyncio.timeout(timeout_s):
                    while wait and any(node["live"] for node in drained.values()):
                        await asyncio.sleep(POLL_S)
                        there = {node["name"]: node for node in await client.nodes()}
                        drained = {one: there.get(one, {**node, "live": 0}) for one, node in drained.items()}
            except TimeoutError:
                live = sum(node["live"] for node in drained.values())
                raise CommandError(f"{live} rollouts are still running there; the drain continues") from None
            return list(drained.values())

    _show(go(work()), as_json)


@nodes.command("resume", epilog="Example: rollyard nodes resume gpu-07")
def resume(name: Name, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Let a drained node take rollouts again. A restarted node does so by itself."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.resume_node(name)

    _show([go(work())], as_json)


def nodes_table(rows: list[dict[str, Any]]) -> Any:
    right = ("live", "wants", "ended")
    stages = ("init", "ready", "run", "eval")
    grid = table("node", "state", "live", "wants", *stages, "ended", "heard", "host", "engines", right=right)
    for node in rows:
        state = str(node.get("state"))
        style = {"up": "green", "drained": "dim"}.get(state, "yellow")
        pools = node.get("pools") or {}
        grid.add_row(
            plain(node.get("name")),
            f"[{style}]{plain(state)}[/]",
            number(node.get("live")),
            number(node.get("wants")),
            *(_pool(pools.get(name) or {}) for name in stages),
            number(node.get("ended")),
            f"{seconds(node.get('heard_s_ago'))} ago",
            plain(node.get("host")),
            _engines(node.get("engines") or {}),
        )
    return grid


def _engines(engines: dict[str, Any]) -> str:
    """The number of engines that the node can use; for the others, their names and errors."""
    lacking = {name: use.get("error") for name, use in engines.items() if not use.get("is_reachable", True)}
    if not lacking:
        return number(len(engines))
    why = "; ".join(f"{name}: {error or 'not tried yet'}" for name, error in lacking.items())
    return f"[red]{number(len(engines) - len(lacking))}/{number(len(engines))}[/] {plain(why)}"


def _pool(pool: dict[str, Any]) -> str:
    return f"{number(pool.get('active'))}/{number(pool.get('size'))}"


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_lines(rows)
    else:
        show(nodes_table(rows), *NODES_GIVE_WAY, optional=NODES_OPTIONAL)
