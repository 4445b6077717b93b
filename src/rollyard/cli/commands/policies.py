"""`rollyard policies`: lists policies, and pauses and resumes them by hand, as a trainer does for a weight update."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    connect,
    note,
    number,
    plain,
    print_json,
    print_lines,
    run,
    seconds,
    show,
    table,
)

policies = typer.Typer(help="The weights in use: list, pause, resume with a version.", no_args_is_help=True)

HOLDER = "cli"  # a pause and its resume are made by two processes

Name = Annotated[str, typer.Argument(metavar="POLICY", help="Its name, as `rollyard policies list` shows it.")]
Engines = Annotated[
    list[str] | None, typer.Option("--engine", metavar="ID", help="Only this engine of the policy; may be repeated.")
]


@policies.command("list", epilog="Example: rollyard policies list")
def list_policies(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the policies: version, state, and the state of each engine."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.policies()

    rows = run(work())
    if as_json:
        print_lines(rows)
    elif rows:
        show(policies_table(rows))
    else:
        note("there is no policy; it is created with its first engine: rollyard engines add URL --policy NAME")


def policies_table(rows: list[dict[str, Any]]) -> Any:
    """Creates a table with one row per engine; the policy's own columns are on its first row."""
    grid = table("policy", "state", "version", "held by", "lease", "engine", "its state", "its version", "problem")
    for policy in rows:
        state = str(policy.get("state"))
        style = {"running": "green", "abandoned": "red"}.get(state, "yellow")
        lease_left_s = policy.get("lease_left_s")
        own = [
            plain(policy.get("name")),
            f"[{style}]{plain(state)}[/]",
            number(policy.get("version")),
            plain(policy.get("holder") or "–"),
            "–" if lease_left_s is None else seconds(lease_left_s),
        ]
        for engine in policy.get("engines") or [{}]:
            paused = " (paused)" if engine.get("paused") else ""
            grid.add_row(
                *own,
                plain(engine.get("id") or "–"),
                plain(engine.get("state") or "–") + paused,
                number(engine.get("version")),
                plain(engine.get("error") or ""),
            )
            own = ["", "", "", "", ""]
    return grid


@policies.command("pause", epilog="Example: rollyard policies pause actor --mode drain --lease-s 3600")
def pause(
    name: Name,
    mode: Annotated[
        str,
        typer.Option(
            help="What happens to calls in flight. abort: they keep their tokens and continue after the resume; "
            "drain: they finish first; keep: the engine freezes them."
        ),
    ] = "abort",
    lease_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds until the pause counts as abandoned. It is not resumed then.")
    ] = 600.0,
    engine: Engines = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Stop waiting after so many seconds; the pause continues.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Pause a policy's engines, so that their weights can be written. All deadlines stop until the resume."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            policy = client.policy(name, holder=HOLDER)
            return await policy.pause(mode=mode, lease_s=lease_s, engines=engine, timeout_s=timeout_s)

    _show(run(work()), as_json)


@policies.command("resume", epilog="Example: rollyard policies resume actor 7")
def resume(
    name: Name,
    version: Annotated[
        int, typer.Argument(min=0, metavar="VERSION", help="Version of the weights that the engines have now.")
    ],
    engine: Engines = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Resume even if a trainer holds the policy and its lease has not expired."),
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Resume a policy's engines with weights of this version, also after a trainer died in an update."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            policy = client.policy(name, holder=HOLDER)
            return await policy.resume(version, engines=engine, take_over=take_over)

    _show(run(work()), as_json)


def _show(policy: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(policy)
    else:
        show(policies_table([policy]))
