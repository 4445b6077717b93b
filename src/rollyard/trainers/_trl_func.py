"""`rollout_func` for TRL's GRPOTrainer: one rollout for each given prompt.

    rollouts = RollyardRolloutFunc(tasks.__getitem__, run="grpo")
    trainer = GRPOTrainer(..., reward_funcs=rollyard_reward, rollout_func=rollouts)

GRPOTrainer requests rollouts, waits and trains in turn, and computes advantages from the rewards itself: there is no
dynamic sampling, and no rollouts are carried over. Prefer `RollyardRolloutWorker` with AsyncGRPOTrainer; this function
is for existing uses of GRPOTrainer.

Each row is a rollout that ended. A rollout that infrastructure failed is replaced by a spare; a group that is still
short is tried again, `tries` times in all; then `RolloutsMissing` is raised, since GRPOTrainer needs every row.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollyard.client import Client, Group
from rollyard.core import Json, RollyardError, Task
from rollyard.trainers._trl_samples import RolloutsMissing, row_of

WAIT_S = 20.0
"""For one request for a group. The task's limits bound the total time."""


class RollyardRolloutFunc:
    """A `rollout_func` that runs the prompts as groups of a Rollyard service.

    `task_of` returns the task of a prompt in the dataset: the prompt only names it, as the environment gives the model
    its instruction. `run` is a run of the service. `push_weights(trainer)`, if given, sends the trained weights to the
    engines: it is called on every rank after each step of the trainer, while Rollyard is paused.
    """

    def __init__(
        self,
        task_of: Callable[[Any], Task | Mapping[str, Json]],
        url: str | None = None,
        token: str | None = None,
        *,
        run: str,
        spares: int = 1,
        tries: int = 2,
        push_weights: Callable[[Any], object] | None = None,
    ) -> None:
        self.__name__ = "rollyard_rollouts"
        self._task_of = task_of
        self._place = (url, token)
        self._run = run
        self._spares = spares
        self._tries = tries
        self._push = push_weights
        self._pushed_step = -1

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        with Client(*self._place) as client:
            self._push_weights(client, trainer)
            # The n copies of a prompt are adjacent; with several processes, each has a part of them.
            requests = [(prompt, len([*copies])) for prompt, copies in itertools.groupby(prompts)]
            rows = [row_of(rollout) for group in self._sample_groups(client, requests) for rollout in group.rollouts]
        if len(rows) != len(prompts):
            raise RolloutsMissing(f"{len(prompts)} prompts got {len(rows)} rollouts")
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "rollyard_reward": [row.reward for row in rows],
            "rollyard_rollout": [row.rollout for row in rows],
        }

    def _sample_groups(self, client: Client, requests: Sequence[tuple[Any, int]]) -> list[Group]:
        """Returns a complete group for each prompt, in order."""
        groups: dict[int, Group] = {}
        for _ in range(self._tries):
            started: dict[int, Group] = {}
            try:
                for place, (prompt, size) in enumerate(requests):
                    if place not in groups or groups[place].state != "complete":
                        task = self._task_of(prompt)
                        started[place] = client.group(task, run=self._run, size=size, spares=self._spares)
                for place in started:
                    while not started[place].is_ended:
                        started[place] = client.get_group(started[place].id, wait_s=WAIT_S)
            except BaseException:
                for group in started.values():
                    with contextlib.suppress(RollyardError):
                        client.cancel_group(group.id)
                raise
            groups |= started
        short = [group for group in groups.values() if group.state != "complete"]
        if short:
            raise RolloutsMissing(
                f"{len(short)} of {len(requests)} prompts have no complete group after {self._tries} tries; the first, "
                f"{short[0].id}, is {short[0].state}: {short[0].reason}"
            )
        return [client.get_group(groups[place].id, traces=True) for place in range(len(requests))]

    def _push_weights(self, client: Client, trainer: Any) -> None:
        if self._push is None or trainer.state.global_step == self._pushed_step:
            return
        processes = trainer.accelerator
        policy = client.policy(str(client.get_run(self._run).get("policy") or "default"))
        # The main process pauses; the others wait for it inside.
        with (
            policy.update(int(policy.status()["version"]) + 1)
            if processes.is_main_process
            else contextlib.nullcontext()
        ):
            processes.wait_for_everyone()
            self._push(trainer)
            processes.wait_for_everyone()
        processes.wait_for_everyone()  # no process requests rollouts before the update is over
        self._pushed_step = trainer.state.global_step


def rollyard_reward(
    completions: Sequence[Any], rollyard_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """GRPOTrainer's reward function: returns the environments' rewards. None means no reward, which is not 0."""
    if len(rollyard_reward) != len(completions):
        raise ValueError(f"{len(completions)} completions and {len(rollyard_reward)} rewards")
    return [*rollyard_reward]
