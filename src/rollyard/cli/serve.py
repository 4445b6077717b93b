"""`rollyard serve`: the service, in this process, until SIGTERM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._console import CommandError
from rollyard.cli._importing import quick_imports


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback, configure tokens.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where everything that must last is kept.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="An engine to begin with; may be repeated.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="What the engines named here speak: vllm, sglang, openai or prorl.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the engines named here, or with --prorl: a folder or a hub name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the engines named here; else the first they list.")
    ] = None,
    prorl: Annotated[
        bool | None, typer.Option("--prorl", help="Answer the reference system's own API too, for its trainers.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(help="Sandbox runtime of tasks that name none; allows it, too.")
    ] = None,
    fleet: Annotated[
        str | None,
        typer.Option(help="Who runs rollouts: nodes (those that join: `rollyard node`) or ray (one on each Ray node)."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster, with --fleet ray; else one is started on this machine.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="A SQLite file or postgresql://USER@HOST/DB; else rollyard.db in data_dir."),
    ] = None,
    init_slots: Annotated[int | None, typer.Option(help="Rollouts being set up at once.")] = None,
    run_slots: Annotated[int | None, typer.Option(help="Agents at work at once.")] = None,
    eval_slots: Annotated[int | None, typer.Option(help="Rollouts being scored at once.")] = None,
    ready_slots: Annotated[int | None, typer.Option(help="Set-up rollouts that may wait for RUN.")] = None,
    max_live: Annotated[int | None, typer.Option(help="Live sandboxes in all.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Queued rollouts; beyond it submits are told to wait.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="What RUN and EVAL get to end at SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The TOML file; else $ROLLYARD_CONFIG, else ./rollyard.toml.")
    ] = None,
) -> None:
    """Serve rollouts over HTTP.

    Whatever can be set here, and more, can be set in ROLLYARD_* variables and in a TOML file: see `rollyard config`.
    """
    about = {"kind": kind, "tokenizer": tokenizer, "model": model}
    given = {key: value for key, value in about.items() if value is not None}
    if prorl and not engine and set(given) == {"tokenizer"}:
        given = {}  # of engines that come by /add_llm_server
    if given and not engine:
        raise CommandError(
            f"--{next(iter(given))} says something of the engines named here", "name one with --engine", 2
        )

    if address and fleet != "ray":
        raise CommandError("--address is of a Ray cluster", "say --fleet ray", 2)

    with quick_imports():
        from rollyard.service.server import run_server
        from rollyard.service.settings import load_settings

    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "engines": [{"url": url, **given} for url in engine] if engine else None,
        "fleet": fleet,
        "ray_address": address,
        "store": store,
        "prorl": prorl,
        "prorl_tokenizer": tokenizer if prorl else None,
        "init_slots": init_slots,
        "run_slots": run_slots,
        "eval_slots": eval_slots,
        "ready_slots": ready_slots,
        "max_live": max_live,
        "max_queued": max_queued,
        "drain_s": drain_s,
        "log_level": log_level,
        "log_format": log_format,
    }
    if runtime is not None:
        # Who starts the service is its operator: naming a runtime allows it. A task still cannot.
        allowed = load_settings(flags, os.environ, config).settings.runtimes
        flags |= {"runtime": runtime, "runtimes": [*allowed, *({runtime} - set(allowed))]}
    status = run_server(load_settings(flags, os.environ, config).settings)
    raise typer.Exit(status)
