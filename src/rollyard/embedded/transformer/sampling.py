# pyright: reportMissingImports=false
"""Samples tokens from logits, and returns the logprobs of exactly the distribution that was sampled.

A token is drawn from softmax(logits / temperature), cut to top_k and then to top_p, by inverting its cumulative
distribution at one random number. That number is a hash of the request's seed and of the token's position in its
sequence, so it depends neither on the batch nor on time. A completion that is interrupted and continued with the same
seed equals an uninterrupted one, up to rounding: a prompt and single tokens are summed in a different order, and in
half precision that can change a token.

At temperature 0 the most likely token is taken, and its logprob is the one at temperature 1, as in vLLM. In the actual
distribution all mass is on one token, so its logprob would carry no information.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY = 1e-5  # lower temperatures count as 0, as in vLLM
NO_NUMBERS = "the model's logits are not finite"
BLOCK = 256  # tokens of the vocabulary whose mass is summed first; see `_invert`


@dataclass(slots=True)  # not frozen: see `base.Piece`
class SamplingRule:
    """How to sample one token."""

    temperature: float
    top_p: float
    top_k: int  # ≤ 0: all tokens
    seed: int
    place: int  # position in the whole sequence
    top: int = 0  # how many top logprobs to return


@dataclass(slots=True)
class SampledDraw:
    token: int
    logprob: float
    tops: tuple[tuple[int, float], ...] = ()  # most likely first; only tokens that could be sampled


def uniform(seed: int, place: int) -> float:
    """Returns a number in [0, 1), the same on every machine."""
    raw = hashlib.blake2b(b"%d:%d" % (seed, place), digest_size=8).digest()
    return (int.from_bytes(raw, "little") >> 12) / (1 << 52)  # 52 bits: the product with any mass stays below that mass


def sample(logits: Tensor, draws: Sequence[SamplingRule]) -> list[SampledDraw]:
    """Samples one token for each row of logits."""
    logprobs = processed(logits, draws)
    numbers = torch.tensor([uniform(one.seed, one.place) for one in draws], dtype=torch.float64, device=logits.device)
    tokens = _invert(logprobs, numbers[:, None])
    if any(one.temperature < GREEDY for one in draws):
        is_greedy = torch.tensor([one.temperature < GREEDY for one in draws], device=logits.device)[:, None]
        tokens = torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    chosen_logprobs = logprobs.gather(1, tokens)[:, 0].tolist()
    if not all(map(math.isfinite, chosen_logprobs)):
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
    rows = zip(tokens[:, 0].tolist(), chosen_logprobs, tops, strict=True)
    return [SampledDraw(token, logprob, top) for token, logprob, top in rows]


def draw_plain(logits: Tensor, temperatures: Tensor, numbers: Tensor, is_greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens and logprobs as `sample` does without top_k and top_p. All arguments are (rows, …) on the device.
    No value is read on the host, so it can be recorded as a CUDA graph."""
    logprobs = (logits.float() / temperatures).log_softmax(dim=-1)
    tokens = torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), _invert(logprobs, numbers))
    return tokens, logprobs.gather(1, tokens)


def _invert(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """Returns the token at which each row's cumulative distribution passes its number in [0, 1), as (rows, 1).

    It works in two steps, first among blocks and then within one: a cumulative sum needs float64 (float32 loses the
    tail), and this way most of the vocabulary avoids it. No row depends on another or on the number of rows."""
    rows, size = logprobs.shape
    blocks = -(-size // BLOCK)
    mass = logprobs.new_empty((rows, blocks * BLOCK))
    torch.exp(logprobs, out=mass[:, :size])
    mass[:, size:] = 0.0
    mass = mass.view(rows, blocks, BLOCK)
    ends = mass.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    thresholds = numbers * ends[:, -1:]
    # right: a goal on a boundary belongs to the next block or token, so one without mass is never drawn
    block = torch.searchsorted(ends, thresholds, right=True).clamp_(max=blocks - 1)
    begins = ends.gather(1, (block - 1).clamp_(min=0)) * (block > 0)
    inner = mass.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    # the block's mass, summed in another order, may be lower in the last bit: keep the goal below it
    thresholds = torch.minimum(thresholds - begins, inner[:, -1:] * (1 - 2**-52))
    return (block * BLOCK + torch.searchsorted(inner, thresholds, right=True)).clamp_(max=size - 1)


def processed(logits: Tensor, draws: Sequence[SamplingRule]) -> Tensor:
    """Returns the logprobs of the sampled distribution; −inf for tokens that it excludes."""
    temperatures = [one.temperature if one.temperature >= GREEDY else 1.0 for one in draws]
    logits = logits.float()
    if any(one != 1.0 for one in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    size = logits.shape[-1]
    if any(0 < one.top_k < size or one.top_p < 1.0 for one in draws):
        logits = _cut(logits, draws)
    return logits.log_softmax(dim=-1)


def _cut(logits: Tensor, draws: Sequence[SamplingRule]) -> Tensor:
    """Sets tokens outside top_k, and then outside top_p, to −inf. top_p keeps the smallest set of most likely tokens
    with at least that mass."""
    size, device = logits.shape[-1], logits.device
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_ks = torch.tensor([one.top_k if 0 < one.top_k < size else size for one in draws], device=device)
    is_out = torch.arange(size, device=device)[None] >= top_ks[:, None]
    ordered = ordered.masked_fill(is_out, float("-inf"))
    before = ordered.double().softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = -1.0  # the most likely token always stays
    mass = torch.tensor([one.top_p if one.top_p < 1.0 else 2.0 for one in draws], dtype=torch.float64, device=device)
    ordered = ordered.masked_fill(before >= mass[:, None], float("-inf"))
    return torch.empty_like(ordered).scatter_(1, order, ordered)
