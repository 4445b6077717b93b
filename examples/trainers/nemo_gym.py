"""Runs rows of a NeMo Gym dataset through `rollyard gym-agent`, as Gym's collector and NeMo RL do, and prints what a
trainer gets: tokens, mask, logprobs, and each rollout's advantage in its group. It needs neither Gym nor NeMo RL.

    rollyard gym-agent --port 8130 --server counter &
    python examples/trainers/nemo_gym.py rows.jsonl --agent http://127.0.0.1:8130 --repeats 4

docs/how-to/train-with-nemo-gym.md explains how to make rows and how to configure the agent in Gym.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import aiohttp

EPSILON = 1e-6


def tokens_of(result: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Ids, mask and logprobs of a result. Each prompt must start with all tokens before it."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        if prompt[: len(ids)] != ids:
            raise ValueError("the history of this rollout was rewritten")
        context = prompt[len(ids) :]
        ids += [*context, *generated]
        mask += [0] * len(context) + [1] * len(generated)
        logprobs += [0.0] * len(context) + item["generation_log_probs"]
    return ids, mask, logprobs


def advantages(rewards: list[float]) -> list[float]:
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + EPSILON) for reward in rewards]


def write_line(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")


async def main(arguments: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.strip()]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        async def play(row: dict[str, Any], task: int, repeat: int) -> dict[str, Any]:
            named = {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": "rollyard"}}
            async with http.post(f"{arguments.agent}/run", json={**row, **named}) as answer:
                answer.raise_for_status()
                return await answer.json()

        for task, row in enumerate(rows):
            group = await asyncio.gather(*(play(row, task, repeat) for repeat in range(arguments.repeats)))
            # Failed rollouts are in neither loss nor baseline; rollouts with mask_sample have no tokens.
            counted = [it for it in group if "_ng_failure_class" not in it and not it["mask_sample"]]
            failed = [it["_ng_failure_class"] for it in group if "_ng_failure_class" in it]
            write_line(f"task {task}: {len(counted)} of {len(group)} to be trained on", *failed)
            if not counted:
                continue
            for result, advantage in zip(counted, advantages([it["reward"] for it in counted]), strict=True):
                ids, mask, _ = tokens_of(result)
                size = f"{len(ids)} tokens, {sum(mask)} sampled"
                write_line(f"  reward {result['reward']:g}  advantage {advantage:+.2f}  {size}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rows of NeMo Gym through Rollyard")
    parser.add_argument("rows", type=Path, help="JSON Lines: rows of a Gym dataset")
    parser.add_argument("--agent", default="http://127.0.0.1:8130")
    parser.add_argument("--repeats", type=int, default=4)
    asyncio.run(main(parser.parse_args()))
