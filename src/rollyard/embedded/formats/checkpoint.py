# pyright: reportMissingImports=false
"""Reads a model's folder without transformers: the kind of Llama model, and its weights by their usual names.

Only models that `llama.py` computes exactly are accepted (`Shape`). Everything else, such as another architecture or
another kind of rotary scaling, raises `NotKnown`, and the caller uses transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_THETA = 10000.0  # the default of every kind above


class NotKnown(Exception):
    """The model cannot be run without transformers; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of rotary embeddings in Llama 3.1 and later."""

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The architecture of a model."""

    kind: str
    layers: int
    size: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int  # of the MLP
    vocabulary: int
    context: int
    epsilon: float
    theta: float
    scaling: Llama3Scaling | None
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool

    @property
    def has_head_norms(self) -> bool:
        return self.kind == "qwen3"

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every weight, by name."""
        query, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.size), LAST_NORM: (self.size,)}
        if not self.is_tied:
            shapes[HEAD] = (self.vocabulary, self.size)
        linears = {
            "self_attn.q_proj": (query, self.size, self.has_qkv_bias),
            "self_attn.k_proj": (keys, self.size, self.has_qkv_bias),
            "self_attn.v_proj": (keys, self.size, self.has_qkv_bias),
            "self_attn.o_proj": (self.size, query, self.has_output_bias),
            "mlp.gate_proj": (self.hidden, self.size, self.has_mlp_bias),
            "mlp.up_proj": (self.hidden, self.size, self.has_mlp_bias),
            "mlp.down_proj": (self.size, self.hidden, self.has_mlp_bias),
        }
        for layer in range(self.layers):
            start = f"model.layers.{layer}."
            for name, (outer, inner, has_bias) in linears.items():
                shapes[f"{start}{name}.weight"] = (outer, inner)
                if has_bias:
                    shapes[f"{start}{name}.bias"] = (outer,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{start}{name}.weight"] = (self.size,)
            for name in ("q_norm", "k_norm") if self.has_head_norms else ():
                shapes[f"{start}self_attn.{name}.weight"] = (self.head_size,)
        return shapes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a model's folder; weights keep the dtype of the files."""

    folder: Path
    shape: Shape
    eos_ids: frozenset[int]
    weights: Mapping[str, Tensor]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Raises NotKnown for anything else; the caller then uses transformers, which loads it or reports an error."""
    try:
        config = json.loads((folder / "config.json").read_text())
        shape = _shape(config)
        weights = _read_weights(folder)
        eos_ids = _eos_ids(folder, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotKnown(f"{folder}: {error}") from error
    if shape.is_tied and HEAD in weights:
        if not torch.equal(weights[HEAD], weights.get(EMBEDDING, weights[HEAD])):
            raise NotKnown(f"{folder}: {HEAD} differs from the embedding, but the config declares them tied")
        del weights[HEAD]
    return Checkpoint(folder, shape, eos_ids, weights)


def misfits(weights: Mapping[str, Tensor], shape: Shape) -> list[str]:
    """Returns the names of weights that are missing, unexpected or of another size."""
    sizes = shape.sizes()
    missing = sorted(sizes.keys() ^ weights.keys())
    return missing or sorted(name for name, size in sizes.items() if tuple(weights[name].shape) != size)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = {_WEIGHTS}
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    try:
        for name in sorted(names):
            tensors |= load_file(folder / name)
    except SafetensorError as error:
        raise NotKnown(f"{folder}: {error}") from error
    if any(not one.is_floating_point() for one in tensors.values()):
        raise NotKnown(f"{folder}: quantized weights")
    # some older files contain these; they are computed from the config
    return {name: one for name, one in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _shape(config: Mapping[str, Any]) -> Shape:
    kind = config["model_type"]
    if kind not in KINDS or config.get("architectures", [KINDS[kind]]) != [KINDS[kind]]:
        raise NotKnown(f"a model of type {kind}, {config.get('architectures')}")
    if config.get("quantization_config") or config.get("auto_map") or config.get("hidden_act", "silu") != "silu":
        raise NotKnown("quantized, with custom code, or with another activation")
    if _has_window(kind, config):
        raise NotKnown("with a sliding window")
    heads, size = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or (128 if kind == "qwen3" else size // heads)
    if heads % kv_heads or head_size % 2:
        raise NotKnown("heads that cannot be grouped or rotated")
    theta, scaling = _rotation(config)
    has_bias = bool(config.get("attention_bias", False))
    return Shape(
        kind=kind,
        layers=config["num_hidden_layers"],
        size=size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        hidden=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
        epsilon=config["rms_norm_eps"],
        theta=theta,
        scaling=scaling,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=kind == "qwen2" or (kind != "mistral" and has_bias),
        has_output_bias=kind in ("llama", "qwen3") and has_bias,
        has_mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
    )


def _has_window(kind: str, config: Mapping[str, Any]) -> bool:
    if any(one != "full_attention" for one in config.get("layer_types") or ()):
        return True
    if kind == "mistral":
        return config.get("sliding_window", 4096) is not None
    return bool(config.get("use_sliding_window"))


def _rotation(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Reads the rotary settings: newer configs have them in `rope_parameters`, older ones as separate fields."""
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotKnown("heads that are rotated only in part")
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or _THETA)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return theta, None
    if kind != "llama3":
        raise NotKnown(f"rotary embeddings of type {kind}")
    return theta, Llama3Scaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Returns the end-of-sequence tokens; generation_config.json comes first, as in `model._eos_ids`."""
    path = folder / "generation_config.json"
    for source in (json.loads(path.read_text()) if path.is_file() else {}, config):
        if (eos_ids := source.get("eos_token_id")) is not None:
            return frozenset(eos_ids if isinstance(eos_ids, list) else [eos_ids])
    return frozenset()
