"""`rollout_func` for TRL's GRPOTrainer: the prompts as they were handed over, one rollout for each.

    rollouts = RollyardRolloutFunc(tasks.__getitem__, run="grpo")
    trainer = GRPOTrainer(..., reward_funcs=rollyard_reward, rollout_func=rollouts)

GRPOTrainer asks, waits and trains in turn, and makes its own advantages of the rewards: no dynamic sampling, nothing is
carried over. `RollyardRolloutWorker` with AsyncGRPOTrainer is the better way; this is for those who have a GRPOTrainer.

Each row is a rollout that ended. One that infrastructure failed is replaced by a spare; a group that is still short is
tried again, `tries` times in all; then `RolloutsMissing` is raised, as GRPOTrainer has no place for "none".
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
"""For one look at a group; how long it may take is for the task's own limits to say."""


class RollyardRolloutFunc:
    """See the module.

    `task_of` says which task a prompt of the dataset means: the prompt itself is only its name, as the environment
    tells the model what to do. `run` is a run of the service. `push_weights(trainer)`, if given, brings the trained
    weights to the engines: it is called on every rank whenever the trainer has made a step, while Rollyard is paused.
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
        with Client(*self._place) as pipeline:
            self._push_weights(pipeline, trainer)
            # The n copies of a prompt stand together; with several processes, each has its part of them.
            wanted = [(prompt, len([*copies])) for prompt, copies in itertools.groupby(prompts)]
            rows = [row_of(rollout) for group in self._roll(pipeline, wanted) for rollout in group.rollouts]
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

    def _roll(self, pipeline: Client, wanted: Sequence[tuple[Any, int]]) -> list[Group]:
        """A whole group for each, in order."""
        found: dict[int, Group] = {}
        for _ in range(self._tries):
            started: dict[int, Group] = {}
            try:
                for place, (prompt, size) in enumerate(wanted):
                    if place not in found or found[place].state != "complete":
                        task = self._task_of(prompt)
                        started[place] = pipeline.group(task, run=self._run, size=size, spares=self._spares)
                for place in started:
                    while not started[place].is_ended:
                        started[place] = pipeline.get_group(started[place].id, wait_s=WAIT_S)
            except BaseException:
                for group in started.values():
                    with contextlib.suppress(RollyardError):
                        pipeline.cancel_group(group.id)
                raise
            found |= started
        short = [group for group in found.values() if group.state != "complete"]
        if short:
            raise RolloutsMissing(
                f"{len(short)} of {len(wanted)} prompts have no whole group after {self._tries} tries; the first, "
                f"{short[0].id}, is {short[0].state}: {short[0].reason}"
            )
        return [pipeline.get_group(found[place].id, traces=True) for place in range(len(wanted))]

    def _push_weights(self, pipeline: Client, trainer: Any) -> None:
        if self._push is None or trainer.state.global_step == self._pushed_step:
            return
        processes = trainer.accelerator
        policy = pipeline.policy(str(pipeline.get_run(self._run).get("policy") or "default"))
        # The others wait inside for the main process, whose pause it is.
        with (
            policy.update(int(policy.status()["version"]) + 1)
            if processes.is_main_process
            else contextlib.nullcontext()
        ):
            processes.wait_for_everyone()
            self._push(trainer)
            processes.wait_for_everyone()
        processes.wait_for_everyone()  # nobody asks for rollouts before it is over
        self._pushed_step = trainer.state.global_step


def rollyard_reward(
    completions: Sequence[Any], rollyard_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """GRPOTrainer's reward function: what the environments said. None: there is none, which is not 0."""
    if len(rollyard_reward) != len(completions):
        raise ValueError(f"{len(completions)} completions and {len(rollyard_reward)} rewards")
    return [*rollyard_reward]
