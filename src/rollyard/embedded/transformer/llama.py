# pyright: reportMissingImports=false
"""Runs Llama-like models on a CPU without transformers and without one module per tensor.

It starts in less time (transformers takes longer to import than torch) and runs faster, because little remains except
products with large weights: one for queries, keys and values, one for both halves of the MLP, in the layout of the
CPU's kernels (`linears.py`). The rows of queries and keys are stored so that the two numbers that a rotary embedding
rotates are adjacent: a rotation is one product of complex numbers, and attention does not depend on the order within a
head.

Invariants. Logprobs equal those of transformers to 1e-4: `tests/with_torch/test_llama.py` compares them for every kind
that `checkpoint.py` accepts. Weights keep their usual names and the dtype of their file; the tensors used in
computation are derived from them whenever they change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from rollyard.embedded.base import Piece
from rollyard.embedded.formats.checkpoint import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
    Checkpoint,
    NotKnown,
    Shape,
    misfits,
    read_checkpoint,
)
from rollyard.embedded.transformer.adapters import Adapter, BadAdapter, is_adapter, read_adapter
from rollyard.embedded.transformer.attention import attend
from rollyard.embedded.transformer.linears import Linear
from rollyard.embedded.transformer.model import Unsupported, load_module
from rollyard.embedded.transformer.sampling import SampledDraw, SamplingRule
from rollyard.embedded.transformer.stacked import Layout, StackedKv


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ready for computation."""

    before_attention: Tensor
    before_mlp: Tensor
    query_key_value: Linear
    head_norms: tuple[Tensor, Tensor] | None  # of queries and of keys
    output: Linear
    gate_up: Linear
    down: Linear


class Llama:
    """A Llama-like model, with the methods of `model.Model` that the batcher calls. Used by one thread at a time."""

    has_bursts = False

    def __init__(self, checkpoint: Checkpoint, max_context: int | None = None) -> None:
        self._shape = shape = checkpoint.shape
        if wrong := misfits(checkpoint.weights, shape):
            raise Unsupported(f"{checkpoint.folder} cannot be loaded: its weights do not fit, {', '.join(wrong[:3])}")
        self.vocabulary = shape.vocabulary
        self.max_context = max_context or shape.context
        if self.max_context > shape.context:
            raise Unsupported(f"a context of {self.max_context} tokens, but the model was made for {shape.context}")
        self.eos_ids = checkpoint.eos_ids
        self.device = torch.device("cpu")
        self._layout = Layout(shape.layers, shape.kv_heads, shape.head_size, self.max_context)
        self.bytes_per_token = self._layout.bytes_per_token
        self._turns = _turns(shape)
        self._weights = dict(checkpoint.weights)  # without any adapter
        self._changed: frozenset[str] = frozenset()  # weights that an adapter is added to
        self._layers: list[Layer] = []
        self._derive_layers({})

    def new_kv(self) -> StackedKv:
        return StackedKv(self._layout)

    def take_pool(self, tokens: int) -> int:
        raise Unsupported("a paged cache needs a model run by transformers")

    def forget_numbers(self) -> None:
        """Does nothing: each sequence has its own cache and there is no padding, so non-finite values cannot spread."""

    def burst(self, pieces: Sequence[Piece], draws: Sequence[SamplingRule], count: int) -> list[list[SampledDraw]]:
        raise AssertionError("`has_bursts` is False: the batcher samples one token at a time")

    # --- computing

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Returns the logits after the last token of each piece with `wants_logits`. Extends the caches."""
        ids: list[int] = []
        places: list[int] = []
        logit_rows: list[int] = []
        for piece in pieces:
            start, count = piece.kv.length, len(piece.tokens)
            if start + count > piece.kv.capacity:
                piece.kv.reserve(start + count)
            places += range(start, start + count)
            ids += piece.tokens
            if piece.wants_logits:
                logit_rows.append(len(ids) - 1)
        states = self._run(ids, places, pieces)
        for piece in pieces:
            piece.kv.advance(len(piece.tokens))
        if not logit_rows:
            return states.new_empty((0, self.vocabulary))
        if len(logit_rows) < len(ids):
            states = states[logit_rows]
        return self._head(rms_norm(states, (self._shape.size,), self._last_norm, self._shape.epsilon))

    def _run(self, ids: list[int], places: list[int], pieces: Sequence[Piece]) -> Tensor:
        shape, sizes = self._shape, [len(piece.tokens) for piece in pieces]
        angles = torch.tensor(places, dtype=torch.float32)[:, None] * self._turns
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        caches = [piece.kv.places(len(piece.tokens)) for piece in pieces]
        # by layer: where the keys and values of each piece are written, and all keys and values including them
        written = [[one[0][n] for one in caches for n in (2 * at, 2 * at + 1)] for at in range(shape.layers)]
        there = [[(one[1][2 * at], one[1][2 * at + 1]) for one in caches] for at in range(shape.layers)]
        states = torch.embedding(self._weights[EMBEDDING], torch.tensor(ids)).float()
        for layer, targets, known in zip(self._layers, written, there, strict=True):
            normed = rms_norm(states, (shape.size,), layer.before_attention, shape.epsilon)
            mixed = self._attention(layer, normed, turns, sizes, targets, known)
            states = states + layer.output(mixed)
            normed = rms_norm(states, (shape.size,), layer.before_mlp, shape.epsilon)
            gate, up = layer.gate_up(normed).split(shape.hidden, 1)
            states += layer.down(silu(gate).mul_(up))
        return states

    def _attention(
        self,
        layer: Layer,
        normed: Tensor,
        turns: Tensor,
        sizes: list[int],
        targets: list[Tensor],
        known: Iterable[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Computes attention of each piece's new tokens over its whole sequence."""
        shape, count = self._shape, normed.shape[0]
        turned = shape.heads + shape.kv_heads
        heads = layer.query_key_value(normed).view(count, turned + shape.kv_heads, shape.head_size)
        if layer.head_norms is not None:
            parts = heads[:, :turned].split([shape.heads, shape.kv_heads], 1)
            for part, weight in zip(parts, layer.head_norms, strict=True):
                part.copy_(rms_norm(part, (shape.head_size,), weight, shape.epsilon))
        torch.view_as_complex(heads[:, :turned].unflatten(2, (-1, 2))).mul_(turns)
        by_head = heads.transpose(0, 1)
        keys, values = (by_head.narrow(0, start, shape.kv_heads).split(sizes, 1) for start in (shape.heads, turned))
        sources = [one for pair in zip(keys, values, strict=True) for one in pair]
        torch._foreach_copy_(targets, sources)  # type: ignore[attr-defined]
        outputs: list[Tensor] = []
        groups = shape.heads // shape.kv_heads
        queries = heads[:, : shape.heads].unflatten(1, (shape.kv_heads, groups)).split(sizes)
        for query, size, (all_keys, all_values) in zip(queries, sizes, known, strict=True):
            if size == 1:  # no mask; query heads that share a key head are passed as its queries
                outputs.append(scaled_dot_product_attention(query, all_keys, all_values))
            else:
                attended = attend(query.flatten(1, 2).transpose(0, 1)[None], all_keys, all_values, None, None)
                outputs.append(attended[0].unflatten(1, (shape.kv_heads, groups)))
        return torch.cat(outputs).view(count, -1)

    # --- other weights

    def read_weights(self, folder: Path) -> Mapping[str, Tensor] | Adapter:
        """Reads weights or an adapter from a folder and checks that they fit this model. Writes nothing."""
        if is_adapter(folder):
            known = self._weights if not self._shape.is_tied else {**self._weights, HEAD: self._weights[EMBEDDING]}
            try:
                return read_adapter(folder, known)
            except BadAdapter as error:
                raise Unsupported(str(error)) from error
        try:
            fresh = read_checkpoint(folder).weights
        except NotKnown:  # in another format
            fresh = dict(load_module(folder, device="cpu").state_dict())
            if self._shape.is_tied:
                fresh.pop(HEAD, None)
        if wrong := misfits(fresh, self._shape):
            more = " …" if len(wrong) > 3 else ""
            raise Unsupported(f"the weights in {folder} are not of this model: {', '.join(wrong[:3])}{more}")
        return fresh

    @torch.inference_mode()
    def write_weights(self, weights: Mapping[str, Tensor] | Adapter) -> None:
        """The caller ensures that nothing is being sampled, and clears all caches. An adapter is added to the weights
        of the folder and replaces the previous adapter."""
        if isinstance(weights, Adapter):
            merged = {name: weights.added(name, self._weights[name].float()) for name in weights.pairs}
            self._derive_layers(merged)
        else:
            self._weights = dict(weights)
            self._layers.clear()
            self._derive_layers({})

    @torch.inference_mode()
    def _derive_layers(self, merged: Mapping[str, Tensor]) -> None:
        """Derives the tensors used in computation; for a change of adapter, only those of the changed layers."""
        changed = self._changed | merged.keys()
        self._changed = frozenset(merged)
        layer_weights = _LayerWeights(self._shape, self._weights, merged)
        if not self._layers:
            self._layers = [layer_weights.layer(at) for at in range(self._shape.layers)]
            changed = changed | {LAST_NORM, EMBEDDING}
        else:
            for at in range(self._shape.layers):
                start = f"model.layers.{at}."
                if any(name.startswith(start) for name in changed):
                    self._layers[at] = layer_weights.layer(at)
        if changed & {LAST_NORM, EMBEDDING, HEAD}:
            self._last_norm = layer_weights(LAST_NORM)
            self._head = Linear(layer_weights(EMBEDDING if self._shape.is_tied else HEAD))


class _LayerWeights:
    """The weights in float32, with an adapter added, and fused for each layer."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> None:
        self._shape = shape
        self._weights = weights
        self._merged = merged

    def __call__(self, name: str) -> Tensor:
        merged = self._merged.get(name)
        return self._weights[name].float() if merged is None else merged

    def layer(self, at: int) -> Layer:
        start, shape = f"model.layers.{at}.", self._shape
        names = [f"{start}self_attn.{one}_norm.weight" for one in "qk"]
        query, key = (_paired(self(name), 1) for name in names) if shape.has_head_norms else (None, None)
        return Layer(
            self(f"{start}input_layernorm.weight"),
            self(f"{start}post_attention_layernorm.weight"),
            self._linear(*(f"{start}self_attn.{one}_proj" for one in "qkv"), heads=(shape.heads, shape.kv_heads)),
            None if query is None or key is None else (query, key),
            self._linear(f"{start}self_attn.o_proj"),
            self._linear(f"{start}mlp.gate_proj", f"{start}mlp.up_proj"),
            self._linear(f"{start}mlp.down_proj"),
        )

    def _linear(self, *names: str, heads: Sequence[int] = ()) -> Linear:
        """Concatenates the rows of several weights. `heads`: head counts of the first ones, which are rotated."""

        def all_of(end: str) -> Tensor:
            parts = [self(name + end) for name in names]
            for at, count in enumerate(heads):
                parts[at] = _paired(parts[at], count)
            return torch.cat(parts)

        return Linear(all_of(".weight"), all_of(".bias") if f"{names[0]}.bias" in self._weights else None)


def _paired(rows: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head so that the two of each rotation are adjacent."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _turns(shape: Shape) -> Tensor:
    """Returns the angle by which each pair of a head is rotated per position."""
    turns = 1.0 / (shape.theta ** (torch.arange(0, shape.head_size, 2, dtype=torch.int64).float() / shape.head_size))
    if (scaling := shape.scaling) is None:
        return turns
    waves = 2 * math.pi / turns
    blend = (scaling.original_context / waves - scaling.low) / (scaling.high - scaling.low)
    between = (1 - blend) * turns / scaling.factor + blend * turns
    slow = torch.where(waves > scaling.original_context / scaling.low, turns / scaling.factor, turns)
    is_between = (waves >= scaling.original_context / scaling.high) & (waves <= scaling.original_context / scaling.low)
    return torch.where(is_between, between, slow)
