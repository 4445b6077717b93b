"""verl's replay buffer with a pause of Rollyard after each sample, for `trainer.v1.trainer_mode=colocate_async`.

    trainer.v1.sampler.custom_sampler.path=pkg://rollyard.trainers.verl_sampler
    trainer.v1.sampler.custom_sampler.name=RollyardReplayBuffer

In that mode rollouts continue while verl trains, but not while weights change: verl samples a batch, stops its servers,
trains, writes the weights, starts them, and passes the next prompts. It does not announce the stop. The buffer is the
last code of Rollyard that it calls before, so the policy is paused here; `RollyardAgentLoopManager` resumes it with the
next prompts. Running completions keep their tokens, and continue with the new weights.

Only verl imports this module, since it subclasses a class of verl.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from rollyard.client import Client
from rollyard.trainers._verl_service import HOLDER


class RollyardReplayBuffer(ReplayBufferAsync):
    """Pauses after each training batch. `sampler_kwargs` may have url, token, policy, lease_s and retry_s."""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch = super().sample(global_steps, partition_id, batch_size)
        if partition_id == "train":  # after validation no weights change
            options = self.sampler_kwargs or {}
            with Client(options.get("url"), options.get("token"), retry_s=options.get("retry_s", 600.0)) as client:
                policy = client.policy(options.get("policy", "default"), holder=HOLDER)
                policy.pause(mode="abort", lease_s=options.get("lease_s", 7200.0))
        return batch
