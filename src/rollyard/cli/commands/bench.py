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
    "shell": "latency and throughput of commands in a sandbox's shell",
    "ipython": "latency of cells in a sandbox's Python, and its start time",
    "sandbox": "start, fork and memory of sandboxes, each runtime; the doorway",
    "survive": "what remains when a service with 50 starting sandboxes is killed",
    "endurance": "what ten thousand sandboxes leave behind when they have ended",
    "gateway": "latency that the gateway adds to a completion, and its throughput",
    "pipeline": "turns per second, CPU and memory per rollout, end to end",
    "stages": "throughput of RUN while EVAL is slow",
    "restart": "time until a killed service with 10,000 queued rollouts serves again",
    "draw": "time, waste and bias of four ways to fill batches (simulated)",
    "arrow": "size and time of a batch of 256 traces, as Arrow and as JSON",
    "engine": "tokens and turns per second of the embedded engine",
    "web": "response times of the dashboard with 100,000 stored rollouts",
    "fleet": "throughput of 1 to 8 Ray nodes; cost of a rollout for the head",
}


def command(
    name: Annotated[
        str | None, typer.Argument(help=f"The benchmark: {', '.join(BENCHES)}, or all. Without a name, list them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a shorter time, less accurately.")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also measure the compared programs.")] = True,
    runtime: Annotated[str | None, typer.Option(help="Sandbox runtime, for benchmarks that support several.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="draw: number of counted batches. [default: 48]")] = None,
    want: Annotated[int | None, typer.Option(min=1, help="draw: groups per batch. [default: 32]")] = None,
    slots: Annotated[
        int | None, typer.Option(min=8, help="draw: rollouts that run at the same time. [default: 16 × --want]")
    ] = None,
    train_s: Annotated[
        float | None, typer.Option(min=0, help="draw: seconds that the trainer spends on a batch. [default: 150]")
    ] = None,
    stragglers: Annotated[
        float | None, typer.Option(min=0, max=1, help="draw: share of slow rollouts. [default: 0.05]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="draw: seed of the simulation. [default: 0]")] = None,
    model: Annotated[
        str | None, typer.Option(help="engine: a model, as for `rollyard engine --model`. [default: smollm2]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="engine: auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="engine: auto, float32, bfloat16 or float16.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="engine: tokens sampled for each request. [default: 64]")
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="engine: tokens of each prompt. [default: 128]")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark on this machine, and compare the figures with those of other programs."""
    if name is None:
        for each, what in BENCHES.items():
            if as_json:
                print_json({"bench": each, "what": what})
            else:
                out().print(f"{each:<10} {what}", markup=False)
        return
    if name not in BENCHES and name != "all":
        raise CommandError(f"there is no benchmark {name!r}", f"there are: {', '.join(BENCHES)}, and all", 2)
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
