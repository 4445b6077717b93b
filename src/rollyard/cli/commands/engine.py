"""`rollyard engine`: the embedded engine as a server."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollyard.cli._console import AsJson, CommandError, note, print_json, run
from rollyard.cli._quick_imports import quick_imports
from rollyard.cli.commands.weights import get_model
from rollyard.core.texts import cannot_listen
from rollyard.embedded import SHIPPED

DTYPES = ("auto", "float32", "bfloat16", "float16")


def engine(
    model: Annotated[
        str, typer.Option("--model", help="A model's folder, smollm2 (fetched once), a GGUF file, or a hub name.")
    ],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on. The engine requires no key.")] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; else the last part of --model.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N. auto: the first GPU, else the CPU.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16. auto: as saved; on the CPU float32.")
    ] = "auto",
    max_context: Annotated[int | None, typer.Option(min=2, help="Longest sequence; else the model's own.")] = None,
    cache_gib: Annotated[
        float, typer.Option(min=0.001, help="GiB for keys and values of running sequences and cached prefixes.")
    ] = 2.0,
    max_running: Annotated[int, typer.Option(min=1, help="Maximum sequences sampled at once.")] = 64,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens computed per step, so that a long prompt does not block others.")
    ] = 512,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="On a GPU: less precise float32 products, several times faster.")
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|NAME",
            help=f"A LoRA adapter in PEFT's format, added to the weights; or a shipped one: {', '.join(SHIPPED)}.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model on this machine's CPU or GPU, with the part of vLLM's API that Rollyard uses.

    For laptops, tests and small models: torch, exact logprobs, weight versions, prefix reuse. On a cluster, use
    vLLM or SGLang. Requires the extra `local`. When ready, it prints its address; with
    --json as one object on stdout.
    """
    from rollyard.embedded import missing_packages

    if dtype not in DTYPES:
        raise CommandError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}", status=2)
    adapter_folder = _adapter(adapter)
    if missing := missing_packages():
        names = " and ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise CommandError(
            f"the embedded engine needs {names}, which {verb} not installed", "pip install 'rollyard[local]'"
        )
    _check_port(host, port)
    folder = _model(model, adapter_folder)
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # otherwise torch leaves a /tmp/perf-PID.map on some CPUs
    sizes = {
        "max_running": max_running,
        "chunk_tokens": chunk_tokens,
        "cache_bytes": int(cache_gib * (1 << 30)),
    }
    place = {
        "host": host,
        "port": port,
        "name": name or Path(model).name,
        "root": str(folder.resolve()) if folder.is_dir() else "",
        "max_context": max_context,
    }
    if tf32:
        import torch  # type: ignore[import-not-found]

        torch.set_float32_matmul_precision("high")
    run(_serve(str(folder), device, dtype, adapter_folder, sizes, place, as_json))


def _adapter(name: str | None) -> Path | None:
    from rollyard.embedded.formats.sources import WeightsError
    from rollyard.embedded.shipped import find_adapter

    try:
        return None if name is None else find_adapter(name)
    except WeightsError as error:
        raise CommandError(error.what, error.remedy, 2) from error


def _model(name: str, adapter: Path | None) -> Path:
    """Returns the model's folder, or what else was given. An adapter must have been trained on its weights; of a known
    model, those are fetched that the adapter was trained on."""
    from rollyard.embedded.formats.sources import WeightsError
    from rollyard.embedded.shipped import check_base, source_for
    from rollyard.embedded.weights import AUTO, KNOWN

    folder = Path(name)
    try:
        if name in KNOWN:
            folder = get_model(name, AUTO if adapter is None else source_for(adapter, KNOWN[name]))
        _check_folder(folder)
        if adapter is not None and any(folder.glob("*.safetensors")):
            check_base(adapter, folder)
    except WeightsError as error:
        raise CommandError(error.what, error.remedy) from error
    return folder


def _check_port(host: str, port: int) -> None:
    """Fails on a port in use before torch is imported and the model is loaded, which takes seconds."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:  # others, such as a host without IPv4, are left to the server
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> CommandError:
    return CommandError(*cannot_listen(host, port, error))


def _check_folder(folder: Path) -> None:
    """Fails on a folder without a model before torch is imported."""
    if folder.is_dir() and not any([*folder.glob("*config.json"), *folder.glob("*.gguf")]):
        raise CommandError(f"{folder} cannot be loaded: it has neither a config.json nor a GGUF file")


async def _serve(
    model: str,
    device: str,
    dtype: str,
    adapter: Path | None,
    sizes: dict[str, Any],
    place: dict[str, Any],
    as_json: bool,
) -> None:
    import asyncio

    with quick_imports():
        from rollyard.embedded.batching import Settings
        from rollyard.embedded.loading import load_model, load_tokenizer
        from rollyard.embedded.server import Engine
        from rollyard.embedded.transformer.model import Unsupported, choose_device, choose_dtype

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        chosen = choose_device(device)
        note(f"loading {model}{f' with the adapter {adapter.name}' if adapter is not None else ''} on {chosen}")
        with quick_imports():  # transformers, if needed, imports most of its modules only here
            module = await asyncio.to_thread(load_model, model, device=chosen, dtype=choose_dtype(dtype, chosen))
            tokenizer = await asyncio.to_thread(load_tokenizer, model)
        async with Engine.serve(module, tokenizer, settings=Settings(**sizes), adapter=adapter, **place) as served:
            note(f"rollyard engine at {served.url}, model {served.name}; use it: rollyard serve --engine {served.url}")
            if as_json:
                print_json({"url": served.url, "model": served.name})
                sys.stdout.flush()
            await stopped.wait()
    except (Unsupported, ValueError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise _cannot_listen(place["host"], place["port"], error) from error
