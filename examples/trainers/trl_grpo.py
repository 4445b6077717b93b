"""Trains a model with TRL's AsyncGRPOTrainer on the rollouts of a Rollyard service (ROLLYARD_URL, ROLLYARD_TOKEN).

    python examples/trainers/trl_grpo.py --model Qwen/Qwen3-0.6B --vllm http://gpu1:8000 --tasks examples/tasks.jsonl

docs/how-to/train-with-trl.md explains how to start vLLM and the service. With --cpu no weights are sent: the engine
keeps its weights, and everything else works as with a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

import rollyard
from rollyard.trainers.trl import RollyardRolloutWorker


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="AsyncGRPO on Rollyard's rollouts")
    parser.add_argument("--model", required=True, help="the model to train: a folder, or a name on the hub")
    parser.add_argument("--vllm", default="http://localhost:8000", help="the engine that weights are sent to")
    parser.add_argument("--tasks", type=Path, required=True, help="a JSON Lines file of tasks")
    parser.add_argument("--run", default="trl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--want", type=int, default=8, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--keep", choices=["spread", "all"], default="spread", help="which groups to train on")
    parser.add_argument("--out", default="trl-out")
    parser.add_argument("--save-steps", type=int, help="save a checkpoint every N steps")
    parser.add_argument("--resume", help="a checkpoint to continue from, with the same --save-steps and tasks")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = options()
    tasks = [json.loads(line) for line in args.tasks.read_text().splitlines() if line.strip()]
    with rollyard.Client() as client:
        client.create_run(args.run)
    # TRL counts samples: a step takes as many as a batch of the draw contains, and one micro-batch is read ahead.
    worker = RollyardRolloutWorker(
        run=args.run,
        tasks=tasks,
        group_size=args.group_size,
        want=args.want,
        max_staleness=args.max_staleness,
        keep=args.keep,
        id=f"{args.run}-draw" if args.save_steps else None,  # a later process finds the draw by this id
        resume=args.resume,
    )
    config = AsyncGRPOConfig(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.want * args.group_size,
        token_budget=0,  # a fixed number of samples per step, whatever their length
        max_staleness=1000,  # the draw limits staleness, without a bias against slow rollouts
        vllm_server_base_url=args.vllm,
        report_to="none",
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        bf16=not args.cpu,
        use_cpu=args.cpu,
    )
    if args.cpu:
        without_a_gpu()
    trainer = AsyncGRPOTrainer(
        model=args.model,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(tasks)}),  # TRL requires one; the draw has the tasks
        rollout_worker=worker,
        weight_transfer=worker.weights() if args.cpu else None,
    )
    if not args.cpu and trainer.weight_transfer is not None:  # on the main process, TRL's own, over NCCL
        trainer.weight_transfer = worker.weights(trainer.weight_transfer)
    trainer.add_callback(worker.callback())
    trainer.train(resume_from_checkpoint=args.resume)


def without_a_gpu() -> None:
    """Replaces what AsyncGRPOTrainer needs a GPU for: FlashAttention 3, with which it forwards a shared prefix once, by
    a slow equivalent, and the query for the GPU's name."""

    def varlen(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
        parts = []
        for i in range(len(q_ends) - 1):
            part = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
            query, key, value = (x[where].transpose(0, 1)[None] for x, where in zip((q, k, v), part, strict=True))
            # A segment's queries are at the end of the path that its keys form.
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=softmax_scale, enable_gqa=True
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)


if __name__ == "__main__":
    main()
