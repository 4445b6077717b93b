"""`rollyard bench NAME`: runs the benchmarks of a checkout. They are in its `bench` folder, and in no wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, out, print_json

CHECKOUT = Path(__file__).parents[4]

BENCHES = {
    "shell": "commands in a sandbox's shell: latency and throughput",
    "ipython": "cells in a sandbox's Python: latency and start",
    "sandbox": "starts, forks and memory of sandboxes, each runtime; the doorway",
    "survive": "what is left of 50 starting sandboxes when their service is killed",
    "endurance": "what ten thousand sandboxes, started and ended, leave behind",
    "gateway": "what the gateway adds to a completion, and how many it carries",
    "pipeline": "turns per second, CPU and memory per rollout, end to end",
    "stages": "does a slow EVAL slow RUN down?",
    "restart": "how long until a killed service with 10,000 queued rollouts serves again",
    "draw": "batches of useful groups: time, waste and bias of four ways to fill them (simulated)",
    "arrow": "a batch of 256 traces of 8,000 tokens: bytes and time as Arrow and as JSON",
    "engine": "tokens and turns per second of the embedded engine, and of transformers' generate",
    "web": "tables, searches and open pages of the dashboard, with 100,000 stored rollouts",
    "fleet": "what 1 to 8 Ray nodes carry, and what leases and results cost the head",
}


def command(
    name: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(BENCHES)}, or all; without it they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter, rougher measurement.")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure the peers, too.")] = True,
    runtime: Annotated[str | None, typer.Option(help="The sandbox runtime, where a bench can choose.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="draw: batches that are counted.")] = None,
    want: Annotated[int | None, typer.Option(min=1, help="draw: groups in a batch.")] = None,
    slots: Annotated[int | None, typer.Option(min=8, help="draw: rollouts at once.")] = None,
    train_s: Annotated[float | None, typer.Option(min=0, help="draw: what the trainer takes for a batch.")] = None,
    stragglers: Annotated[float | None, typer.Option(min=0, max=1, help="draw: the share that is slow.")] = None,
    seed: Annotated[int | None, typer.Option(help="draw: another world.")] = None,
    model: Annotated[
        str | None, typer.Option(help="engine: what `rollyard engine --model` takes. [default: smollm2]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="engine: auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="engine: auto, float32, bfloat16 or float16.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="engine: sampled for each request. [default: 64]")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="engine: tokens of each prompt. [default: 128]")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, and print the figures beside those of the peers."""
    if name is None:
        for each, what in BENCHES.items():
            if as_json:
                print_json({"bench": each, "what": what})
            else:
                out().print(f"{each:<10} {what}", markup=False)
        return
    if name not in BENCHES and name != "all":
        raise CommandError(f"there is no bench {name!r}", f"there are: {', '.join(BENCHES)}, and all", 2)
    options = {
        "runtime": runtime, "batches": batches, "want": want, "slots": slots, "train_s": train_s,
        "stragglers": stragglers, "seed": seed, "model": model, "device": device, "dtype": dtype, "tokens": tokens,
        "prompt": prompt,
    }  # fmt: skip
    if not (CHECKOUT / "bench" / "report.py").is_file():
        raise CommandError(
            "the benchmarks are not part of the installed package",
            "run `make bench` or `rollyard bench` in a checkout of Rollyard's repository (folder bench/)",
        )
    sys.path.insert(0, str(CHECKOUT))
    import_module("bench.report").report(name, options, quick=quick, peers=peers, as_json=as_json)
