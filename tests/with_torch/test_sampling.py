# pyright: reportMissingImports=false
"""Samples have the requested distribution, and their logprobs are those of that distribution."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from rollyard.embedded.transformer.sampling import BLOCK, SamplingRule, _invert, processed, sample, uniform

LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.4])


def draw(place: int = 0, **fields: float) -> SamplingRule:
    values: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 3, "place": place, **fields}
    return SamplingRule(**values)  # type: ignore[arg-type]


def by_hand(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Returns probabilities by the definition: scale, keep the k most likely, then the fewest with enough mass."""
    weights = {i: math.exp(float(v) / temperature) for i, v in enumerate(LOGITS)}
    order = sorted(weights, key=lambda i: -weights[i])
    order = order[:top_k] if top_k > 0 else order
    total = sum(weights[i] for i in order)
    selected: list[int] = []
    for i in order:
        selected.append(i)
        if sum(weights[j] for j in selected) / total >= top_p:
            break
    total = sum(weights[i] for i in selected)
    return {i: weights[i] / total for i in selected}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [-1, 1, 3, 100])
@pytest.mark.parametrize("top_p", [0.3, 0.75, 1.0])
def test_logprobs_are_those_of_the_processed_distribution(temperature: float, top_k: int, top_p: float):
    other = draw(temperature=2.0)  # in the same batch, and must not be affected
    row, plain = processed(
        torch.stack([LOGITS, LOGITS]), [draw(temperature=temperature, top_k=top_k, top_p=top_p), other]
    )
    expected = by_hand(temperature, top_k, top_p)
    for token in range(len(LOGITS)):
        assert math.exp(row[token]) == pytest.approx(expected.get(token, 0.0), abs=1e-6)
    assert dict(enumerate(plain.exp().tolist())) == pytest.approx(by_hand(2.0, -1, 1.0), abs=1e-6)


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (3, 1.0), (-1, 0.8)])
def test_tokens_are_as_frequent_as_they_are_likely(top_k: int, top_p: float):
    count = 20_000
    draws = [draw(place, temperature=1.3, top_k=top_k, top_p=top_p) for place in range(count)]
    drawn = sample(LOGITS.expand(count, -1), draws)
    counts, expected = Counter(one.token for one in drawn), by_hand(1.3, top_k, top_p)
    assert counts.keys() == expected.keys(), "an excluded token was sampled"
    for token, chance in expected.items():
        assert counts[token] / count == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / count))
    for one in drawn[:50]:
        assert one.logprob == pytest.approx(math.log(expected[one.token]), abs=1e-5)


def test_temperature_0_takes_the_most_likely_token_with_its_logprob_at_1():
    (one,) = sample(LOGITS[None], [draw(temperature=0.0, top=2)])
    assert one.token == 0
    assert one.logprob == pytest.approx(math.log(by_hand(1.0, -1, 1.0)[0]), abs=1e-5)
    assert [token for token, _ in one.tops] == [0, 3]


def test_a_sample_depends_only_on_its_seed_and_position():
    single = [sample(LOGITS[None], [draw(place)])[0].token for place in range(64)]
    batch = sample(LOGITS.expand(64, -1), [draw(place) for place in reversed(range(64))])
    assert [one.token for one in reversed(batch)] == single
    assert [sample(LOGITS[None], [draw(place, seed=4)])[0].token for place in range(64)] != single
    assert uniform(3, 0) == uniform(3, 0) != uniform(3, 1)
    assert all(0 <= uniform(seed, place) < 1 for seed in range(40) for place in range(40))


@pytest.mark.parametrize("size", [5, BLOCK, 3 * BLOCK, 49_152, 50_257])
def test_invert_equals_a_search_in_the_whole_cumulative_distribution(size: int):
    generator = torch.Generator().manual_seed(size)
    logprobs = (3 * torch.randn((64, size), generator=generator)).log_softmax(dim=-1)
    numbers = torch.rand((64, 1), generator=generator, dtype=torch.float64)
    masses = logprobs.exp().double().cumsum(dim=-1)
    expected = torch.searchsorted(masses, numbers * masses[:, -1:], right=True)
    assert torch.equal(_invert(logprobs, numbers), expected)
    single = [_invert(logprobs[row : row + 1], numbers[row : row + 1]).item() for row in range(64)]
    assert single == expected[:, 0].tolist(), "a row depends on another"


def test_a_token_without_mass_is_never_sampled():
    """Tokens with mass at the edges of blocks, surrounded by blocks without mass."""
    for tokens in ([BLOCK], [2 * BLOCK - 1], [BLOCK - 1, BLOCK], [BLOCK + 3, 3 * BLOCK + 1, 3 * BLOCK + 2]):
        logits = torch.full((1, 5 * BLOCK + 7), -math.inf)
        logits[0, tokens] = torch.linspace(0.1, 0.7, len(tokens))
        logprobs = logits.log_softmax(dim=-1)
        for number, expected in ((0.0, tokens[0]), (1 - 2**-52, tokens[-1])):
            assert _invert(logprobs, torch.tensor([[number]], dtype=torch.float64)).item() == expected
        drawn = {sample(logits, [draw(place)])[0].token for place in range(200)}
        assert drawn == set(tokens)


def test_non_finite_logits_raise_an_error():
    with pytest.raises(ArithmeticError):
        sample(torch.full((1, 4), math.nan), [draw()])
