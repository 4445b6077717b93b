"""`rollyard serve`: runs the service in this process, until SIGTERM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._console import CommandError, check_engine_url
from rollyard.cli._quick_imports import quick_imports


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback, configure tokens.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes any free one.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder for all durable data.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="URL", help="An engine to start with; may be repeated.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="API of the engines given here: vllm, sglang, openai or prorl.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the engines given here, or with --prorl: a folder or a hub name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the engines given here; else the first they list.")
    ] = None,
    prorl: Annotated[
        bool | None, typer.Option("--prorl", help="Also serve the API of ProRL Agent, for its trainers.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="Default sandbox runtime of tasks; also allows it.")] = None,
    fleet: Annotated[
        str | None,
        typer.Option(help="Run rollouts on nodes (machines that join by `rollyard node`) or ray (each Ray node)."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster, with --fleet ray; else one is started here.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="A SQLite file or postgresql://USER@HOST/DB; else rollyard.db in data_dir."),
    ] = None,
    init_slots: Annotated[int | None, typer.Option(help="Rollouts in INIT at once.")] = None,
    run_slots: Annotated[int | None, typer.Option(help="Rollouts in RUN at once.")] = None,
    eval_slots: Annotated[int | None, typer.Option(help="Rollouts in EVAL at once.")] = None,
    ready_slots: Annotated[int | None, typer.Option(help="Rollouts that may wait in READY for RUN.")] = None,
    max_live: Annotated[int | None, typer.Option(help="Maximum live rollouts, from INIT to EVAL.")] = None,
    max_queued: Annotated[int | None, typer.Option(help="Maximum queued rollouts; further submits get 429.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds for RUN and EVAL to end at SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The TOML file; else $ROLLYARD_CONFIG, else ./rollyard.toml.")
    ] = None,
) -> None:
    """Serve rollouts over HTTP.

    These settings, and more, can also be set by ROLLYARD_* variables and in a TOML file: see `rollyard config`.
    """
    about = {"kind": kind, "tokenizer": tokenizer, "model": model}
    engine_options = {key: value for key, value in about.items() if value is not None}
    if prorl and not engine and set(engine_options) == {"tokenizer"}:
        engine_options = {}  # for engines that are added by /add_llm_server
    if engine_options and not engine:
        raise CommandError(f"--{next(iter(engine_options))} needs --engine", "give an engine with --engine", 2)

    for engine_url in engine or ():
        check_engine_url(engine_url)
    if address and fleet != "ray":
        raise CommandError("--address needs --fleet ray", "give --fleet ray", 2)

    with quick_imports():
        from rollyard.service.server import run_server
        from rollyard.service.settings import load_settings

    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "engines": [{"url": url, **engine_options} for url in engine] if engine else None,
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
        # The operator starts the service, so naming a runtime here allows it. A task cannot allow one.
        allowed = load_settings(flags, os.environ, config).settings.runtimes
        flags |= {"runtime": runtime, "runtimes": [*allowed, *({runtime} - set(allowed))]}
    status = run_server(load_settings(flags, os.environ, config).settings)
    raise typer.Exit(status)
