"""A LoRA adapter for all linear layers of a model, saved in PEFT's format. PEFT itself can replace this file."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

RANK, ALPHA = 16, 32


class Lora(nn.Module):
    """A linear layer that is not trained, plus the product of two small matrices that are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(RANK, base.in_features).uniform_(-1, 1) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ALPHA / RANK * (x @ self.A.T @ self.B.T)


def add_lora(model: nn.Module) -> dict[str, Lora]:
    """Replaces the model's linear layers, except for its output layer. A new adapter changes nothing."""
    model.requires_grad_(False)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    layers = {name: Lora(model.get_submodule(name)) for name in linear}
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return layers


def save_adapter(layers: dict[str, Lora], folder: Path, base: str) -> None:
    folder.mkdir(exist_ok=True)
    both = [(name, letter, getattr(layer, letter)) for name, layer in layers.items() for letter in "AB"]
    tensors = {f"base_model.model.{name}.lora_{letter}.weight": one.detach() for name, letter, one in both}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    config |= {"r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
