"""A LoRA adapter for a Llama-like model, trained as stacked matrices, and saved in PEFT's layout.

A small model on a large GPU is limited by Python, not by arithmetic. So one tensor per kind of projection contains the
matrices of all layers: the sum W + scale · B A is one product for all layers, and the model itself runs as if it had no
adapter. The saved files are those of PEFT: `rollyard engine --adapter` and PEFT itself can load them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class Lora(nn.Module):
    """A trainable adapter for `causal`, which is not modified."""

    def __init__(self, causal: Any, rank: int, alpha: float) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self._causal = [causal.eval().requires_grad_(False)]  # in a list, so that it is not a submodule
        self._bases: dict[str, Tensor] = {}
        first, second = {}, {}
        for block, names in PROJECTIONS.items():
            for name in names:
                base = torch.stack([getattr(getattr(layer, block), name).weight for layer in causal.model.layers])
                layers, wide, narrow = base.shape
                self._bases[f"{block}.{name}"] = base
                matrix = torch.empty(layers, rank, narrow, device=base.device)
                nn.init.uniform_(matrix, -1 / math.sqrt(narrow), 1 / math.sqrt(narrow))
                first[name] = nn.Parameter(matrix)
                second[name] = nn.Parameter(torch.zeros(layers, wide, rank, device=base.device))
        self.first, self.second = nn.ParameterDict(first), nn.ParameterDict(second)

    def hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states. Sequences may be padded on the right: attention is causal."""
        weights: dict[str, Tensor] = {}
        for path, base in self._bases.items():
            name = path.rpartition(".")[2]
            whole = torch.baddbmm(base, self.second[name], self.first[name], alpha=self.alpha / self.rank)
            weights |= {f"layers.{n}.{path}.weight": one for n, one in enumerate(whole.unbind(0))}
        arguments = {"input_ids": ids, "use_cache": False}
        return functional_call(self._causal[0].model, weights, (), arguments).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return self._causal[0].lm_head(hidden).float()

    # --- PEFT's layout

    def save(self, folder: Path, base: str, dtype: torch.dtype = torch.float32) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: one.detach().to("cpu", dtype).contiguous() for name, one in self._named().items()},
            folder / "adapter_model.safetensors",
        )
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(self.first),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        saved = load_file(folder / "adapter_model.safetensors")
        for name, one in self._named().items():
            one.copy_(saved[name])

    def _named(self) -> Mapping[str, Tensor]:
        """Views of each layer's matrices, by PEFT's names."""
        return {
            f"base_model.model.model.layers.{n}.{path}.lora_{letter}.weight": one
            for path in self._bases
            for letter, stack in (("A", self.first), ("B", self.second))
            for n, one in enumerate(stack[path.rpartition(".")[2]].unbind(0))
        }
