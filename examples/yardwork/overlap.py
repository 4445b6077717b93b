"""Measures the benefit of sampling and learning at the same time: the same RL, decoupled and coupled, by tool latency.

    python examples/yardwork/overlap.py --start ADAPTER --out runs/overlap --json -- --run-slots 96 -- --want 16

Decoupled is `--max-staleness 1`: the next batch is sampled while the trainer learns from this one. Coupled is 0: the
same code alternates, in two variants (`pace` in training.py): `coupled` starts only what the batch still needs;
`coupled_oversampled` starts more at once and discards the surplus. Everything else is the same: engine, service,
trainer process, initial weights, tasks, seeds, sizes.

The engine records a CUDA graph for each batch size on first use, so uncounted steps come first (`--warm-up`), and the
first `--skip` steps of each run do not count either. Tokens are those that contribute to a gradient. Results so far are
in overlap.json, in case the measurement is interrupted. Options after the first -- are for `alone.py`, those after the
second for `train.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import alone

WAYS = {
    "decoupled": ["--max-staleness", "1"],
    "coupled": ["--max-staleness", "0"],
    "coupled_oversampled": ["--max-staleness", "0", "--oversample"],
}
THROWN_AWAY = ("filtered", "lost")  # equal rewards; surplus
QUERY = ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]


def main() -> None:
    own_arguments, _, other_arguments = _cut(sys.argv[1:])
    services, _, train = _cut(other_arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", required=True, help="the adapter to start with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--latency-s", type=float, nargs="+", default=[0.0, 0.1, 1.0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=6, help="steps of each variant before anything is measured")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(own_arguments)
    if not 0 <= args.skip < args.steps or args.warm_up < 0:
        parser.error("--skip must be less than --steps, and --warm-up 0 or more")
    if len({*args.ways}) < len(args.ways) or len({*args.latency_s}) < len(args.latency_s):
        parser.error("--ways and --latency-s must not repeat a value")
    if args.out.exists():  # its results are of other weights, or incomplete
        raise SystemExit(f"{args.out} already exists: choose another --out, or delete it")
    results: dict[str, Any] = {}
    parts = alone.options(["--data", str(args.out / "service"), *services])
    with (
        alone.running(parts) as service_options,
        alone.trainer([*service_options, *train], parts.trainer_share) as training,
    ):

        def run(name: str, latency_s: float, steps: int, way: Sequence[str]) -> _Busy:
            out = args.out / name
            fixed = ["--out", out, "--start", args.start, "--steps", steps, "--test-tasks", 0, "--anchor", 0]
            fixed += ["--tool-latency-s", latency_s, "--validate-every", 10 * steps, "--save-every", 10 * steps]
            out.mkdir(parents=True)
            with _Busy(out / "gpu.csv") as busy:
                if not training([*map(str, fixed), *way]):
                    raise SystemExit(f"{name} did not complete: see above")
            return busy

        for way in args.ways if args.warm_up else ():
            run(f"warm-up-{way}", args.latency_s[0], args.warm_up, WAYS[way])
        for latency_s in args.latency_s:
            for way in args.ways:
                name = f"{way}-{latency_s:g}"
                busy = run(name, latency_s, args.steps, WAYS[way])
                results[f"{way}_{latency_s:g}"] = measured(args.out / name, args.skip, busy)
                results |= ratios(results, latency_s)
                (args.out / "new.json").write_text(json.dumps(results))
                (args.out / "new.json").replace(args.out / "overlap.json")
                speed = results[f"{way}_{latency_s:g}"]["tokens_per_s"]
                print(f"{way} at a tool latency of {latency_s:g} s: {speed:.0f} tokens/s", file=sys.stderr, flush=True)
    print(json.dumps(results) if args.json else json.dumps(results, indent=2))


def ratios(results: dict[str, Any], latency_s: float) -> dict[str, Any]:
    """The ratios of tokens per second of decoupled to each coupled variant, as far as they are measured, each with a
    95 % bootstrap interval over the steps of each run (that is the noise of steps, not of runs)."""
    steps = {way: results[name]["steps"] for way in WAYS if (name := f"{way}_{latency_s:g}") in results}
    decoupled, figures = steps.pop("decoupled", None), {}
    for way, coupled in steps.items() if decoupled else ():
        chance = random.Random(way)
        again = sorted(
            per_s(chance.choices(decoupled, k=len(decoupled))) / per_s(chance.choices(coupled, k=len(coupled)))
            for _ in range(2000)
        )
        figures[f"ratio_{way}_{latency_s:g}"] = per_s(decoupled) / per_s(coupled)
        figures[f"range_{way}_{latency_s:g}"] = [again[50], again[-51]]
    return figures


def per_s(steps: Sequence[Sequence[float]]) -> float:
    """Tokens per second of steps, each given as tokens and seconds."""
    return sum(tokens for tokens, _ in steps) / sum(took_s for _, took_s in steps)


def measured(out: Path, skip: int, busy: _Busy) -> dict[str, Any]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "rl"][skip:]
    took_s = sum(step["step_s"] for step in steps)
    over = (out / "metrics.jsonl").stat().st_mtime  # its last line is the last step
    tokens = {name: sum(step["figures"][f"tokens_{name}"] for step in steps) for name in ("delivered", *THROWN_AWAY)}
    pairs = [[step["tokens_trained"], step["step_s"]] for step in steps]
    return {
        "tokens_per_s": per_s(pairs),
        "step_s": took_s / len(steps),
        "learn_s": sum(step["learn_s"] for step in steps) / len(steps),
        "wait_s": sum(step["wait_s"] for step in steps) / len(steps),
        "run_s": sum(step["stages_s"]["run_s"] for step in steps) / len(steps),
        "thrown_away_share": sum(tokens[name] for name in THROWN_AWAY) / sum(tokens.values()),
        "staleness": sum(step["staleness"] for step in steps) / len(steps),
        "learn_share": sum(step["learn_s"] for step in steps) / took_s,
        "gpu_busy_share": busy.share(over - took_s, over),
        "steps": pairs,
    }


class _Busy:
    """Records the GPU's utilization, as reported by its driver, to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> _Busy:
        with self._file.open("wb") as file:
            try:
                self._process = subprocess.Popen(QUERY, stdout=file)
            except OSError:  # no nvidia-smi, so no GPU
                self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def share(self, since: float, until: float) -> float | None:
        """The mean utilization in that time; None without a GPU."""
        samples: list[float] = []
        for line in self._file.read_text().splitlines():
            at, _, value = line.partition(", ")
            with suppress(ValueError):  # an incomplete line, or a word instead of a number
                if since <= datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").astimezone().timestamp() <= until:
                    samples.append(float(value))
        return sum(samples) / len(samples) / 100 if samples else None


def _cut(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), "--", list(arguments[at + 1 :])


if __name__ == "__main__":
    main()
