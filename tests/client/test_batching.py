"""Groups become arrays: every sampled token once, every rollout with weight one, no untrainable member in the loss."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.client.batching import advantages, collate, importance_weights
from rollyard.client.groups import Group, GroupRollout
from rollyard.client.records import Record, Trace

pytestmark = pytest.mark.slow

some = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine must not fail the test

REWARDS = st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.floats(-100, 100, width=32))


def trace(
    mask: list[int], *, index: int = 0, siblings: int = 1, trainable: bool = True, logprobs: bool = True, first: int = 1
) -> Trace:
    """Token k is `first` + k, its logprob −0.5 and its version 3 where the mask is 1."""
    owned = np.array(mask, dtype=np.uint8)
    return Trace(
        token_ids=np.arange(first, first + len(mask), dtype=np.int32),
        mask=owned,
        logprobs=np.where(owned == 1, -0.5, 0.0).astype(np.float32) if logprobs else None,
        versions=np.where(owned == 1, 3, -1).astype(np.int32),
        trainable=trainable and logprobs,
        index=index,
        siblings=siblings,
    )


def member(id: str, reward: float | None, *traces: Trace, trainable: bool = True) -> GroupRollout:
    return GroupRollout(id, int(id.rpartition("-")[2]), reward, trainable, Record(id), traces)


def group(id: str, *members: GroupRollout) -> Group:
    return Group(id, rollouts=members)


def of(*rewards: float | None, untrainable: tuple[int, ...] = ()) -> Group:
    return group(
        "g", *(member(f"g-{k}", r, trace([0, 1]), trainable=k not in untrainable) for k, r in enumerate(rewards))
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Any groups: with forks, members without a reward or untrainable, traces without logprobs or sampled tokens."""
    drawn: list[Group] = []
    for number in range(draw(st.integers(0, 3))):
        members: list[GroupRollout] = []
        for k in range(draw(st.integers(1, 4))):
            siblings = draw(st.integers(1, 3))
            traces = [
                trace(
                    draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)),
                    index=index,
                    siblings=siblings,
                    trainable=draw(st.booleans()),
                    logprobs=draw(st.integers(0, 4)) > 0,
                    first=draw(st.integers(1, 1000)),
                )
                for index in range(siblings)
            ]
            reward = draw(st.one_of(st.none(), REWARDS))
            members.append(member(f"g{number}-{k}", reward, *traces, trainable=draw(st.booleans())))
        drawn.append(group(f"g{number}", *members))
    return drawn


def learned(rollout: GroupRollout) -> list[Trace]:
    """The traces that must be in the loss, by the documentation and not by the code."""
    if not rollout.trainable or rollout.reward is None:
        return []
    return [t for t in rollout.traces if t.trainable and t.logprobs is not None and t.mask.any()]


@some
@given(groups(), st.integers(-5, 5))
def test_the_rows_are_the_traces_with_exact_padding(some_groups: list[Group], pad_id: int):
    arrays = collate(some_groups, pad_id=pad_id)
    rollouts = [rollout for each in some_groups for rollout in each.rollouts]
    expected = [(rollout, t) for rollout in rollouts for t in learned(rollout)]
    width = max((len(t) for _, t in expected), default=0)
    for name in ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions"):
        assert arrays[name].shape == (len(expected), width), name
    for row, (rollout, t) in enumerate(expected):
        padding = width - len(t)
        assert arrays["input_ids"][row].tolist() == t.token_ids.tolist() + [pad_id] * padding
        assert arrays["attention_mask"][row].tolist() == [1] * len(t) + [0] * padding
        assert arrays["loss_mask"][row].tolist() == t.mask.tolist() + [0] * padding
        assert t.logprobs is not None
        assert arrays["logprobs"][row].tolist() == t.logprobs.tolist() + [0.0] * padding
        assert arrays["versions"][row].tolist() == t.versions.tolist() + [-1] * padding
        assert rollouts[arrays["rollout"][row]] is rollout
        assert rollout in some_groups[arrays["group"][row]].rollouts
        assert arrays["rewards"][row] == np.float32(rollout.reward)
    kinds = {name: str(array.dtype) for name, array in arrays.items()}
    assert kinds == {
        "input_ids": "int32",
        "attention_mask": "uint8",
        "loss_mask": "uint8",
        "logprobs": "float32",
        "versions": "int32",
        "advantages": "float32",
        "rewards": "float32",
        "rollout": "int32",
        "group": "int32",
        "trace_weight": "float32",
    }


@some
@given(groups(), st.booleans())
def test_each_sampled_token_is_in_the_loss_once_and_each_rollout_has_weight_one(some_groups: list[Group], drop: bool):
    arrays = collate(some_groups, drop_untrainable=drop)
    rollouts = [rollout for each in some_groups for rollout in each.rollouts]
    assert arrays["loss_mask"].sum() == sum(int(t.mask.sum()) for rollout in rollouts for t in learned(rollout))
    for place, rollout in enumerate(rollouts):
        rows = arrays["rollout"] == place
        weight = arrays["trace_weight"][rows].sum()
        assert weight == pytest.approx(1.0 if learned(rollout) else 0.0)
    idle = arrays["loss_mask"].sum(axis=1) == 0
    assert (arrays["trace_weight"][idle] == 0).all() and (arrays["advantages"][idle] == 0).all()
    assert not drop or not idle.any()


@some
@given(groups())
def test_untrainable_rows_that_are_kept_are_not_trained_on(some_groups: list[Group]):
    arrays = collate(some_groups, drop_untrainable=False)
    with_logprobs = [t for each in some_groups for r in each.rollouts for t in r.traces if t.logprobs is not None]
    assert len(arrays["input_ids"]) == len(with_logprobs)
    assert (arrays["attention_mask"].sum(axis=1) == [len(t) for t in with_logprobs]).all()
    without = np.isnan(arrays["rewards"])
    assert without.sum() == sum(
        t.logprobs is not None for g in some_groups for r in g.rollouts if r.reward is None for t in r.traces
    )


@some
@given(st.lists(REWARDS, min_size=1, max_size=8), st.sampled_from(["grpo", "rloo"]))
def test_advantages_sum_to_zero_and_are_finite(rewards: list[float], kind):
    values = advantages([of(*rewards)], kind)
    assert len(values) == len(rewards) and all(np.isfinite(value) for value in values.values())
    assert sum(values.values()) == pytest.approx(0.0, abs=1e-3)
    if len(set(rewards)) == 1:
        assert set(values.values()) == {0.0}


@some
@given(st.lists(REWARDS, min_size=2, max_size=8))
def test_grpo_divides_by_the_population_spread_and_rloo_excludes_the_member(rewards: list[float]):
    spread = float(np.std(rewards))
    values = [*advantages([of(*rewards)], "rloo").values()]
    if spread < 1e-6:
        return
    for k, reward in enumerate(rewards):
        others = rewards[:k] + rewards[k + 1 :]
        assert values[k] == pytest.approx(reward - np.mean(others), rel=1e-6, abs=1e-6)
    shared = [*advantages([of(*rewards)], epsilon=0.0).values()]
    assert shared == pytest.approx([(reward - np.mean(rewards)) / spread for reward in rewards], rel=1e-6, abs=1e-6)


@some
@given(st.lists(REWARDS, min_size=2, max_size=6), REWARDS, st.sampled_from(["grpo", "rloo", "none"]))
def test_untrainable_members_are_not_in_the_baseline(rewards: list[float], stranger: float, kind):
    last = len(rewards)
    with_them = of(*rewards, stranger, None, untrainable=(last, last + 1))
    assert advantages([with_them], kind) == advantages([of(*rewards)], kind)
    rows = collate([with_them], advantages=kind)
    assert rows["rollout"].tolist() == list(range(last))


def test_advantages_are_computed_per_group():
    easy = group("a", *(member(f"a-{k}", r, trace([1])) for k, r in enumerate((1.0, 0.0))))
    hard = group("b", *(member(f"b-{k}", r, trace([1])) for k, r in enumerate((10.0, 30.0))))
    values = advantages([easy, hard], epsilon=0.0)
    assert values == {"a-0": 1.0, "a-1": -1.0, "b-0": -1.0, "b-1": 1.0}
    assert advantages([easy, hard], "none") == {"a-0": 1.0, "a-1": 0.0, "b-0": 10.0, "b-1": 30.0}


def test_advantages_of_a_group_of_one_are_zero():
    assert advantages([of(0.7)]) == advantages([of(0.7)], "rloo") == {"g-0": 0.0}
    assert advantages([of(0.7)], "none") == {"g-0": 0.7}
    assert advantages([of(0.7, untrainable=(0,))]) == {}
    assert advantages([of(0.1, 0.1, 0.1)]) == {"g-0": 0.0, "g-1": 0.0, "g-2": 0.0}


def test_a_trace_without_logprobs_is_never_a_row_of_zeros():
    with_logprobs, without_logprobs = (
        trace([0, 1, 1], siblings=2),
        trace([0, 1, 1, 1], index=1, siblings=2, logprobs=False),
    )
    for drop in (True, False):
        arrays = collate([group("g", member("g-0", 1.0, with_logprobs, without_logprobs))], drop_untrainable=drop)
        assert arrays["input_ids"].tolist() == [with_logprobs.token_ids.tolist()]
        assert arrays["trace_weight"].tolist() == [1.0], "the remaining trace has the weight of the whole rollout"


def test_a_trace_that_is_too_long_is_refused_and_neither_cut_nor_left_out():
    some_groups = [group("g", member("g-0", 1.0, trace([1] * 4)), member("g-1", 0.0, trace([1] * 9)))]
    assert collate(some_groups, max_tokens=9)["input_ids"].shape == (2, 9)
    with pytest.raises(ValueError, match=r"trace 0 of rollout g-1 has 9 tokens, more than 8.*max_context"):
        collate(some_groups, max_tokens=8)


def test_given_advantages_are_used_and_a_missing_one_is_an_error():
    some_groups = [of(1.0, 0.0)]
    assert collate(some_groups, advantages={"g-0": 2.0, "g-1": -3.0})["advantages"].tolist() == [2.0, -3.0]
    with pytest.raises(ValueError, match="g-1 is trainable and has no advantage"):
        collate(some_groups, advantages={"g-0": 2.0})
    with pytest.raises(ValueError, match="no kind 'ppo'"):
        collate(some_groups, advantages="ppo")  # type: ignore[arg-type]


def test_a_group_that_was_read_without_traces_is_an_error():
    with pytest.raises(ValueError, match="g-0 has no traces"):
        collate([group("g", member("g-0", 1.0))])


LOGPROBS = st.floats(-30, 0, width=32)


@some
@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.booleans()), min_size=1, max_size=12), st.floats(0.5, 10))
def test_importance_weights_are_the_ratios_up_to_the_cap(tokens: list[tuple[float, float, bool]], cap: float):
    new, old = ([[token[side] for token in tokens]] for side in (0, 1))
    mask = [[int(token[2]) for token in tokens]]
    weights = importance_weights(new, old, mask, cap=cap)
    assert weights.dtype == np.float32 and weights.shape == (1, len(tokens))
    for weight, (new_logprob, old_logprob, is_sampled) in zip(weights[0], tokens, strict=True):
        expected = min(np.exp(new_logprob - old_logprob), cap) if is_sampled else 0.0
        assert weight == pytest.approx(expected, rel=1e-5)
    whole = importance_weights(new, old, mask, cap=cap, level="sequence")
    product = np.exp(
        np.clip(
            sum(new_logprob - old_logprob for new_logprob, old_logprob, is_sampled in tokens if is_sampled), -700, 700
        )
    )
    for weight, (_, _, is_sampled) in zip(whole[0], tokens, strict=True):
        assert weight == pytest.approx(min(product, cap) if is_sampled else 0.0, rel=1e-4)


def test_importance_weights_ignore_padding_and_refuse_invalid_input():
    nan, inf = float("nan"), float("inf")
    assert importance_weights([[-1.0, nan]], [[-1.0, -inf]], [[1, 0]]).tolist() == [[1.0, 0.0]]
    assert importance_weights([[-inf, -1.0]], [[-1.0, -1.0]], [[1, 1]], level="sequence").tolist() == [[0.0, 0.0]]
    assert importance_weights([[900.0]], [[0.0]], [[1]]).tolist() == [[2.0]], "no overflow"
    with pytest.raises(ValueError, match="NaN"):
        importance_weights([[nan]], [[-1.0]], [[1]])
    with pytest.raises(ValueError, match="inf"):
        importance_weights([[inf, -inf]], [[-1.0, -1.0]], [[1, 1]], level="sequence")
    with pytest.raises(ValueError, match="shape"):
        importance_weights([[-1.0, -1.0]], [[-1.0]], [[1]])
    with pytest.raises(ValueError, match="cap"):
        importance_weights([[-1.0]], [[-1.0]], [[1]], cap=0)


@pytest.mark.parametrize("most", [1e15, 1e150, 1e300])
@pytest.mark.parametrize("kind", ["grpo", "rloo", "none"])
def test_advantages_of_huge_rewards_are_finite(most: float, kind: Literal["grpo", "rloo", "none"]):
    values = advantages([of(most, -most, 0.0)], kind)
    assert np.isfinite([*values.values()]).all() and values["g-0"] > 0
