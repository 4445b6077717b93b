# pyright: reportMissingImports=false
"""Reads LoRA adapters from PEFT folders and adds them to the weights of their base model.

A weight update is then a few megabytes, and the model runs as fast as without an adapter. The original of each changed
weight is kept, so a new adapter replaces the previous one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _FIRST, _SECOND = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_PLAIN: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
}
_STARTS = (None, True, False, "gaussian", "orthogonal")  # other values of `init_lora_weights` change the base
"""The supported settings. Other values change the meaning of the weights."""


class BadAdapter(Exception):
    """The folder contains no adapter for this model; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """By weight name, the two low-rank matrices whose product, times the scale, is added to the weight."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float

    def added(self, name: str, base: Tensor) -> Tensor:
        first, second = (one.to(base.device, torch.float32) for one in self.pairs[name])
        return (base.float() + self.scale * (second @ first)).to(base.dtype)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, known: Mapping[str, Tensor]) -> Adapter:
    """Reads an adapter and checks it against the model's weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise BadAdapter(f"the adapter in {folder} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadAdapter(f"the adapter in {folder} cannot be read: its {CONFIG} is not a JSON object")
    for name, plain in _PLAIN.items():
        value = config.get(name, plain)
        if value != plain and (value or plain):
            raise BadAdapter(f"the adapter in {folder} has {name} = {value!r}, which is not supported")
    if (start := config.get("init_lora_weights")) not in _STARTS:
        raise BadAdapter(f"the adapter in {folder} has init_lora_weights = {start!r}: its base is not this model")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise BadAdapter(f"the adapter in {folder} does not specify its rank (r) and lora_alpha")
    pairs = {}
    if not tensors:
        raise BadAdapter(f"the adapter in {folder} is empty")
    owners = Counter(weight.data_ptr() for weight in known.values())
    for name in tensors:
        if not name.startswith(_PREFIX) or not name.endswith((_FIRST, _SECOND)):
            raise BadAdapter(f"the adapter in {folder} has {name}, which is not part of a LoRA adapter")
        module = name.removeprefix(_PREFIX).removesuffix(_FIRST).removesuffix(_SECOND)
        first, second = (tensors.get(f"{_PREFIX}{module}{end}") for end in (_FIRST, _SECOND))
        weight = known.get(f"{module}.weight")
        if first is None or second is None or weight is None:
            raise BadAdapter(f"the adapter in {folder} is not of this model: {module}")
        if (second.shape[0], first.shape[1]) != weight.shape or first.shape[0] != second.shape[1]:
            raise BadAdapter(f"the adapter in {folder} is not of this model: {module} has another size")
        if owners[weight.data_ptr()] > 1:
            raise BadAdapter(f"the adapter in {folder} changes {module}, whose weights are shared with another module")
        if first.shape[0] != rank:
            raise BadAdapter(f"the adapter in {folder} specifies r = {rank}, but {module} has {first.shape[0]}")
        pairs[f"{module}.weight"] = (first, second)
    return Adapter(pairs, alpha / (rank**0.5 if config.get("use_rslora") else rank))
