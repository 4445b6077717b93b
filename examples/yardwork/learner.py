"""The adapter to train, its optimizer, one step of learning, and checkpoints."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lora import Lora
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM


class Learner:
    """The model with its adapter, the optimizer, and the time spent on learning."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
        self.lora = Lora(base, args.rank, 2.0 * args.rank)
        self.optimizer = self.new_optimizer()
        self.busy_s = 0.0
        self.has_bf16 = args.bf16 and can_bf16(args.device)
        if args.bf16 and not self.has_bf16:
            print("this CPU does not support bfloat16: using float32, which is faster here", flush=True)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.lora.parameters(), betas=(0.9, 0.99), weight_decay=0.0)

    def learn(self, rows: Sequence[dict[str, np.ndarray]], lr: float) -> tuple[float, list[torch.Tensor]]:
        """One step of the optimizer. A row has `ids` and `mask`, and for RL `old` logprobs (NaN: the current ones) and
        an `advantage`. Returns the norm of the gradient and each row's new logprobs."""
        started = time.monotonic()
        tokens = float(sum(row["mask"][1:].sum() for row in rows))
        row_logprobs: list[torch.Tensor | None] = [None] * len(rows)
        self.optimizer.zero_grad(set_to_none=True)
        for places in self._micro_batches(rows):
            part = [rows[place] for place in places]
            logprobs, counts = self._logprobs(part)
            if "advantage" in part[0]:
                device = logprobs.device
                old = torch.tensor(np.concatenate([r["old"][1:][r["mask"][1:] == 1] for r in part]), device=device)
                gain = torch.tensor([r["advantage"] for r in part], device=device).repeat_interleave(counts)
                old = torch.where(old.isnan(), logprobs.detach(), old)
                ratio, (low, high) = (logprobs.detach() - old).exp(), self.args.clip
                is_near = torch.where(gain > 0, ratio < 1 + high, ratio > 1 - low)
                loss = -(is_near * ratio.clamp(max=self.args.cap) * gain * logprobs).sum() / tokens
            else:
                loss = -logprobs.sum() / tokens
            loss.backward()
            for place, values in zip(places, logprobs.detach().split(counts.tolist()), strict=True):
                row_logprobs[place] = values
        norm = torch.nn.utils.clip_grad_norm_(self.lora.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        gap = float(norm)  # waits for the device
        self.busy_s += time.monotonic() - started
        return gap, [values for values in row_logprobs if values is not None]

    def _micro_batches(self, rows: Sequence[dict[str, np.ndarray]]) -> Iterator[list[int]]:
        """Groups rows of similar length, so that there is little padding."""
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]["ids"]))
        some: list[int] = []
        for place in order:
            if some and (len(some) + 1) * len(rows[place]["ids"]) > self.args.micro_tokens:
                yield some
                some = []
            some.append(place)
        yield some

    def _logprobs(self, rows: Sequence[dict[str, np.ndarray]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logprobs of all masked tokens, row by row, at temperature 1, as sampled; and their number per row."""
        width = max(len(row["ids"]) for row in rows)
        ids, mask = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
        for place, row in enumerate(rows):
            ids[place, : len(row["ids"])], mask[place, : len(row["ids"])] = row["ids"], row["mask"]
        device = torch.device(self.args.device)
        inputs, chosen = torch.tensor(ids, device=device), torch.tensor(mask[:, 1:] == 1, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.has_bf16):
            logits = self.lora.logits(self.lora.hidden(inputs)[:, :-1][chosen])
        return -cross_entropy(logits, inputs[:, 1:][chosen], reduction="none"), chosen.sum(1)

    # --- checkpoints

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Writes a checkpoint atomically."""
        fresh, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
        shutil.rmtree(fresh, ignore_errors=True)
        self.save_adapter(fresh)
        torch.save(self.optimizer.state_dict(), fresh / "optimizer.pt")
        (fresh / "state.json").write_text(json.dumps({**state, "busy_s": self.busy_s}))
        if has_saved(folder):  # also restores a checkpoint that a crash left under the old name
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def save_adapter(self, folder: Path) -> Path:
        self.lora.save(folder, self.args.model)
        return folder.resolve()

    def load(self, folder: Path, *, with_optimizer: bool = True) -> dict[str, Any]:
        self.lora.load(folder)
        state = json.loads((folder / "state.json").read_text())
        if with_optimizer:
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=self.args.device))
            self.busy_s = state["busy_s"]
        return state


def in_rounds(rows: Sequence[Any], seed: str, rounds: int, minibatches: int) -> list[list[Any]]:
    """The rows of each optimizer step: every round has all rows, in another order, in `minibatches` parts."""
    chance, size = random.Random(seed), -(-len(rows) // minibatches)
    orders = [chance.sample(rows, len(rows)) for _ in range(rounds)]
    return [order[start : start + size] for order in orders for start in range(0, len(rows), size)]


def anchors(rows: Sequence[dict[str, np.ndarray]], seed: str, count: int) -> list[dict[str, Any]]:
    """Some demonstrations, as if they had just been sampled (`old` is NaN) and were better than the rest."""
    some = random.Random(seed).sample(rows, min(len(rows), count))
    return [{**row, "old": np.full(len(row["ids"]), np.nan, np.float32), "advantage": 1.0} for row in some]


def rate(lr: float, step: int, rise: int, steps: int, fall: float) -> float:
    """The learning rate: rises to `lr` in `rise` steps, then falls to `fall` of it at the last step."""
    if step <= rise:
        return lr * step / rise
    return lr * (1 - (1 - fall) * (step - rise) / (steps - rise))


def can_bf16(device: str) -> bool:
    """A CPU without bfloat16 emulates it, tens of times slower."""
    return not device.startswith("cpu") or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_saved(folder: Path) -> bool:
    """Whether there is a checkpoint. Restores one if a crash interrupted its replacement."""
    old = folder.with_name(f"{folder.name}.old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    return folder.exists()
