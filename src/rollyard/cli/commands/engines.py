"""`rollyard engines`: lists, adds and removes the engines of a running service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    Token,
    Url,
    check_engine_url,
    connect,
    note,
    number,
    out,
    plain,
    print_json,
    print_lines,
    run,
    show,
    table,
    visible,
)

engines = typer.Typer(help="The inference servers in use: list, add, remove.", no_args_is_help=True)


ENGINES_GIVE_WAY = ("model", "policy", "id")
ENGINES_OPTIONAL = ("cached", "failed", "model")


@engines.command("list", epilog="Example: rollyard engines list")
def list_engines(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """List the engines with their load and health."""

    async def work() -> list[dict[str, Any]]:
        async with connect(url, token) as client:
            return await client.engines()

    rows = run(work())
    if as_json:
        print_lines(rows)
    elif rows:
        show(engines_table(rows), *ENGINES_GIVE_WAY, optional=ENGINES_OPTIONAL)
        for line in engine_problems(rows):
            out().print(line, markup=False, soft_wrap=True)
    else:
        note("there is no engine; add one: rollyard engines add URL")


def engines_table(rows: list[dict[str, Any]]) -> Any:
    """Creates a table of engines. Sessions are live/cap, or live/capacity if there is no cap. Calls are all calls, with
    those in flight in parentheses. kv is the fill level of the KV cache, if an engine reports it."""
    has_kv = any(engine.get("kv_use") is not None for engine in rows)
    numbers = ("sessions", *(["kv"] if has_kv else []), "calls", "failed", "tokens", "cached")
    grid = table("id", "state", "policy", "model", *numbers, right=numbers)
    for engine in rows:
        state = str(engine.get("state"))
        style = "green" if state == "up" else "red"
        grid.add_row(
            plain(engine.get("id")),
            f"[{style}]{plain(state)}[/]",
            plain(engine.get("policy")) + (" (judge)" if engine.get("role") == "judge" else ""),
            plain(engine.get("model") or "–"),
            f"{number(engine.get('sessions'))}/{number(engine.get('cap') or engine.get('capacity'))}",
            *([_share(engine.get("kv_use"))] if has_kv else []),
            f"{number(engine.get('calls'))} ({number(engine.get('in_flight'))})",
            *(number(engine.get(name)) for name in ("failures", "tokens", "cached_tokens")),
        )
    return grid


def engine_problems(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each engine with a problem. The last error of an engine that is up again is none."""
    return [visible(_with_name(str(row.get("id")), problem)) for row in rows if (problem := _problem(row))]


def _with_name(engine_id: str, problem: str) -> str:
    """The problem as a line that names the engine; some errors name it themselves."""
    return problem if problem.startswith(f"engine {engine_id} ") else f"engine {engine_id}: {problem}"


def _problem(engine: dict[str, Any]) -> str:
    if engine.get("last_error") and engine.get("state") != "up":
        return str(engine["last_error"])
    if engine.get("tokenizer_verified") is False:
        return "its tokenizer is not verified" + (", but trusted" if engine.get("trust_tokenizer") else ": untrainable")
    return ""


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


@engines.command("add", epilog="Example: rollyard engines add http://gpu1:8000 --policy actor --capacity 512")
def add(
    engine_url: Annotated[str, typer.Argument(metavar="URL", help="The engine's URL.")],
    id: Annotated[str | None, typer.Option("--id", help="A name for it; else its address.")] = None,
    kind: Annotated[str | None, typer.Option(help="vllm, sglang, openai or prorl. [default: vllm]")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy whose weights it serves. [default: default]")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name on the engine; else the first it lists.")] = None,
    role: Annotated[str | None, typer.Option(help="policy or judge. [default: policy]")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or a hub name; else found by its model.")] = None,
    renderer: Annotated[str | None, typer.Option(help="The chat renderer; else chosen by the model's name.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Maximum sessions at once.")] = None,
    admission: Annotated[
        str | None, typer.Option(help="Limit of sessions: adaptive, up to capacity, or fixed. [default: adaptive]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ROLLYARD_ENGINE_API_KEY", help="Sent to the engine as a bearer token.")
    ] = None,
    trust_tokenizer: Annotated[
        bool, typer.Option("--trust-tokenizer", help="Train on its tokens even if its tokenizer is not verified.")
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Add an engine. It is probed first, and kept across restarts."""
    check_engine_url(engine_url)

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await client.add_engine(
                engine_url,
                id=id,
                kind=kind,
                policy=policy,
                model=model,
                role=role,
                tokenizer=tokenizer,
                renderer=renderer,
                capacity=capacity,
                admission=admission,
                api_key=api_key,
                trust_tokenizer=trust_tokenizer or None,
            )

    engine = run(work())
    if as_json:
        print_json(engine)
    else:
        show(engines_table([engine]), *ENGINES_GIVE_WAY, optional=ENGINES_OPTIONAL)
        notes = [f"engine {engine.get('id')}: {text}" for text in (engine.get("info") or {}).get("notes") or ()]
        for line in (*engine_problems([engine]), *notes):
            note(line)


@engines.command("remove", epilog="Example: rollyard engines remove gpu1:8000")
def remove(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Engines to remove.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Remove engines. Their sessions continue on other engines."""

    async def work() -> None:
        async with connect(url, token) as client:
            for id in ids:
                await client.remove_engine(id)
                if as_json:
                    print_json({"id": id, "removed": True})
                else:
                    note(f"{id} is removed")

    run(work())


@engines.command("clear", epilog="Example: rollyard engines clear")
def clear(url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Remove all engines."""

    async def work() -> None:
        async with connect(url, token) as client:
            await client.clear_engines()

    run(work())
    if as_json:
        print_json({"cleared": True})
    else:
        note("all engines are removed")
