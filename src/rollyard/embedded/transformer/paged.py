# pyright: reportMissingImports=false
"""Keeps keys and values in blocks of one pool, and runs many sequences as one padded batch, for GPUs.

The cost on a GPU is the number of kernel launches, not padding. So the pieces of a step are grouped into few batches of
(rows, tokens), rounded up to a small number of sizes, and on CUDA each size is recorded once as a graph and replayed.
On a CPU padding is what costs: see `attention.py`.

A row is padded on the left, so that its last token is the last of the batch. Padding has the position −1, and writes to
block 0, which belongs to no cache. Sequences cannot affect each other: a row reads only the blocks in its own table, up
to its own position.

Invariants. A block belongs to one cache, or is free; the code that drops a cache frees its blocks. All numbers in the
pool are finite: masked values are multiplied by zero, which does not remove a NaN or infinity (`BlockPool.clear`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rollyard.embedded.base import BLOCK_TOKENS, Piece
from rollyard.embedded.transformer.bursts import Rows, advance
from rollyard.embedded.transformer.graphs import Graphs, at_device

if TYPE_CHECKING:
    from rollyard.embedded.transformer.sampling import SamplingRule

LEAST_BLOCKS = 16  # minimum width of a block table, where sizes are rounded
LEAST_ROWS = 8  # minimum rows of a batch of single tokens
Pair = tuple[Tensor, Tensor]
Kernel = Callable[[Tensor, Pair, Pair, Tensor, Tensor, float, int | None], Tensor]
PROMPT_SIZES = (16, 64, 256, 512, 1024, 4096, 16384, 65536)  # of pieces with more than one token
MERGED_TOKENS = 1024  # maximum tokens, with padding, of a batch of prompts of several sizes
ROUNDED = frozenset({"cuda"})  # devices on which batches have rounded sizes


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    key_size: int
    value_size: int


class BlockPool:
    """Each layer's keys and values: (blocks × heads, tokens of a block, size). Layers of the same shape share one
    tensor, so copying a cache takes two kernels, not two for each layer."""

    def __init__(self, shapes: Mapping[int, LayerShape], blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers: dict[int, Pair] = {}
        self._stacks: list[Tensor] = []
        alike: dict[LayerShape, list[int]] = defaultdict(list)
        for layer, shape in shapes.items():
            alike[shape].append(layer)
        for shape, layers in alike.items():
            keys, values = (
                torch.zeros((len(layers), blocks * shape.kv_heads, BLOCK_TOKENS, size), dtype=dtype, device=device)
                for size in (shape.key_size, shape.value_size)
            )
            self._stacks += [keys, values]
            self.layers |= {layer: (keys[n], values[n]) for n, layer in enumerate(layers)}
        self._blocks = blocks
        self._free = list(range(blocks - 1, 0, -1))

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise MemoryError(f"{count} blocks are needed, but {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: Sequence[int]) -> None:
        self._free += blocks

    @torch.inference_mode()
    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        if not source:
            return
        begin, end = torch.tensor([source, target], device=self._stacks[0].device)
        for stack in self._stacks:
            blocks = stack.view(stack.shape[0], self._blocks, -1)
            blocks.index_copy_(1, end, blocks.index_select(1, begin))

    @torch.inference_mode()
    def clear(self) -> None:
        """Sets everything to zero, after non-finite values were computed."""
        for stack in self._stacks:
            stack.zero_()


class PagedKv:
    """One sequence's cache: the blocks that it owns, in order."""

    def __init__(self, pool: BlockPool) -> None:
        self.length = self.capacity = 0
        self.blocks = np.empty(0, dtype=np.int32)
        self._pool = pool

    def capacity_for(self, tokens: int) -> int:
        return max(self.capacity, -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS)

    def reserve(self, tokens: int) -> None:
        missing = (self.capacity_for(tokens) - self.capacity) // BLOCK_TOKENS
        if missing:
            self.blocks = np.append(self.blocks, np.array(self._pool.take(missing), dtype=np.int32))
            self.capacity = len(self.blocks) * BLOCK_TOKENS

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def cut(self, length: int) -> None:
        self.length = min(self.length, length)

    def free(self) -> None:
        """Returns the blocks to the pool."""
        blocks, self.blocks = self.blocks.tolist(), self.blocks[:0]
        self.length = self.capacity = 0
        self._pool.give(blocks)

    def copy(self, length: int, room: int) -> PagedKv:
        """Returns a new cache with the first `length` tokens and a capacity of at least `room`."""
        copied = PagedKv(self._pool)
        copied.reserve(max(length, room))
        used = -(-length // BLOCK_TOKENS)
        self._pool.copy(self.blocks[:used].tolist(), copied.blocks[:used].tolist())
        copied.length = length
        return copied


@dataclass(frozen=True, slots=True)
class Paged:
    """The arguments of attention in every layer of a forward pass."""

    pool: BlockPool
    table: Tensor  # (rows, blocks)
    places: Tensor  # (rows, tokens): positions of the tokens in their sequences
    is_token: Tensor  # (rows, tokens): not padding
    kernel: Kernel | None = None  # for one token per row
    _cache: dict[object, Tensor] = field(default_factory=dict[object, Tensor])  # shared by layers of the same shape

    def put(self, layer: int, new: tuple[Tensor, Tensor]) -> None:
        """Writes the new keys and values, (rows, heads, tokens, size)."""
        target = self._computed_once("target", new[0].shape[1], self._target)
        for pool, one in zip(self.pool.layers[layer], new, strict=True):
            pool.view(-1, pool.shape[-1])[target] = one.reshape(-1, one.shape[-1])

    def all(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """Returns all keys and values of the block tables, (rows, heads, tokens of a table, size)."""
        source = self._computed_once("source", heads, self._source)
        keys, values = (pool[source].flatten(2, 3) for pool in self.pool.layers[layer])
        return keys, values

    def mask(self, window: int | None) -> Tensor:
        """Returns the attention mask, (rows, tokens, tokens of a table)."""
        return self._computed_once("seen", window, self._mask)

    def _computed_once(self, name: str, what: Any, make: Callable[[Any], Tensor]) -> Tensor:
        if (name, what) not in self._cache:
            self._cache[name, what] = make(what)
        return self._cache[name, what]

    def _target(self, heads: int) -> Tensor:
        head = torch.arange(heads, device=self.table.device)
        block = torch.where(self.is_token, self.table.gather(1, self.places // BLOCK_TOKENS), 0)
        lines = (block[:, None] * heads + head[None, :, None]) * BLOCK_TOKENS
        return (lines + (self.places % BLOCK_TOKENS)[:, None]).flatten()

    def _source(self, heads: int) -> Tensor:
        return self.table[:, None] * heads + torch.arange(heads, device=self.table.device)[None, :, None]

    def _mask(self, window: int | None) -> Tensor:
        column = torch.arange(self.table.shape[1] * BLOCK_TOKENS, device=self.table.device)
        mask = column <= self.places[:, :, None]
        return mask if window is None else mask & (column > self.places[:, :, None] - window)


def paged_attention(
    layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, paged: Paged
) -> Tensor:
    """Tensors are (rows, heads, tokens, size); scores are in float32."""
    rows, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    if paged.kernel is not None and tokens == 1:
        return paged.kernel(query, (key, value), paged.pool.layers[layer], paged.table, paged.places, scale, window)
    paged.put(layer, (key, value))
    keys, values = paged.all(layer, kv_heads)
    grouped = query.reshape(rows, kv_heads, heads // kv_heads * tokens, size).float()
    scores = (grouped @ keys.float().transpose(2, 3) * scale).view(rows, heads, tokens, -1)
    scores = scores.masked_fill(~paged.mask(window)[:, None], float("-inf"))
    mixed = scores.softmax(dim=-1).view(rows, kv_heads, -1, keys.shape[2]) @ values.float()
    return mixed.to(query.dtype).view(rows, heads, tokens, values.shape[-1])


class Batches:
    """Runs the pieces of a step through the model, in batches. Used by one thread at a time."""

    def __init__(self, module: Any, pool: BlockPool, device: torch.device, kernel: Kernel | None = None) -> None:
        self._kernel = kernel
        self._module = module
        self._pool = pool
        self._device = device
        self._is_rounded = device.type in ROUNDED
        self._graphs = Graphs(device)

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the logits after the last token of each piece with `wants_logits`, in their order."""
        with at_device(self._device):
            return self._forward(pieces)

    def burst(self, pieces: Sequence[Piece], draws: Sequence[SamplingRule], count: int) -> tuple[Tensor, Tensor]:
        """Samples `count` tokens for each piece of one token. Returns them and their logprobs, (pieces, count)."""
        rows, blocks = len(pieces), max(_blocks_of(piece, count) for piece in pieces)
        if self._is_rounded:
            rows, blocks = _power_of_two(rows, LEAST_ROWS), _power_of_two(blocks, LEAST_BLOCKS)
        packed = torch.from_numpy(_packed(pieces, rows, 1, blocks))
        with at_device(self._device):
            inputs, play = self._graphs.of(
                ("burst", rows, blocks),
                lambda: Rows.padding(rows, blocks, self._device),
                lambda inputs: advance(inputs, self._run),
            )
            inputs.fill(packed, draws, count)
            for _ in range(count):
                play()
        return inputs.tokens[: len(pieces), :count], inputs.logprobs[: len(pieces), :count]

    def _forward(self, pieces: Sequence[Piece]) -> Tensor:
        groups = self._groups(pieces)
        places: list[int] = []
        outputs: list[Tensor] = []
        for (tokens, _), members in groups.items():
            logits = self._run_group([pieces[index] for index in members], tokens)
            logit_rows = [row for row, index in enumerate(members) if pieces[index].wants_logits]
            places += [members[row] for row in logit_rows]
            if len(logit_rows) == len(members):
                outputs.append(logits[: len(members)].clone() if len(groups) > 1 else logits[: len(members)])
            elif logit_rows:
                outputs.append(logits[logit_rows])
        if not outputs:
            return torch.empty((0, 0), device=self._device)
        whole = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        order = sorted(range(len(places)), key=places.__getitem__)
        return whole if order == list(range(len(places))) else whole[order]

    def _groups(self, pieces: Sequence[Piece]) -> dict[tuple[int, int], list[int]]:
        """Groups pieces into batches. A few prompts of different sizes share one: padding costs less than a batch."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            groups[self._kind_of(piece)].append(index)
        prompts = [kind for kind in groups if kind[0] > 1]
        if self._is_rounded and len(prompts) > 1:
            widest, rows = max(prompts)[0], sum(len(groups[kind]) for kind in prompts)
            if widest * _power_of_two(rows, 1) <= MERGED_TOKENS:
                groups[widest, -1] = [index for kind in prompts for index in groups.pop(kind)]
        return groups

    def _kind_of(self, piece: Piece) -> tuple[int, int]:
        """Returns the key by which pieces are grouped: the number of tokens, and the length of the sequence where it
        affects the cost. The Triton kernel reads only the used part of a table; gathering reads all of it, for all
        rows."""
        tokens = len(piece.tokens)
        if not self._is_rounded:
            return tokens, _blocks_of(piece)
        size = 1 if tokens == 1 else next((one for one in PROMPT_SIZES if one >= tokens), tokens)
        return size, 0 if self._kernel is not None and size == 1 else _power_of_two(_blocks_of(piece), LEAST_BLOCKS)

    def _run_group(self, pieces: Sequence[Piece], tokens: int) -> Tensor:
        rows, blocks = len(pieces), max(map(_blocks_of, pieces))
        if self._is_rounded:
            rows, blocks = _power_of_two(rows, LEAST_ROWS if tokens == 1 else 1), _power_of_two(blocks, LEAST_BLOCKS)
        return self._run_packed(_packed(pieces, rows, tokens, blocks), tokens)

    def _run_packed(self, packed: np.ndarray[Any, Any], tokens: int) -> Tensor:
        """The next call overwrites the result."""

        def padding() -> Tensor:
            blank = torch.zeros(packed.shape, dtype=torch.int32, device=self._device)
            blank[:, tokens : 2 * tokens] = -1
            return blank

        inputs, play = self._graphs.of((*packed.shape, tokens), padding, lambda inputs: self._run(inputs, tokens))
        inputs.copy_(torch.from_numpy(packed), non_blocking=True)
        return play()

    def _run(self, packed: Tensor, tokens: int) -> Tensor:
        """Runs one forward pass of a batch. It depends on `packed` only, so it can be recorded as a CUDA graph."""
        ids, places, table = packed.split((tokens, tokens, packed.shape[1] - 2 * tokens), dim=1)
        is_token = places >= 0
        places = places.clamp(min=0).long()
        paged = Paged(self._pool, table.long(), places, is_token, self._kernel)
        output = self._module(
            input_ids=ids.long(), position_ids=places, logits_to_keep=1, use_cache=False, rollyard_paged=paged
        )
        return output.logits[:, -1]


def _packed(pieces: Sequence[Piece], rows: int, tokens: int, blocks: int) -> np.ndarray[Any, Any]:
    """Packs all input of the device into one array. Each row has token ids, positions (−1 is padding), block table."""
    packed = np.zeros((rows, 2 * tokens + blocks), dtype=np.int32)
    packed[:, tokens : 2 * tokens] = -1
    if tokens == 1:
        packed[: len(pieces), 0] = [piece.tokens[0] for piece in pieces]
        packed[: len(pieces), 1] = [piece.kv.length for piece in pieces]
    for row, piece in enumerate(pieces):
        if tokens > 1:
            new, start = len(piece.tokens), piece.kv.length
            packed[row, tokens - new : tokens] = piece.tokens
            packed[row, 2 * tokens - new : 2 * tokens] = range(start, start + new)
        used = piece.kv.blocks[:blocks]
        packed[row, 2 * tokens : 2 * tokens + len(used)] = used
    return packed


def _blocks_of(piece: Piece, count: int | None = None) -> int:
    return -(-(piece.kv.length + (count or len(piece.tokens))) // BLOCK_TOKENS)


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
