"""Runs in verl's own virtual environment: its data, queue, advantages and loss, on Rollyard's rollouts.

    verl_probe.py FOLDER TOKENIZER TASKS ENGINE

Everything but the GPU work is verl's own code: settings by hydra, rows by its RLHFDataset, the steps of two trainers
around `generate_sequences`, its replay buffer and TransferQueue, its GRPO and its policy loss. Writes FOLDER/seen.json.
"""

# pyright: reportMissingImports=false
# ruff: noqa: E402

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

gc.disable()  # during imports, which create hundreds of thousands of live objects

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import rollyard

gc.freeze()
gc.enable()

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "trainers" / "verl_grpo.py"
SIZE = 4


def configuration(folder: Path, tokenizer: str, tasks: Path) -> Any:
    """Returns the example's configuration, as verl's main composes it."""
    example = runpy.run_path(str(EXAMPLE))
    arguments = ["--model", tokenizer, "--tasks", str(tasks), "--group-size", str(SIZE), "--out", str(folder / "out")]
    # Every row exceeds these lengths, and no row is cut; the tasks have another limit.
    lengths = ["data.max_prompt_length=16", "data.max_response_length=16", "+rollyard.defaults.limits.max_context=4096"]
    args, more = example["options"]([*arguments, *lengths, "+rollyard.defaults.sampling.max_tokens=512"])
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        config = compose("ppo_trainer", [*example["settings"](args), *more])
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    return config


def new_uids(count: int) -> Any:
    return np.array([str(uuid.uuid4()) for _ in range(count)], dtype=object)


def loss_of(config: Any, data: Any) -> dict[str, Any]:
    """verl's loss of a policy that differs slightly from the one that sampled, and which tokens have a gradient."""
    logprobs = (data["rollout_log_probs"] - 0.05).requires_grad_()
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    loss, _ = get_policy_loss_fn("vanilla")(
        data["rollout_log_probs"], logprobs, data["advantages"], data["response_mask"], config=actor
    )
    loss.backward()
    ratio = torch.exp(torch.tensor(-0.05))
    plain = agg_loss(-data["advantages"] * ratio, data["response_mask"], "token-mean")
    return {"loss": loss.item(), "plain": plain.item(), "pulls": [(g != 0).int().tolist() for g in logprobs.grad]}


def as_data_proto(config: Any, manager: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One step of the older trainer: RayPPOTrainer.fit, without its workers."""
    batch = DataProto.from_single_dict(collate_fn(rows))
    batch.non_tensor_batch["uid"] = new_uids(len(batch))
    prompts = RayPPOTrainer._get_gen_batch(None, batch)
    prompts.meta_info["global_steps"] = 1
    generated = manager.generate_sequences(prompts.repeat(repeat_times=SIZE, interleave=True))
    timing = generated.meta_info.pop("timing")
    batch = batch.repeat(repeat_times=SIZE, interleave=True).union(generated)
    data = batch.batch
    data["token_level_scores"] = data["token_level_rewards"] = data["rm_scores"]
    batch = compute_advantage(batch, adv_estimator="grpo")
    unpadded = left_right_2_no_padding(data.clone())
    forwarded = torch.nested.nested_tensor_from_jagged(
        torch.rand(unpadded["input_ids"].values().shape), offsets=unpadded["input_ids"].offsets()
    )
    assert no_padding_2_padding(forwarded, unpadded).shape == data["responses"].shape
    metrics = compute_data_metrics(batch, use_critic=False)
    width = data["prompts"].shape[1]
    result_rows = []
    for i in range(len(batch)):
        is_there = data["attention_mask"][i].bool()
        result_rows.append(
            {
                "uid": batch.non_tensor_batch["uid"][i],
                "task": json.loads(batch.non_tensor_batch["rollyard_task"][i])["data"]["instruction"],
                "rollout": batch.non_tensor_batch["rollyard_rollout"][i],
                "prompt": data["prompts"][i][is_there[:width]].tolist(),
                "response": data["responses"][i][is_there[width:]].tolist(),
                "mask": data["response_mask"][i].tolist(),
                "logprobs": data["rollout_log_probs"][i].tolist(),
                "score": data["rm_scores"][i].sum().item(),
                "advantages": data["advantages"][i].tolist(),
                "turns": int(batch.non_tensor_batch["__num_turns__"][i]),
                "version": batch.non_tensor_batch["min_global_steps"][i],
            }
        )
    return {
        "rows": result_rows,
        "timing": timing,
        "score_mean": metrics["critic/score/mean"],
        "aborted": metrics["response/aborted_ratio"],
        **loss_of(config, data),
    }


def validated(manager: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validation of the older trainers; one of them awaits its rows."""
    batch = DataProto.from_single_dict(collate_fn(rows))
    batch.non_tensor_batch["uid"] = new_uids(len(batch))
    batch.meta_info = {"validate": True, "global_steps": 1}

    async def ask() -> Any:
        return await manager.generate_sequences(batch)

    generated = asyncio.run(ask())
    names, scores = generated.non_tensor_batch["rollyard_rollout"], generated.batch["rm_scores"].sum(-1)
    return [{"rollout": name, "score": score.item()} for name, score in zip(names, scores, strict=True)]


def at_another_temperature(config: Any, manager: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A group that cannot be trained on is a failure in the queue, and an error in the trainer's next call."""
    config.actor_rollout_ref.rollout.temperature = 0.5
    batch = tu.get_tensordict({**collate_fn([row]), "uid": new_uids(1)})
    tu.assign_non_tensor_data(batch, "global_steps", 3)
    (uid,) = batch["uid"]
    tq.kv_batch_put(
        keys=[uid], partition_id="train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 3}]
    )
    manager.generate_sequences(batch)
    while (status := tq.kv_list("train")["train"][uid]["status"]) in ("pending", "running"):
        time.sleep(0.1)
    try:
        manager.generate_sequences(batch)
    except RuntimeError as error:
        return {"status": status, "error": str(error), "rows": []}
    raise AssertionError("the trainer got no error")


def into_queue(config: Any, manager: Any, rows: list[dict[str, Any]], step: int, *, validate: bool) -> dict[str, Any]:
    """One step of the V1 trainer: prepare_step, sample, balance, advantage; or its validation."""
    partition = "val" if validate else "train"
    batch = tu.get_tensordict({**collate_fn(rows), "uid": new_uids(len(rows))})
    tu.assign_non_tensor_data(batch, "global_steps", step)
    if validate:
        tu.assign_non_tensor_data(batch, "validate", True)
    uids = list(batch["uid"])
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
    assert manager.generate_sequences(batch) is None
    buffer = ReplayBuffer("sync", {}, 8, "drop", {}, poll_interval=0.1)
    keys, _ = buffer.sample(global_steps=step, partition_id=partition, batch_size=len(uids))
    status = {uid: "finished" if uid in buffer.finished_keys[partition] else "failure" for uid in uids}
    tasks = {uid: json.loads(row["rollyard_task"])["data"]["instruction"] for uid, row in zip(uids, rows, strict=True)}
    result: dict[str, Any] = {"status": {tasks[uid]: status[uid] for uid in uids}}
    fields = [
        "uid",
        "prompts",
        "responses",
        "response_mask",
        "rm_scores",
        "rollout_log_probs",
        "num_turns",
        "extra_fields",
    ]
    if not validate:
        keys = upsample_batch_to_divisible_size(keys, 8, 0)
        old = tq.kv_batch_get(keys=keys.keys, partition_id=partition, select_fields=["rollout_log_probs"])
        old["old_log_probs"] = old.pop("rollout_log_probs")
        tq.kv_batch_put(keys=keys.keys, partition_id=partition, fields=old)
        PPOTrainer._compute_advantage(SimpleNamespace(config=config), keys, {})
        fields.append("advantages")
    data = tq.kv_batch_get(keys=keys.keys, partition_id=partition, select_fields=fields)
    result["rows"] = [
        {
            "key": key,
            "tag": tag,
            "task": tasks.get(data["uid"][i]),
            "rollout": (data["extra_fields"][i] or {}).get("rollyard_rollout"),
            "prompt": data["prompts"][i].tolist(),
            "response": data["responses"][i].tolist(),
            "mask": data["response_mask"][i].tolist(),
            "logprobs": data["rollout_log_probs"][i].tolist(),
            "scores": data["rm_scores"][i].tolist(),
            "turns": int(data["num_turns"][i]),
            "advantages": data["advantages"][i].tolist() if not validate else None,
        }
        for i, (key, tag) in enumerate(zip(keys.keys, keys.tags, strict=True))
    ]
    if not validate:
        names = ("response_mask", "rollout_log_probs", "advantages")
        result |= loss_of(config, {name: data[name].to_padded_tensor(0) for name in names})
    tq.kv_clear(keys=keys.keys, partition_id=partition)
    return result


def while_rollouts_go_on(config: Any, make: Any, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Two steps of verl's colocate_async: the second starts, with new weights, while the first's group still runs."""
    sampler = {"path": "pkg://rollyard.trainers.verl_sampler", "name": "RollyardReplayBuffer"}
    OmegaConf.update(config, "trainer.v1.trainer_mode", "colocate_async")
    OmegaConf.update(config, "trainer.v1.sampler.custom_sampler", sampler, force_add=True)
    OmegaConf.update(config, "actor_rollout_ref.rollout.temperature", 1.0)
    manager = make(config)
    trainer = SimpleNamespace(config=config, trainer_mode="colocate_async", _add_prompts_to_generate=None)
    buffer = PPOTrainer._build_replay_buffer(trainer)
    buffer.poll_interval = 0.1

    def ask(step: int, *names: str) -> None:
        batch = tu.get_tensordict({**collate_fn([rows[name] for name in names]), "uid": new_uids(len(names))})
        tu.assign_non_tensor_data(batch, "global_steps", step)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in names]
        tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
        manager.generate_sequences(batch)

    def take(step: int, count: int) -> list[dict[str, Any]]:
        keys, _ = buffer.sample(global_steps=step, partition_id="train", batch_size=count)
        data = tq.kv_batch_get(keys=keys.keys, partition_id="train", select_fields=["extra_fields"])
        tq.kv_clear(keys=keys.keys, partition_id="train")
        names = [fields["rollyard_rollout"] for fields in data["extra_fields"]]
        return [{"rollout": name, "tag": tag} for name, tag in zip(names, keys.tags, strict=True)]

    ask(8, "HELD", "PLAIN")
    first = take(8, 1)
    with rollyard.Client() as client:
        state = client.policy().status()
    ask(9, "PLAIN")
    second = take(9, 2)
    manager.close()
    return {"rows": [*first, *second], "first": first, "second": second, "state": state["state"]}


def main() -> None:
    folder, tokenizer, tasks, engine = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    config = configuration(folder, tokenizer, tasks)
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    # verl's servers: one scripted engine, registered in verl's load balancer.
    balancer = ray.remote(GlobalRequestLoadBalancer).remote(servers={engine.removeprefix("http://"): None})

    def make(config: Any) -> Any:
        return load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class).create(
            config=config,
            llm_client=LLMServerClient(config, load_balancer_handle=balancer),
            teacher_client=None,
            reward_loop_worker_handles=[],
        )

    manager = make(config)
    dataset = create_rl_dataset(config.data.train_files, config.data, AutoTokenizer.from_pretrained(tokenizer), None)
    *rows, held_row = [dataset[i] for i in range(len(dataset))]
    recorded = {
        "data_proto": as_data_proto(config, manager, rows),
        "train": into_queue(config, manager, rows, 2, validate=False),
        "validation": into_queue(config, manager, rows, 2, validate=True),
        "awaited": {"rows": validated(manager, rows)},
        "refused": at_another_temperature(config, manager, rows[0]),
    }
    manager.close()
    recorded["async"] = while_rollouts_go_on(config, make, {"PLAIN": rows[0], "HELD": held_row})
    (folder / "seen.json").write_text(json.dumps(recorded))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
