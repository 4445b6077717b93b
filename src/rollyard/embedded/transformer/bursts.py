# pyright: reportMissingImports=false
"""A burst: samples several tokens for each sequence on the device before Python reads any of them.

Between two steps of a small model on a GPU, Python takes about as long as the GPU took for the step: it builds the
batch, samples and reports. In a burst each token is sampled on the device and is the input of the next step there. A
burst samples the same tokens as single steps would, up to rounding: each token has its own random number
(`sampling.py`), and sequences do not affect each other. The costs: a sequence that ends within a burst is computed to
the end of the burst and the surplus discarded, and new prompts wait for that end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.embedded.base import MOST_BURST
from rollyard.embedded.transformer.sampling import GREEDY, SamplingRule, draw_plain, uniform


@dataclass(slots=True)
class Rows:
    """The device tensors of a burst. The first two columns of `packed`, and `count`, change with each token."""

    packed: Tensor  # (rows, 2 + blocks): the next token, its place (−1: padding), the blocks of its sequence
    temperatures: Tensor  # (rows, 1)
    is_greedy: Tensor  # (rows, 1)
    numbers: Tensor  # (rows, MOST_BURST), one for each token
    tokens: Tensor  # (rows, MOST_BURST): what was sampled
    logprobs: Tensor  # (rows, MOST_BURST)
    count: Tensor  # (1,): tokens sampled so far

    @classmethod
    def padding(cls, rows: int, blocks: int, device: torch.device) -> Rows:
        packed = torch.zeros((rows, 2 + blocks), dtype=torch.int32, device=device)
        packed[:, 1] = -1
        return cls(
            packed,
            torch.ones((rows, 1), dtype=torch.float32, device=device),
            torch.zeros((rows, 1), dtype=torch.bool, device=device),
            torch.zeros((rows, MOST_BURST), dtype=torch.float64, device=device),
            torch.zeros((rows, MOST_BURST), dtype=torch.int64, device=device),
            torch.zeros((rows, MOST_BURST), dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )

    def fill(self, packed: Tensor, draws: Sequence[SamplingRule], count: int) -> None:
        self.packed.copy_(packed)
        temperatures = [[one.temperature if one.temperature >= GREEDY else 1.0] for one in draws]
        self.temperatures[: len(draws)] = torch.tensor(temperatures, dtype=torch.float32)
        self.is_greedy[: len(draws)] = torch.tensor([[one.temperature < GREEDY] for one in draws])
        numbers = [[uniform(one.seed, one.place + ahead) for ahead in range(count)] for one in draws]
        self.numbers[: len(draws), :count] = torch.tensor(numbers, dtype=torch.float64)
        self.count.zero_()


def advance(rows: Rows, run: Callable[[Tensor, int], Tensor]) -> None:
    """Samples one more token for each row. Reads no value on the host, so it can be recorded as a CUDA graph."""
    numbers = rows.numbers.index_select(1, rows.count)
    tokens, logprobs = draw_plain(run(rows.packed, 1), rows.temperatures, numbers, rows.is_greedy)
    rows.tokens.index_copy_(1, rows.count, tokens)
    rows.logprobs.index_copy_(1, rows.count, logprobs)
    place = rows.packed[:, 1]
    place += place >= 0
    rows.packed[:, :1] = tokens
    rows.count += 1
