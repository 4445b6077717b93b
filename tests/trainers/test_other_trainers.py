"""Runs the code of docs/how-to/other-trainers.md on constructed groups, and compares the results with its tables."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollyard.client import Group, GroupRollout, Record, Trace
from rollyard.core import Span

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "other-trainers.md"


@pytest.fixture(scope="module")
def page() -> SimpleNamespace:
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    return SimpleNamespace(**names)


def trace(mask: str, index: int = 0, **fields: object) -> Trace:
    """One character per token: 0 was not sampled, a digit was sampled by that version; spans are runs of digits."""
    digits = np.array([int(char) for char in mask])
    sampled = digits > 0
    spans = [Span(*match.span(), n, "stop", "") for n, match in enumerate(re.finditer("[1-9]+", mask))]
    known: dict[str, Any] = {
        "token_ids": np.arange(100, 100 + len(mask), dtype=np.int32),
        "mask": sampled.astype(np.uint8),
        "logprobs": np.where(sampled, -0.5, 0.0).astype(np.float32),
        "versions": np.where(sampled, digits, -1).astype(np.int32),
        "spans": tuple(spans),
        "trainable": True,
        "index": index,
        "model": "m",
    }
    return Trace(**{**known, **fields})


def rollout(index: int, reward: float | None, *traces: Trace, trainable: bool = True) -> GroupRollout:
    outcome = "completed" if index else "truncated"
    record = Record(id=f"g-{index}", reward=reward, trainable=trainable, outcome=outcome)
    return GroupRollout(record.id, index, reward, trainable, record, traces)


ONE = rollout(0, 1.0, trace("00330040"))
FORKED = rollout(1, 0.0, trace("0055"), trace("00000666", 1))
UNTRAINABLE = rollout(2, 0.25, trace("0011"), trainable=False)
UNSCORED = rollout(3, None, trace("0011"))
GROUP = Group("g", size=6, rollouts=(ONE, FORKED, UNTRAINABLE, UNSCORED))


def test_only_trainable_traces_are_learned(page: SimpleNamespace):
    assert [len(page.learned(each)) for each in GROUP.rollouts] == [1, 2, 0, 0]
    assert page.learned(rollout(0, 1.0, trace("01", logprobs=None), trace("00"), trace("01", trainable=False))) == []


def test_skyrl_gets_the_requested_number_of_rows_and_the_same_baseline(page: SimpleNamespace):
    rows = page.skyrl(GROUP, 6, eos_id=9)
    assert {name: len(values) for name, values in rows.items()} == dict.fromkeys(rows, 6)
    assert rows["prompt_token_ids"][:2] == [[100, 101], [100, 101, 102, 103, 104]]
    assert rows["response_ids"][0] == [102, 103, 104, 105, 106, 107]
    assert rows["loss_masks"] == [[1, 1, 0, 0, 1, 0], [1, 1, 1], *[[0]] * 4]
    assert rows["rewards"] == [1.0, 0.0, *[0.5] * 4] and np.mean(rows["rewards"]) == 0.5
    assert rows["stop_reasons"][:2] == ["length", "stop"]
    for name in ("loss_masks", "rollout_logprobs"):
        assert [*map(len, rows[name])] == [*map(len, rows["response_ids"])]
    output = page.skyrl_output([GROUP, GROUP], 6, 9, [*range(12)])
    metrics, trajectories = output.pop("rollout_metrics"), output.pop("trajectory_ids")
    assert output.pop("is_last_step") is None and trajectories == [*range(12)]
    assert {name: len(values) for name, values in output.items()} == dict.fromkeys(rows, 12)
    assert metrics == {"generate/avg_num_tokens": (6 + 3 + 4) / 6, "rollyard/rows_without_loss": 8}
    with pytest.raises(RuntimeError, match="nothing to learn from"):
        page.skyrl(Group("g", rollouts=(UNSCORED,)), 2, eos_id=9)


def test_slime_gets_every_trace_with_a_response_of_the_right_length(page: SimpleNamespace):
    (samples,) = page.slime([GROUP])
    assert [sample["metadata"]["rollyard_rollout"] for sample in samples] == ["g-0", "g-1", "g-1"]
    assert [sample["index"] for sample in samples] == [0, 1, 2]
    assert [sample["reward"] for sample in samples] == [1.0, 0.0, 0.0]
    assert samples[0]["weight_versions"] == ["3", "4"]
    for sample in samples:
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"]
        assert sample["loss_mask"][0] == 1 and len(sample["tokens"]) > sample["response_length"]


def test_prime_rl_gets_advantages_of_trainable_members_only(page: SimpleNamespace):
    samples = page.prime_rl([GROUP])
    assert [sample["advantages"][-2] or sample["advantages"][-1] for sample in samples] == [1.0, -1.0, -1.0]
    first = samples[0]
    assert first["token_ids"] == [*range(100, 108)]
    assert first["mask"] == [False, False, True, True, False, False, True, False]
    assert first["logprobs"] == [0.0, 0.0, -0.5, -0.5, 0.0, 0.0, -0.5, 0.0]
    assert first["advantages"] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert (first["temperatures"], first["env_name"]) == ([1.0] * 8, "rollyard")
    for sample in samples:
        assert len({len(sample[name]) for name in sample if name != "env_name"}) == 1, "one entry for each token"


def test_areal_gets_all_columns_and_rejects_untrainable_rollouts(page: SimpleNamespace):
    (episode,) = page.areal(ONE)
    assert {name: array.shape for name, array in episode.items()} == {**dict.fromkeys(episode, (1, 8)), "rewards": (1,)}
    assert episode["versions"][0].tolist() == [-1, -1, 3, 3, -1, -1, 4, -1]
    assert (episode["loss_mask"].dtype, episode["logprobs"].dtype) == (np.int32, np.float32)
    assert len(page.areal(FORKED)) == 2
    assert page.areal(UNTRAINABLE) is page.areal(UNSCORED) is None


def test_agent_lightning_gets_each_call_with_its_exact_prompt_and_then_the_reward(page: SimpleNamespace):
    first, second, reward = page.agent_lightning(ONE)
    assert first["data"]["response"]["prompt_token_ids"] == [100, 101]
    assert second["data"]["response"]["prompt_token_ids"] == [100, 101, 102, 103, 104, 105]
    assert [event["data"]["response"]["choices"][0]["token_ids"] for event in (first, second)] == [[102, 103], [106]]
    assert second["data"]["response"]["choices"][0]["logprobs"]["content"] == [{"logprob": -0.5}]
    assert [event["data"]["server"]["version"] for event in (first, second)] == [3, 4]
    assert reward == {"event_type": "reward", "data": {"value": 1.0}}
    assert page.agent_lightning(UNSCORED) is None
