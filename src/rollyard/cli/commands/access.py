"""`rollyard access`: access tokens and their quotas, and the audit log of administrators' actions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    connect,
    note,
    plain,
    print_json,
    print_lines,
    run,
    show,
    table,
)

access = typer.Typer(
    help="Tokens: create, list, rotate, revoke, their quotas; and the audit log.", no_args_is_help=True
)

Id = Annotated[str, typer.Argument(metavar="ID", help="A token's id, as `rollyard access list` shows it.")]
Queued = Annotated[int | None, typer.Option(min=1, help="Maximum rollouts queued at once.")]
Live = Annotated[int | None, typer.Option(min=1, help="Maximum rollouts running at once.")]
Sessions = Annotated[int | None, typer.Option(min=1, help="Maximum sessions open at once.")]
StoredBytes = Annotated[int | None, typer.Option(min=1, help="Maximum bytes of stored trajectories.")]
RequestsPerS = Annotated[float | None, typer.Option(min=0.001, help="Maximum requests per second.")]
Priority = Annotated[int | None, typer.Option(help="Highest priority that it may use.")]
ExpiresS = Annotated[float | None, typer.Option(min=0.001, help="Seconds until it expires. [default: never]")]


@access.command("create", epilog="Example: rollyard access create trainer --name alice --run 'alice-*'")
def create(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="ACCESS",
            help="admin: everything; trainer: its own runs and policies; submitter: work in its runs; "
            "reader: read-only; node: a machine of the fleet.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="A name for people, such as the owner's.")] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="NAME", help="Only these runs; * matches any text. May be repeated."),
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", metavar="NAME", help="Only these policies; as --run.")
    ] = None,
    expires_s: ExpiresS = None,
    queued: Queued = None,
    live: Live = None,
    sessions: Sessions = None,
    stored_bytes: StoredBytes = None,
    requests_per_s: RequestsPerS = None,
    priority: Priority = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Create a token. It is printed once, on stdout; the service keeps only its digest."""
    quota = _quota(context)

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.create_token(
                kind, name=name, runs=runs, policies=policies, expires_s=expires_s, quota=quota or None
            )

    _show_token(run(work()), as_json)


@access.command("list", epilog="Example: rollyard access list")
def list_tokens(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the created tokens. Tokens from the settings file are not included."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.list_tokens()

    tokens = run(work())
    if as_json:
        print_lines(tokens)
        return
    if not tokens:
        note("no token has been created; create one: rollyard access create trainer --name alice")
        return
    grid = table("id", "access", "name", "runs", "policies", "created", "expires")
    for one in tokens:
        grid.add_row(
            plain(one.get("id")),
            plain(one.get("access")),
            plain(one.get("name") or ""),
            plain(", ".join(one.get("runs") or ()) or "–"),
            plain(", ".join(one.get("policies") or ()) or "–"),
            _day(one.get("created_at")),
            _day(one.get("expires_at")),
        )
    show(grid)


@access.command("rotate", epilog="Example: rollyard access rotate tok_01")
def rotate(id: Id, expires_s: ExpiresS = None, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Give a token a new secret; the old one is refused at once, and browsers that signed in with it are signed out.

    The token keeps its runs and policies."""

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.rotate_token(id, expires_s=expires_s)

    _show_token(run(work()), as_json)


@access.command("quota", epilog="Example: rollyard access quota tok_01 --live 64 --queued 5000")
def quota(
    context: typer.Context,
    id: Id,
    queued: Queued = None,
    live: Live = None,
    sessions: Sessions = None,
    stored_bytes: StoredBytes = None,
    requests_per_s: RequestsPerS = None,
    priority: Priority = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Replace a token's quota. Limits that are not given here are removed."""
    limits = _quota(context)

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.change_quota(id, limits)

    changed = run(work())
    if as_json:
        print_json(changed)
    else:
        note(f"{id}: " + (", ".join(f"{name} {most}" for name, most in limits.items()) or "no quota"))


@access.command("revoke", epilog="Example: rollyard access revoke tok_01")
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Tokens to revoke.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Revoke tokens, at once. What was created with them remains, for admins."""

    async def work() -> None:
        async with connect(url, token) as client:
            for id in ids:
                await client.revoke_token(id)

    run(work())
    for id in ids:
        if as_json:
            print_json({"id": id, "state": "revoked"})
        else:
            note(f"{id} is revoked")


@access.command("log", epilog="Example: rollyard access log --limit 20")
def log(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum entries, newest first.")] = 50,
    before: Annotated[int | None, typer.Option(min=1, help="Only entries before this number.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show what administrators did: tokens, engines, pools, nodes, deleted runs."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.audit(limit=limit, before=before)

    entries = run(work())
    if as_json:
        print_lines(entries)
        return
    grid = table("number", "when", "who", "what", "target", "detail", right=("number",))
    for one in entries:
        detail = ", ".join(f"{key} {value}" for key, value in (one.get("detail") or {}).items() if value is not None)
        grid.add_row(
            str(one.get("seq")),
            _day(one.get("at")),
            plain(one.get("actor")),
            plain(one.get("action")),
            plain(one.get("target")),
            plain(detail),
        )
    show(grid)


def _quota(context: typer.Context) -> dict[str, Any]:
    """Returns the quota given by the options of this call."""
    names = ("queued", "live", "sessions", "stored_bytes", "requests_per_s", "priority")
    return {name: context.params[name] for name in names if context.params[name] is not None}


def _show_token(created: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(created)
        return
    note(f"{created.get('access')} token {created.get('id')}; it is shown only once:")
    typer.echo(created.get("token"))


def _day(at: float | None) -> str:
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
