"""Converts a GGUF file of a Llama model to the folder layout that transformers and vLLM read.

    config.json, generation_config.json      the architecture and defaults
    model.safetensors                        the weights, in bfloat16
    tokenizer.json, tokenizer_config.json    the tokenizer, byte-level BPE
    chat_template.jinja                      the chat template

Invariant: the same file gives the same weights and the same tokenizer, byte for byte, and they equal those that
transformers saves after reading the file (a test compares them). This module does not need `rollyard[local]`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollyard.embedded.formats.gguf import BadGguf, Floats, Gguf, Values

WEIGHTS = "model.safetensors"

_CONTROL = 3  # the type of control tokens, which are never text
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BESIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(file: Path, folder: Path) -> None:
    """Writes the model to `folder`, which exists and is empty. Raises BadGguf if the file is not supported."""
    with Gguf(file) as gguf:
        values = gguf.values
        kinds = (values.get("general.architecture"), values.get("tokenizer.ggml.model"))
        if kinds != ("llama", "gpt2"):
            raise BadGguf(f"{file.name} is a {kinds[0]} model with a {kinds[1]} tokenizer, not llama with gpt2")
        try:
            _write_json(folder / "config.json", _config(values, is_tied="output.weight" not in gguf.names))
            _write_json(folder / "generation_config.json", {"use_cache": True, **_special_ids(values)})
            _write_json(folder / "tokenizer.json", _tokenizer(values))
            _write_json(folder / "tokenizer_config.json", _tokenizer_config(values))
            (folder / "chat_template.jinja").write_text(values["tokenizer.chat_template"])
        except KeyError as error:
            raise BadGguf(f"{file.name} has no field {error.args[0]}") from error
        _write_weights(gguf, folder / WEIGHTS)


# --- weights ------------------------------------------------------------------------------------------


def _write_weights(gguf: Gguf, file: Path) -> None:
    """Writes one tensor at a time, so memory holds no more than the largest. They are sorted by name, as usual."""
    names = sorted((_name(name), name) for name in gguf.names if name != "rope_freqs.weight")
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for hf_name, gguf_name in names:
        shape = gguf.shape(gguf_name)
        begin, end = end, end + 2 * prod(shape)
        tensors[hf_name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(tensors, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for _, gguf_name in names:
            out.write(_bfloat16(_unpermuted(gguf, gguf_name)).data)


def _bfloat16(numbers: Floats) -> NDArray[np.uint16]:
    """Returns the upper halves, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")


def _unpermuted(gguf: Gguf, name: str) -> Floats:
    """Reorders the rows of q and k: llama.cpp rotates adjacent pairs, transformers the two halves of a head."""
    tensor = gguf.tensor(name)
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in heads:
        return tensor
    pairs = tensor.reshape(gguf.values[heads[match[2]]], -1, 2, tensor.shape[1])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _name(name: str) -> str:
    if name in _BESIDE:
        return _BESIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_A_LAYER:
        raise BadGguf(f"the tensor {name} does not belong to a Llama model")
    return f"model.layers.{match[1]}.{_IN_A_LAYER[match[2]]}.weight"


# --- config -------------------------------------------------------------------------------------------


def _config(values: Values, *, is_tied: bool) -> dict[str, Any]:
    width, heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    base = values["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_ids(values),
        "dtype": "bfloat16",
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.02,
        "intermediate_size": values["llama.feed_forward_length"],
        "max_position_embeddings": values["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        "rope_theta": base,  # read by transformers before 5, which silently uses 10000 without it
        "tie_word_embeddings": is_tied,
        "use_cache": True,
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
    }


def _special_ids(values: Values) -> dict[str, int]:
    return {f"{hf_name}_token_id": id for hf_name, id in _specials(values) if hf_name != "unk"}


def _specials(values: Values) -> Iterator[tuple[str, int]]:
    for hf_name, gguf_name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (id := values.get(f"tokenizer.ggml.{gguf_name}_token_id")) is not None:
            yield hf_name, id


# --- tokenizer ----------------------------------------------------------------------------------------


def _tokenizer(values: Values) -> dict[str, Any]:
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    controls = [id for id, kind in enumerate(types) if kind == _CONTROL]
    one, other = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": tokens[id], **flags} for id in controls],
        "normalizer": None,
        "pre_tokenizer": _byte_level(add_prefix_space=False),
        "post_processor": {"type": "TemplateProcessing", "single": [one], "pair": [one, other], "special_tokens": {}},
        "decoder": _byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _byte_level(*, add_prefix_space: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": True}


def _tokenizer_config(values: Values) -> dict[str, Any]:
    tokens = values["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": values["llama.context_length"],
        **{f"{hf_name}_token": tokens[id] for hf_name, id in _specials(values)},
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False))
