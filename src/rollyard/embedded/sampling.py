# pyright: reportMissingImports=false
"""From logits to sampled tokens, with the logprobs of exactly the distribution that they were sampled from.

A token is drawn from softmax(logits / temperature), cut to top_k and then to top_p, by inverting its cumulative
distribution at one random number. That number is a hash of the request's seed and of the token's place in its whole
sequence. So it depends neither on the batch nor on time, and a completion that was cut and is continued with the same
seed from the tokens so far is the one that was not cut; up to rounding, since a prompt and single tokens are summed in
another order, and in half precision that can turn a token.

At temperature 0 the likeliest token is taken. Its logprob is then that at temperature 1, as vLLM tells it: of the
distribution that it really came from, all mass on one token, the logprob would say nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY = 1e-5  # a temperature below it is 0, as in vLLM
NO_NUMBERS = "the model's logits are not numbers"
BLOCK = 256  # tokens of the vocabulary whose mass is summed before any of them is looked at


@dataclass(slots=True)  # not frozen: see `model.Piece`
class SamplingRule:
    """How one token is sampled."""

    temperature: float
    top_p: float
    top_k: int  # ≤ 0: all tokens
    seed: int
    place: int  # in the whole sequence
    top: int = 0  # so many of the likeliest tokens are told as well


@dataclass(slots=True)
class SampledDraw:
    token: int
    logprob: float
    tops: tuple[tuple[int, float], ...] = ()  # the likeliest; only those that could be sampled


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1), the same on every machine."""
    raw = hashlib.blake2b(b"%d:%d" % (seed, place), digest_size=8).digest()
    return (int.from_bytes(raw, "little") >> 12) / (1 << 52)  # 52 bits: times any mass it stays below that mass


def sample(logits: Tensor, draws: Sequence[SamplingRule]) -> list[SampledDraw]:
    """One token for each row of logits."""
    logprobs = processed(logits, draws)
    numbers = torch.tensor([uniform(one.seed, one.place) for one in draws], dtype=torch.float64, device=logits.device)
    tokens = _invert(logprobs, numbers[:, None])
    if any(one.temperature < GREEDY for one in draws):
        is_greedy = torch.tensor([one.temperature < GREEDY for one in draws], device=logits.device)[:, None]
        tokens = torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    found = logprobs.gather(1, tokens)[:, 0].tolist()
    if not all(map(math.isfinite, found)):
        raise ArithmeticError(NO_NUMBERS)
    most = max(one.top for one in draws)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(draws)
    if most > 0:
        likeliest = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
        pairs = zip(draws, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        tops = [
            tuple((t, v) for t, v in zip(ids[: one.top], values[: one.top], strict=True) if v != float("-inf"))
            for one, ids, values in pairs
        ]
    rows = zip(tokens[:, 0].tolist(), found, tops, strict=True)
    return [SampledDraw(token, logprob, top) for token, logprob, top in rows]


def draw_plain(logits: Tensor, heat: Tensor, numbers: Tensor, is_greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their logprobs, as `sample` gives them without top_k and top_p; all that is given is (rows, …) and on
    the device. Nothing of it is looked at, so a GPU can be told it beforehand."""
    logprobs = (logits.float() / heat).log_softmax(dim=-1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), _invert(logprobs, numbers))
    return tokens, logprobs.gather(1, tokens)


def _invert(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """The token at which each row's cumulative distribution passes its number in [0, 1), as (rows, 1).

    In two steps, first among blocks and then in one of them: a sum over the whole vocabulary has to be in float64
    (float32 loses its tail), and so most of it is not. No row depends on another, nor on how many there are."""
    rows, size = logprobs.shape
    blocks = -(-size // BLOCK)
    mass = logprobs.new_empty((rows, blocks * BLOCK))
    torch.exp(logprobs, out=mass[:, :size])
    mass[:, size:] = 0.0
    mass = mass.view(rows, blocks, BLOCK)
    ends = mass.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goals = numbers * ends[:, -1:]
    # right: a goal that meets a boundary belongs to the next one, so one without mass is never drawn
    block = torch.searchsorted(ends, goals, right=True).clamp_(max=blocks - 1)
    begins = ends.gather(1, (block - 1).clamp_(min=0)) * (block > 0)
    inner = mass.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    # the block's mass, summed in another order, may be less in the last bit: the goal stays below it
    goals = torch.minimum(goals - begins, inner[:, -1:] * (1 - 2**-52))
    return (block * BLOCK + torch.searchsorted(inner, goals, right=True)).clamp_(max=size - 1)


def processed(logits: Tensor, draws: Sequence[SamplingRule]) -> Tensor:
    """The logprobs of the distribution that is sampled from; −inf for what it leaves out."""
    heat = [one.temperature if one.temperature >= GREEDY else 1.0 for one in draws]
    logits = logits.float()
    if any(one != 1.0 for one in heat):
        logits = logits / torch.tensor(heat, dtype=torch.float32, device=logits.device)[:, None]
    size = logits.shape[-1]
    if any(0 < one.top_k < size or one.top_p < 1.0 for one in draws):
        logits = _cut(logits, draws)
    return logits.log_softmax(dim=-1)


def _cut(logits: Tensor, draws: Sequence[SamplingRule]) -> Tensor:
    """−inf for what is outside top_k, and then top_p: the fewest of the likeliest that have at least that mass."""
    size, device = logits.shape[-1], logits.device
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    kept = torch.tensor([one.top_k if 0 < one.top_k < size else size for one in draws], device=device)
    is_out = torch.arange(size, device=device)[None] >= kept[:, None]
    ordered = ordered.masked_fill(is_out, float("-inf"))
    before = ordered.double().softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = -1.0  # the likeliest always stays
    mass = torch.tensor([one.top_p if one.top_p < 1.0 else 2.0 for one in draws], dtype=torch.float64, device=device)
    ordered = ordered.masked_fill(before >= mass[:, None], float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered)
