"""Trains a model with verl's GRPO on the rollouts of a Rollyard service (ROLLYARD_URL, ROLLYARD_TOKEN).

    python examples/trainers/verl_grpo.py --model Qwen/Qwen3-0.6B --tasks examples/tasks.jsonl [settings of verl]

Writes the tasks as rows of verl's data and starts verl's own trainer on them, with Rollyard instead of verl's agent
loops; verl's rollout servers become the engines of the policy. docs/how-to/train-with-verl.md has the details.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

MANAGER = "rollyard.trainers.verl.RollyardAgentLoopManager"


def options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="verl's GRPO on Rollyard's rollouts")
    parser.add_argument("--model", required=True, help="the model to train: a folder, or a name on the hub")
    parser.add_argument("--tasks", type=Path, required=True, help="a JSON Lines file of tasks")
    parser.add_argument("--validate", type=Path, help="a JSON Lines file of tasks for validation; default: --tasks")
    parser.add_argument("--run", default="verl")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("verl-out"))
    return parser.parse_known_args(arguments)


def write_rows(tasks: Path, to: Path) -> Path:
    """Writes verl's data: the fields that verl requires, and the task as text, because parquet and JSON Lines merge the
    fields of all rows."""
    to.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for line in tasks.read_text().splitlines() if line.strip()]
    with to.open("w") as file:
        for index, line in enumerate(lines):
            environment = json.loads(line)["environment"]
            row = {
                "prompt": [{"role": "user", "content": f"{environment} task {index}"}],  # not used
                "data_source": environment,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
                "rollyard_task": line,
            }
            file.write(json.dumps(row) + "\n")
    return to


def settings(args: argparse.Namespace) -> list[str]:
    train = write_rows(args.tasks, args.out / "train.jsonl")
    validation = write_rows(args.validate or args.tasks, args.out / "validation.jsonl")
    return [
        f"data.train_files={train}",
        f"data.val_files={validation}",
        f"data.train_batch_size={args.prompts}",
        "data.max_prompt_length=2048",
        "data.max_response_length=6144",
        f"actor_rollout_ref.model.path={args.model}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={args.group_size}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "algorithm.adv_estimator=grpo",
        # If all rollouts of a prompt are lost, the prompt is replaced by another one.
        "trainer.v1.sampler.sync_refill_failed_groups=True",
        f"trainer.n_gpus_per_node={args.gpus}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={args.out}",
        "trainer.logger=[console]",
        f"+rollyard.run={args.run}",
    ]


def main() -> None:
    args, more = options(sys.argv[1:])
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings(args), *more]
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
