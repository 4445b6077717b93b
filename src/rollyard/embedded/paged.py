# pyright: reportMissingImports=false
"""Keys and values in blocks of one pool, and many sequences through the model as one padded batch: what a GPU wants.

A GPU is slowed by the number of things it is told to do, not by padding. So the pieces of a step are put into few
batches of (rows, tokens), rounded up to sizes that come again and again, and on CUDA each size is recorded once as a
graph and replayed. On the CPU it is the other way round: see `attention.py`.

A row is padded on the left, so that its last token is the last of the batch. Padding has the place −1; what it writes
goes to block 0, which belongs to nobody. Nothing of one sequence can reach another: a row sees only the blocks in its
own table, up to its own place.

Invariants. A block belongs to one cache, or is free; whoever drops a cache frees it. All numbers in the pool are
finite: what is masked out is multiplied by zero, and would not vanish otherwise (`BlockPool.clear`).
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
from rollyard.embedded.bursts import Rows, advance
from rollyard.embedded.graphs import Graphs, at_device

if TYPE_CHECKING:
    from rollyard.embedded.sampling import SamplingRule

LEAST_BLOCKS = 16  # a table is no narrower, where sizes are rounded
LEAST_ROWS = 8  # and a batch of single tokens has no fewer rows
Pair = tuple[Tensor, Tensor]
Kernel = Callable[[Tensor, Pair, Pair, Tensor, Tensor, float, int | None], Tensor]
PROMPT_SIZES = (16, 64, 256, 512, 1024, 4096, 16384, 65536)  # of pieces with more than one token
MERGED_TOKENS = 1024  # a batch of prompts of several sizes has no more, with padding
ROUNDED = frozenset({"cuda"})  # where batches have rounded sizes


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    key_size: int
    value_size: int


class BlockPool:
    """Each layer's keys and values: (blocks × heads, tokens of a block, size). Layers that are alike lie in one tensor:
    a cache is copied by two things that the GPU is told, not by two for each layer."""

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
            raise MemoryError(f"{count} blocks are wanted, and {len(self._free)} are free")
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
        """Zeros everywhere: after weights that gave no numbers."""
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
        """Its blocks go back, once."""
        blocks, self.blocks = self.blocks.tolist(), self.blocks[:0]
        self.length = self.capacity = 0
        self._pool.give(blocks)

    def copy(self, length: int, room: int) -> PagedKv:
        """The first tokens, in a cache of their own with room for so many."""
        made = PagedKv(self._pool)
        made.reserve(max(length, room))
        used = -(-length // BLOCK_TOKENS)
        self._pool.copy(self.blocks[:used].tolist(), made.blocks[:used].tolist())
        made.length = length
        return made


@dataclass(frozen=True, slots=True)
class Paged:
    """What every layer of a forward pass is told."""

    pool: BlockPool
    table: Tensor  # (rows, blocks)
    places: Tensor  # (rows, tokens), of each token in its sequence
    is_token: Tensor  # (rows, tokens): not padding
    kernel: Kernel | None = None  # for one token a row
    _made: dict[object, Tensor] = field(default_factory=dict[object, Tensor])  # once for all layers that are alike

    def put(self, layer: int, new: tuple[Tensor, Tensor]) -> None:
        """Writes what is new, (rows, heads, tokens, size)."""
        target = self._once("target", new[0].shape[1], self._target)
        for pool, one in zip(self.pool.layers[layer], new, strict=True):
            pool.view(-1, pool.shape[-1])[target] = one.reshape(-1, one.shape[-1])

    def all(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the whole tables, (rows, heads, tokens of a table, size)."""
        source = self._once("source", heads, self._source)
        keys, values = (pool[source].flatten(2, 3) for pool in self.pool.layers[layer])
        return keys, values

    def seen(self, window: int | None) -> Tensor:
        """(rows, tokens, tokens of a table): what each token may look at."""
        return self._once("seen", window, self._seen)

    def _once(self, name: str, what: Any, make: Callable[[Any], Tensor]) -> Tensor:
        if (name, what) not in self._made:
            self._made[name, what] = make(what)
        return self._made[name, what]

    def _target(self, heads: int) -> Tensor:
        head = torch.arange(heads, device=self.table.device)
        block = torch.where(self.is_token, self.table.gather(1, self.places // BLOCK_TOKENS), 0)
        lines = (block[:, None] * heads + head[None, :, None]) * BLOCK_TOKENS
        return (lines + (self.places % BLOCK_TOKENS)[:, None]).flatten()

    def _source(self, heads: int) -> Tensor:
        return self.table[:, None] * heads + torch.arange(heads, device=self.table.device)[None, :, None]

    def _seen(self, window: int | None) -> Tensor:
        column = torch.arange(self.table.shape[1] * BLOCK_TOKENS, device=self.table.device)
        seen = column <= self.places[:, :, None]
        return seen if window is None else seen & (column > self.places[:, :, None] - window)


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
    scores = scores.masked_fill(~paged.seen(window)[:, None], float("-inf"))
    mixed = scores.softmax(dim=-1).view(rows, kv_heads, -1, keys.shape[2]) @ values.float()
    return mixed.to(query.dtype).view(rows, heads, tokens, values.shape[-1])


class Batches:
    """The pieces of a step, through the model. Used by one thread at a time."""

    def __init__(self, module: Any, pool: BlockPool, device: torch.device, kernel: Kernel | None = None) -> None:
        self._kernel = kernel
        self._module = module
        self._pool = pool
        self._device = device
        self._is_rounded = device.type in ROUNDED
        self._graphs = Graphs(device)

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """The logits after the last token of each piece that wants them, in their order."""
        with at_device(self._device):
            return self._forward(pieces)

    def burst(self, pieces: Sequence[Piece], draws: Sequence[SamplingRule], count: int) -> tuple[Tensor, Tensor]:
        """So many tokens for each piece, which is one token, and their logprobs: (pieces, count)."""
        rows, blocks = len(pieces), max(_blocks_of(piece, count) for piece in pieces)
        if self._is_rounded:
            rows, blocks = _power(rows, LEAST_ROWS), _power(blocks, LEAST_BLOCKS)
        packed = torch.from_numpy(_packed(pieces, rows, 1, blocks))
        with at_device(self._device):
            given, play = self._graphs.of(
                ("burst", rows, blocks),
                lambda: Rows.padding(rows, blocks, self._device),
                lambda given: advance(given, self._run),
            )
            given.fill(packed, draws, count)
            for _ in range(count):
                play()
        return given.tokens[: len(pieces), :count], given.logprobs[: len(pieces), :count]

    def _forward(self, pieces: Sequence[Piece]) -> Tensor:
        groups = self._groups(pieces)
        places: list[int] = []
        found: list[Tensor] = []
        for (tokens, _), members in groups.items():
            logits = self._run_group([pieces[index] for index in members], tokens)
            wanted = [row for row, index in enumerate(members) if pieces[index].wants_logits]
            places += [members[row] for row in wanted]
            if len(wanted) == len(members):
                found.append(logits[: len(members)].clone() if len(groups) > 1 else logits[: len(members)])
            elif wanted:
                found.append(logits[wanted])
        if not found:
            return torch.empty((0, 0), device=self._device)
        whole = torch.cat(found) if len(found) > 1 else found[0]
        order = sorted(range(len(places)), key=places.__getitem__)
        return whole if order == list(range(len(places))) else whole[order]

    def _groups(self, pieces: Sequence[Piece]) -> dict[tuple[int, int], list[int]]:
        """Which pieces go into one batch. A few prompts that are not alike do, too: padding costs less than a batch."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            groups[self._kind_of(piece)].append(index)
        prompts = [kind for kind in groups if kind[0] > 1]
        if self._is_rounded and len(prompts) > 1:
            widest, rows = max(prompts)[0], sum(len(groups[kind]) for kind in prompts)
            if widest * _power(rows, 1) <= MERGED_TOKENS:
                groups[widest, -1] = [index for kind in prompts for index in groups.pop(kind)]
        return groups

    def _kind_of(self, piece: Piece) -> tuple[int, int]:
        """Pieces of one kind go into one batch: its tokens, and where that matters how long the sequences are. Our
        kernel reads of a table only what is there; gathering reads it whole, for all rows."""
        tokens = len(piece.tokens)
        if not self._is_rounded:
            return tokens, _blocks_of(piece)
        size = 1 if tokens == 1 else next((one for one in PROMPT_SIZES if one >= tokens), tokens)
        return size, 0 if self._kernel is not None and size == 1 else _power(_blocks_of(piece), LEAST_BLOCKS)

    def _run_group(self, pieces: Sequence[Piece], tokens: int) -> Tensor:
        rows, blocks = len(pieces), max(map(_blocks_of, pieces))
        if self._is_rounded:
            rows, blocks = _power(rows, LEAST_ROWS if tokens == 1 else 1), _power(blocks, LEAST_BLOCKS)
        return self._run_packed(_packed(pieces, rows, tokens, blocks), tokens)

    def _run_packed(self, packed: np.ndarray[Any, Any], tokens: int) -> Tensor:
        """The result is overwritten by the next one."""

        def padding() -> Tensor:
            made = torch.zeros(packed.shape, dtype=torch.int32, device=self._device)
            made[:, tokens : 2 * tokens] = -1
            return made

        given, play = self._graphs.of((*packed.shape, tokens), padding, lambda given: self._run(given, tokens))
        given.copy_(torch.from_numpy(packed), non_blocking=True)
        return play()

    def _run(self, packed: Tensor, tokens: int) -> Tensor:
        """One forward pass of a whole batch; everything that it depends on is in `packed`, so it can be recorded."""
        ids, places, table = packed.split((tokens, tokens, packed.shape[1] - 2 * tokens), dim=1)
        is_token = places >= 0
        places = places.clamp(min=0).long()
        paged = Paged(self._pool, table.long(), places, is_token, self._kernel)
        made = self._module(
            input_ids=ids.long(), position_ids=places, logits_to_keep=1, use_cache=False, rollyard_paged=paged
        )
        return made.logits[:, -1]


def _packed(pieces: Sequence[Piece], rows: int, tokens: int, blocks: int) -> np.ndarray[Any, Any]:
    """One row each: ids, places (−1 is padding), table of blocks. All that is sent to the device, in one go."""
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


def _power(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
