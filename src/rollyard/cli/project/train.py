"""Trains a LoRA adapter of SmolLM2 for the environment PROJECT: a warm start on the oracle's answers, then RL.

An engine and a service must be running: `make engine` and `make serve`. The trainer shares only HTTP with them, and the
folder `adapter`, from which the engine loads each new version. `log.jsonl` has the figures.
"""

import argparse
import json
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
from lora import add_lora, save_adapter
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import rollyard
from rollyard.client.batching import collate
from rollyard.embedded.weights import find_model

NAME = "PROJECT"
ADAPTER, LOG = Path("adapter"), Path("log.jsonl")


class Trainer:
    """The model with its adapter, and the service that samples with it."""

    def __init__(self, args: argparse.Namespace, client: rollyard.Client) -> None:
        self.args, self.client, self.started = args, client, time.monotonic()
        torch.manual_seed(args.seed)
        disable_progress_bar()
        folder = find_model(args.model, notify=print)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.layers = add_lora(self.model)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.99), weight_decay=0.0)

    def warm_start(self, run: str) -> None:
        """Learns the oracle's answers to tasks.jsonl, in the tokens that the policy would have to sample."""
        self.client.create_run(run, defaults={"agent": {"name": "demonstrate"}})
        tasks = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
        records = self.client.wait_all([record.id for record in self.client.submit(tasks, run=run)])
        traces = [trace for record in records for trace in self.client.traces(record.id)]
        ids, mask = (padded([getattr(trace, column) for trace in traces]) for column in ("token_ids", "mask"))
        for epoch in range(1, self.args.epochs + 1):
            loss = self.learn(ids, mask, np.ones(len(ids), np.float32), self.args.warm_lr)
            self.log(phase="warm", epoch=epoch, loss=loss)
        self.push(1)

    def reinforce(self, run: str) -> None:
        """Learns from the rewards of its own samples. Each batch is sampled with the newest weights."""
        self.client.create_run(run, seed=self.args.seed)
        source = {"environment": NAME, "options": {"count": "2000", "seed": "1"}}
        draw = self.client.draw(run, source=source, keep=self.args.keep, max_staleness=0, on_stale="wait")
        for step in range(1, self.args.steps + 1):
            batch = draw.batch(want=self.args.groups)
            arrays = collate(batch.groups, advantages="grpo")
            self.learn(arrays["input_ids"], arrays["loss_mask"], arrays["advantages"], self.args.lr)
            self.push(1 + step)
            self.log(phase="rl", step=step, reward=batch.figures["reward_before"])
        draw.close()

    def learn(self, ids: np.ndarray, mask: np.ndarray, weights: np.ndarray, lr: float) -> float:
        """One step of the optimizer: the tokens under the mask become more likely, times the weight of their row."""
        tokens, chosen = torch.tensor(ids, dtype=torch.long), torch.tensor(mask[:, 1:] == 1)
        hidden = self.model.model(tokens).last_hidden_state[:, :-1][chosen]
        logprobs = -cross_entropy(self.model.lm_head(hidden), tokens[:, 1:][chosen], reduction="none")
        loss = -(torch.tensor(weights)[:, None].expand(chosen.shape)[chosen] * logprobs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss.item()

    def push(self, version: int) -> None:
        """Makes the adapter this version of the policy's weights."""
        save_adapter(self.layers, ADAPTER, self.args.model)
        with self.client.policy("default").update(version=version, mode="keep"):
            body = json.dumps({"path": str(ADAPTER.resolve()), "version": version}).encode()
            urllib.request.urlopen(f"{self.args.engine}/update_weights_from_folder", body, timeout=120).close()

    def test(self, phase: str) -> None:
        """Samples an answer to each held-out task."""
        options = {"split": "held_out", "count": str(self.args.held_out)}
        result = self.client.evaluate(source={"environment": NAME, "options": options}).result or {}
        self.log(phase=phase, pass_at_1=result["all"]["pass_at"]["1"]["mean"])

    def log(self, **facts: float | str) -> None:
        line = {**facts, "s": round(time.monotonic() - self.started)}
        shown = (f"{value:.2f}" if isinstance(value, float) else value for value in line.values())
        print(*(f"{name} {value} " for name, value in zip(line, shown, strict=True)), flush=True)
        with LOG.open("a") as file:
            file.write(json.dumps(line) + "\n")


def padded(rows: list[np.ndarray]) -> np.ndarray:
    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="the engine's model: a known name, or a folder")
    parser.add_argument("--epochs", type=int, default=4, help="of the warm start")
    parser.add_argument("--warm-lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=8, help="of RL")
    parser.add_argument("--lr", type=float, default=5e-4, help="of RL")
    parser.add_argument("--groups", type=int, default=4, help="of eight rollouts each, in a step")
    parser.add_argument("--keep", default="spread", help="which groups: spread (rewards that differ), or all")
    parser.add_argument("--held-out", type=int, default=50, help="tasks of a test")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    LOG.unlink(missing_ok=True)
    run = f"{NAME}-{int(time.time())}"
    with rollyard.Client() as client:
        trainer = Trainer(args, client)
        trainer.push(0)  # a new adapter changes nothing
        trainer.test("base")
        trainer.warm_start(f"{run}-warm")
        trainer.test("warm")
        trainer.reinforce(run)
        trainer.test("rl")


if __name__ == "__main__":
    main()
