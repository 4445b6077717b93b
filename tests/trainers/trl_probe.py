"""Runs in TRL's own virtual environment: real trainers with a tiny random model, on Rollyard's rollouts.

Each line of stdin is an object: `mode` (async, again, killed, resumed, sync, real), `folder`, `model` (a tokenizer, or
for `real` a model), `tasks` and `environ`. A fork of this process runs the mode, since importing TRL takes longer than
most modes, and a line of stdout reports its exit status. What it recorded is in FOLDER/seen.json, which the test
compares with the service's traces. All modes but `sync` run examples/trainers/trl_grpo.py unchanged, and compute each
loss once more, by a plain forward pass of each sample alone.
"""

# pyright: reportMissingImports=false
# ruff: noqa: E402

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import runpy
import signal
import sys
import traceback
from collections import deque
from pathlib import Path
from typing import Any

gc.disable()  # during imports, which create hundreds of thousands of live objects

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.initialization import no_init_weights
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout

import rollyard
from rollyard.trainers import trl
from rollyard.trainers.trl import RollyardRolloutFunc, RollyardRolloutWorker, RollyardWeights, rollyard_reward

gc.freeze()
gc.enable()

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "trainers" / "trl_grpo.py"
WANT, SIZE = 2, 4


def tiny_model(folder: Path, tokenizer: str) -> Path:
    torch.manual_seed(0)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(loaded) + 16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        eos_token_id=loaded.eos_token_id,
        pad_token_id=loaded.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def plain_loss(trained: Any, samples: list[dict[str, Any]]) -> float:
    """GRPO's clipped loss over the masked tokens, each sample by itself, with ordinary attention."""
    with no_init_weights():  # all weights are loaded
        model = AutoModelForCausalLM.from_config(copy.deepcopy(trained.config), attn_implementation="eager")
    model.load_state_dict(trained.state_dict())
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor(sample["input_ids"])[None]
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        is_sampled = torch.tensor(sample["completion_mask"])[1:] == 1
        ratio = torch.exp(logprobs - torch.tensor(sample["old_log_probs"])[1:])[is_sampled]
        signal = torch.tensor(float(sample["advantage"]))
        total += float(-torch.min(ratio * signal, ratio.clamp(0.8, 1.2) * signal).sum())
        count += int(is_sampled.sum())
    return total / count


class Died(Exception):
    pass


class Spy:
    """Records each step's loss of AsyncGRPOTrainer with its terms, and its calls of the worker."""

    def __init__(self) -> None:
        self.collated: deque[list[dict[str, Any]]] = deque()
        self.steps: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.dies_in: int | None = None
        self._before(DataCollatorForRollout, "torch_call", self._collated)
        self._before(RollyardRolloutWorker, "pause", lambda: self.calls.append("pause"))
        self._before(RollyardRolloutWorker, "start", lambda: self.calls.append("start"))
        self._before(RollyardRolloutWorker, "update_model_version", lambda version: self.calls.append(version))
        compute_loss = AsyncGRPOTrainer.compute_loss

        def recording_loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            samples = self.collated.popleft()
            if self.dies_in == len(self.steps) + 1:
                raise Died
            expected = plain_loss(trainer.accelerator.unwrap_model(model), samples)
            loss = compute_loss(trainer, model, inputs, *args, **kwargs)
            self._saw(inputs, len(samples), {"loss": loss.item(), "plain_loss": expected})
            self.steps[-1]["ratio"] = trainer._metrics["train"]["ratio"][-1]
            return loss

        AsyncGRPOTrainer.compute_loss = recording_loss

    def _before(self, owner: Any, name: str, record: Any) -> None:
        real = getattr(owner, name)

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            record(*args)
            return real(this, *args, **kwargs)

        setattr(owner, name, call)

    def _collated(self, rows: Any) -> None:
        self.collated.append([sample for row in rows[0] for sample in row.samples])

    def _saw(self, inputs: Any, samples: int, losses: dict[str, float]) -> None:
        row = {name: value[0] for name, value in inputs.items()}
        is_term = row["token_index"] >= 0
        segment = row["segment_id"][is_term]
        targets = row["shift_labels"][row["token_index"][is_term]]
        columns = targets, row["old_log_probs"][is_term], row["advantages"][is_term]
        terms = [[column[segment == i].tolist() for column in columns] for i in range(samples)]
        self.steps.append({**losses, "terms": terms})

    def run(self, folder: Path, model: Path, tasks: Path, *more: object) -> dict[str, Any]:
        """Runs the example as a command line."""
        self.collated.clear()
        self.steps, self.calls = [], []
        known = ["--cpu", "--model", model, "--tasks", tasks, "--out", folder / "out", "--max-staleness", 0]
        known += ["--want", WANT, "--group-size", SIZE]
        sys.argv = [str(word) for word in (EXAMPLE, *known, *more)]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return {"steps": self.steps, "calls": self.calls}


def run_async(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    return Spy().run(folder, model, tasks, "--steps", 5)


def run_real(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    """One step, of the model that the engine has; all groups are kept."""
    return Spy().run(folder, model, tasks, "--steps", 1, "--keep", "all", "--want", 1, "--group-size", 2)


def run_again(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    """Dies in the fourth step, after the third's weights were sent; then continues from the second's checkpoint."""
    spy, save = Spy(), ("--steps", 4, "--save-steps", 2)
    spy.dies_in = 4
    with contextlib.suppress(Died):
        spy.run(folder, model, tasks, *save)
    first = {"steps": spy.steps, "calls": spy.calls}
    spy.dies_in = None
    checkpoint = folder / "out" / "checkpoint-2"
    state = json.loads((checkpoint / "rollyard.json").read_text())
    return {"first": first, "state": state, "again": spy.run(folder, model, tasks, *save, "--resume", checkpoint)}


KILLED = ("--steps", 4, "--save-steps", 1)
KILLED_LEASE_S = 10.0
"""Replaces `LEASE_S`: the next trainer waits until the lease of the killed one has expired."""


def run_killed(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    """Is killed while it writes the weights of its third step, when the policy is paused."""
    spy, send = Spy(), RollyardWeights.send_weights

    def killing(weights: Any, iterator: Any) -> None:
        send(weights, iterator)
        if len(spy.steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(RollyardWeights, "send_weights", killing)  # noqa: B010
    trl.LEASE_S = KILLED_LEASE_S
    return spy.run(folder, model, tasks, *KILLED)


def run_resumed(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    """Continues from the first checkpoint, although the second acknowledged more."""
    checkpoint = folder / "out" / "checkpoint-1"
    return Spy().run(folder, model, tasks, *KILLED, "--resume", checkpoint)


def run_sync(folder: Path, model: Path, tasks: Path) -> dict[str, Any]:
    known = {f"task {n}": json.loads(line) for n, line in enumerate(tasks.read_text().splitlines())}
    batches: list[dict[str, Any]] = []
    with rollyard.Client() as client:
        client.create_run("trl")
    pushed: list[int] = []
    rollouts = RollyardRolloutFunc(
        known.__getitem__, run="trl", push_weights=lambda trainer: pushed.append(trainer.state.global_step)
    )

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        columns = rollouts(prompts, trainer)
        batches.append({"prompts": prompts, **{name: [*value] for name, value in columns.items()}})
        return columns

    class RecordingTrainer(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            names = ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps", "advantages")
            batches[-1].setdefault("loss", []).append(
                {"loss": loss.item(), **{name: inputs[name].tolist() for name in names}}
            )
            return loss

    trainer = RecordingTrainer(
        model=str(model),
        reward_funcs=rollyard_reward,
        args=GRPOConfig(
            str(folder / "out"),
            max_steps=2,
            per_device_train_batch_size=2 * SIZE,
            num_generations=SIZE,
            report_to="none",
            save_strategy="no",
            bf16=False,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [*known]}),
        rollout_func=rollout_func,
    )
    trainer.train()
    return {"batches": batches, "pushed": pushed}


MODES = {
    "async": run_async,
    "again": run_again,
    "killed": run_killed,
    "resumed": run_resumed,
    "real": run_real,
    "sync": run_sync,
}


def probe(mode: str, folder: Path, model: Path, tasks: Path) -> None:
    model_folder = model if mode == "real" else tiny_model(folder / "model", str(model))
    (folder / "seen.json").write_text(json.dumps(MODES[mode](folder, model_folder, tasks)))


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            os.environ.update(asked.pop("environ"))
            status = 1
            try:
                probe(asked.pop("mode"), **{name: Path(value) for name, value in asked.items()})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        print(f"ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)


if __name__ == "__main__":
    main()
