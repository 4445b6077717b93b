"""Writes the trainer's metrics: a line of JSON for each step, the console, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Log:
    """The trainer's metrics, in `metrics.jsonl` in its folder and at the other destinations."""

    def __init__(self, folder: Path, *, has_tensorboard: bool = False, wandb_project: str | None = None) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            self.rewind("", 0)  # removes the incomplete line that a killed process may have left
        self._board = self._wandb = None
        if has_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(folder / "tensorboard")
        if wandb_project:
            import wandb

            self._wandb = wandb.init(project=wandb_project, name=folder.name, id=folder.name, resume="allow")

    def lines(self) -> list[dict[str, Any]]:
        whole = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""  # whole lines only
        return [json.loads(line) for line in whole.splitlines()]

    def has_tested(self, what: str) -> bool:
        return any(line.get("what") == what and line["phase"] == "test" for line in self.lines())

    def rewind(self, phase: str, step: int) -> None:
        """Removes the lines of a phase after the checkpoint's step."""
        self._keep([line for line in self.lines() if line["phase"] != phase or line["step"] <= step])

    def forget(self, phase: str, *tested: str) -> None:
        """Removes all lines of a phase, and those tests."""
        self._keep([line for line in self.lines() if line["phase"] != phase and line.get("what") not in tested])

    def _keep(self, lines: Sequence[dict[str, Any]]) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fresh.replace(self.path)

    def write(self, phase: str, step: int, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"phase": phase, "step": step, **values}) + "\n")
        flat = {name: value for name, value in values.items() if isinstance(value, int | float)}
        what = f" {values['what']}" if "what" in values else ""
        print(f"{phase}{what} {step}: " + "  ".join(f"{n} {v:.4g}" for n, v in flat.items()), flush=True)
        if self._board:
            for name, value in flat.items():
                self._board.add_scalar(f"{phase}/{name}", value, step)
        if self._wandb:
            self._wandb.log({f"{phase}/{name}": value for name, value in flat.items()})


def by_lag(rows: Sequence[dict[str, Any]], logprobs: Sequence[Any], version: int) -> dict[str, Any]:
    """The gap between the trainer's and the engine's logprobs, by how many versions older the engine's weights were."""
    gaps_by_lag: dict[int, list[float]] = defaultdict(list)
    for row, new in zip(rows, logprobs, strict=True):
        chosen = row["mask"][1:] == 1
        gaps = np.abs(new.float().cpu().numpy() - row["old"][1:][chosen])
        for lag, gap in zip(version - row["versions"][1:][chosen], gaps, strict=True):
            gaps_by_lag[int(lag)].append(float(gap))
    return {
        str(lag): {"tokens": len(g), "mean": float(np.mean(g)), "p99": float(np.quantile(g, 0.99)), "max": max(g)}
        for lag, g in sorted(gaps_by_lag.items())
    }


def passed(result: dict[str, Any]) -> dict[str, float]:
    """pass@1 and its interval, from an evaluation's result."""
    estimate = result["all"]["pass_at"]["1"]
    return {"pass_at_1": estimate["mean"], "low": estimate["low"], "high": estimate["high"]}
