"""verl's replay buffer with Rollyard's pause at the end of it, for `trainer.v1.trainer_mode=colocate_async`.

    trainer.v1.sampler.custom_sampler.path=pkg://rollyard.trainers.verl_sampler
    trainer.v1.sampler.custom_sampler.name=RollyardReplayBuffer

In that mode rollouts go on while verl trains, but not while weights change: verl samples a batch, stops its servers,
trains, writes the weights, starts them, and hands over the next prompts. It tells nobody before it stops them. The
buffer is the last of ours that it asks, so here the policy is paused; `RollyardAgentLoopManager` resumes it with the
next prompts. What was being sampled keeps its tokens, and goes on from the new weights.

Only verl imports this module, since a class of its own is below.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from rollyard.client import Client
from rollyard.trainers._verl_service import HOLDER


class RollyardReplayBuffer(ReplayBufferAsync):
    """See the module. `sampler_kwargs` may have url, token, policy, lease_s and retry_s, as `rollyard` has them."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch = super().sample(global_steps, partition_id, batch_size)
        if partition_id == "train":  # after validation no weights change
            given = self.sampler_kwargs or {}
            with Client(given.get("url"), given.get("token"), retry_s=given.get("retry_s", 600.0)) as pipeline:
                policy = pipeline.policy(given.get("policy", "default"), holder=HOLDER)
                policy.pause(mode="abort", lease_s=given.get("lease_s", 7200.0))
        return batch
