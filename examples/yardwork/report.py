"""Prints results of `train.py` as Markdown: pass@1, also by family, curves, times, logprobs by lag.

    python examples/yardwork/report.py runs/seed-0 runs/seed-1 runs/seed-2 [--every 10]

A run is its `--out` folder, or its metrics.jsonl. Shares are of all groups judged, or all tokens sampled, in those
steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]
STAGES = {"raw": "the model as it comes", "warm": "warm start", "rl": "after RL", "more-warm": "further warm start"}
STAGES |= {"more-warm-best": "further warm start, at its best"}
WAYS = {"test": "", "test_greedy": ", greedily", "test_new_rules": ", on rules that are never trained"}
TIMES = {"step_s": "a step", "wait_s": "waiting for the batch", "learn_s": "learning", "push_s": "pushing weights"}
TIMES |= {"score_s": "validating"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--every", type=int, default=10, help="steps of RL per row of the curves")
    args = parser.parse_args()
    runs = {path.stem if path.is_file() else path.name: read(path) for path in args.runs}
    print("\n".join(report(runs, args.every)))


def read(path: Path) -> list[Line]:
    file = path if path.is_file() else path / "metrics.jsonl"
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is not a run: {error}") from error


def report(runs: dict[str, list[Line]], every: int) -> list[str]:
    output = ["## Held-out pass@1", "", *table(["", *runs], tests(runs)), *families(runs)]
    for name, lines in runs.items():
        warm = [line for line in lines if line["phase"] == "warm"]
        steps = [line for line in lines if line["phase"] == "rl"]
        output += ["", f"## {name}", ""]
        if warm:
            output += [
                "Warm start, epoch by epoch: " + ", ".join(f"{line['pass_at_1']:.2f}" for line in warm) + ".",
                "",
            ]
        if more := [f"{line['pass_at_1']:.2f}" for line in lines if line["phase"] == "more_warm"]:
            output += ["Further warm start, after 1, 2, 4… epochs: " + ", ".join(more) + ".", ""]
        if steps:
            output += [*curve(steps, every), "", *times(steps), "", *lags(steps)]
    return output


def tests(runs: dict[str, list[Line]]) -> Iterable[list[str]]:
    for what, stage in STAGES.items():
        for phase, way in WAYS.items():
            row = [_tested(lines, phase, what) for lines in runs.values()]
            if any(row):
                yield [stage + way, *row]


def families(runs: dict[str, list[Line]]) -> list[str]:
    """Sampled pass@1 of the trained weights: a row per stage, a column per family."""
    results = [
        (f"{name}, {stage}", line["result"]["by"])
        for name, lines in runs.items()
        for what, stage in STAGES.items()
        for line in lines
        if what != "raw" and line["phase"] == "test" and line.get("what") == what and line.get("result", {}).get("by")
    ]
    columns = sorted({family for _, by in results for family in by})
    rows = [[row, *(_of_family(by.get(family)) for family in columns)] for row, by in results]
    return ["", *table(["", *columns], rows)] if rows else []


def _of_family(family: Line | None) -> str:
    return f"{family['pass_at']['1']['mean']:.2f}" if family else ""


def _tested(lines: Sequence[Line], phase: str, what: str) -> str:
    matches = [line for line in lines if line["phase"] == phase and line.get("what") == what]
    return f"{matches[-1]['pass_at_1']:.3f} ({matches[-1]['low']:.3f} to {matches[-1]['high']:.3f})" if matches else ""


def curve(steps: Sequence[Line], every: int) -> list[str]:
    rows: list[list[str]] = []
    for start in range(0, len(steps), every):
        some = steps[start : start + every]
        total = _sums([step["figures"] for step in some])
        judged, sampled = total("judged"), total("tokens_sampled")
        informative = judged - total("all_zero") - total("all_one")
        validated = [f"{step['pass_at_1']:.3f}" for step in some if "pass_at_1" in step]
        rows.append(
            [
                f"{some[0]['step']} to {some[-1]['step']}",
                _share(total("reward_sum"), total("rewards")),
                _share(informative, judged),
                _share(sum(step["staleness"] for step in some), len(some)),
                _share(sampled - total("tokens_delivered"), sampled),
                ", ".join(validated),
            ]
        )
    head = ["steps", "reward before filtering", "informative groups", "staleness", "tokens thrown away"]
    return table([*head, "validation"], rows)


def times(steps: Sequence[Line]) -> list[str]:
    means = {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in TIMES}
    stages = {name: sum(step["stages_s"][name] for step in steps) / len(steps) for name in steps[0]["stages_s"]}
    rollouts = _sums([step["figures"] for step in steps])("rollouts") / sum(step["step_s"] for step in steps)
    row = [*(f"{means[name]:.2f} s" for name in TIMES), *(f"{value:.2f} s" for value in stages.values())]
    return table([*TIMES.values(), *(n[:-2].upper() for n in stages), "rollouts/s"], [[*row, f"{rollouts:.1f}"]])


def lags(steps: Sequence[Line]) -> list[str]:
    rows: list[list[str]] = []
    for lag in sorted({int(lag) for step in steps for lag in step["by_lag"]}):
        entries = [step["by_lag"][str(lag)] for step in steps if str(lag) in step["by_lag"]]
        tokens = sum(one["tokens"] for one in entries)
        mean = sum(one["tokens"] * one["mean"] for one in entries) / tokens
        rows.append([str(lag), f"{tokens:,}", f"{mean:.4f}", f"{median(one['p99'] for one in entries):.3f}"])
    return table(["lag", "tokens", "mean gap in nats", "median of the steps' 99th percentiles"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _sums(figures: Sequence[Line]) -> Callable[[str], float]:
    return lambda name: sum(one[name] for one in figures)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "–"


if __name__ == "__main__":
    main()
