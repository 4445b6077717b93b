"""Trains a model with TRL's AsyncGRPOTrainer on the rollouts of a Rollyard service (ROLLYARD_URL, ROLLYARD_TOKEN).

    python examples/trainers/trl_grpo.py --model Qwen/Qwen3-0.6B --vllm http://gpu1:8000 --tasks examples/tasks.jsonl

docs/how-to/train-with-trl.md says how to start vLLM and the service. With --cpu no weights are sent: the engine stays
as it is, and everything else is as it would be.
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
    parser.add_argument("--model", required=True, help="what is trained: a folder, or a name on the hub")
    parser.add_argument("--vllm", default="http://localhost:8000", help="the engine that weights are sent to")
    parser.add_argument("--tasks", type=Path, required=True, help="a JSON Lines file of tasks")
    parser.add_argument("--run", default="trl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--want", type=int, default=8, help="groups a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--keep", choices=["spread", "all"], default="spread", help="which groups are useful")
    parser.add_argument("--out", default="trl-out")
    parser.add_argument("--save-steps", type=int, help="a checkpoint after so many steps each")
    parser.add_argument("--resume", help="a checkpoint to go on from, with --save-steps and the tasks as they were")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = options()
    tasks = [json.loads(line) for line in args.tasks.read_text().splitlines() if line.strip()]
    with rollyard.Client() as yard:
        yard.create_run(args.run)
    # TRL counts samples: a step takes as many as a batch of the draw brings, and one micro-batch is read ahead.
    worker = RollyardRolloutWorker(
        run=args.run,
        tasks=tasks,
        group_size=args.group_size,
        want=args.want,
        max_staleness=args.max_staleness,
        keep=args.keep,
        id=f"{args.run}-draw" if args.save_steps else None,  # by which a later process finds it
        resume=args.resume,
    )
    config = AsyncGRPOConfig(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.want * args.group_size,
        token_budget=0,  # as many samples a step, whatever their length
        max_staleness=1000,  # the draw sees to that, and without a bias against what takes long
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
        train_dataset=Dataset.from_dict({"prompt": [""] * len(tasks)}),  # TRL wants one; the draw has the tasks
        rollout_worker=worker,
        weight_transfer=worker.weights() if args.cpu else None,
    )
    if not args.cpu and trainer.weight_transfer is not None:  # on the main process, TRL's own, over NCCL
        trainer.weight_transfer = worker.weights(trainer.weight_transfer)
    trainer.add_callback(worker.callback())
    trainer.train(resume_from_checkpoint=args.resume)


def without_a_gpu() -> None:
    """AsyncGRPOTrainer forwards a shared prefix once, with FlashAttention 3: here is its slow twin. And it asks the GPU
    for its name."""

    def varlen(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
        parts = []
        for i in range(len(q_ends) - 1):
            part = slice(q_ends[i], q_ends[i + 1]), slice(k_ends[i], k_ends[i + 1]), slice(k_ends[i], k_ends[i + 1])
            query, key, value = (x[where].transpose(0, 1)[None] for x, where in zip((q, k, v), part, strict=True))
            # A segment's queries are the last ones of the path that its keys are.
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
            found = scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            parts.append(found[0].transpose(0, 1))
        return torch.cat(parts)

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)


if __name__ == "__main__":
    main()
