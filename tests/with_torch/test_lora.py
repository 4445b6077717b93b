# pyright: reportMissingImports=false
"""The trainer's adapter equals the one that the engine adds: the same sum and files, and gradients for all matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lora import PROJECTIONS, Lora

from rollyard.embedded.transformer.adapters import read_adapter
from tests.with_torch.parts import prompt_of, tiny

RANK, ALPHA = 4, 6.0
NAMES = [name for names in PROJECTIONS.values() for name in names]


@torch.no_grad()
def random_lora(module: Any, seed: int = 3) -> Lora:
    """Returns an adapter with a large effect: both matrices are random."""
    lora = Lora(module, RANK, ALPHA)
    torch.manual_seed(seed)
    for matrix in lora.parameters():
        matrix.normal_(std=0.2)
    return lora


@torch.no_grad()
def merged(module: Any, lora: Lora) -> Any:
    """Returns a copy of the model with the adapter added to its weights."""
    whole = copy.deepcopy(module)
    for number, layer in enumerate(whole.model.layers):
        for block, names in PROJECTIONS.items():
            for name in names:
                change = lora.second[name][number] @ lora.first[name][number]
                getattr(getattr(layer, block), name).weight += ALPHA / RANK * change
    return whole


def logits_of(lora: Lora, ids: torch.Tensor) -> torch.Tensor:
    return lora.logits(lora.hidden(ids))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.tensor([prompt_of(14), prompt_of(14, 1)])


@torch.no_grad()
def test_a_new_adapter_changes_nothing(ids: torch.Tensor):
    module = tiny()
    torch.testing.assert_close(logits_of(Lora(module, RANK, ALPHA), ids), module(input_ids=ids).logits)


@torch.no_grad()
def test_the_result_is_that_of_the_model_with_the_products_added(ids: torch.Tensor):
    module = tiny()
    before = module(input_ids=ids).logits
    lora = random_lora(module)
    actual, expected = logits_of(lora, ids), merged(module, lora)(input_ids=ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(actual, before, atol=0.1)
    torch.testing.assert_close(module(input_ids=ids).logits, before)


@torch.no_grad()
def test_padding_on_the_right_changes_nothing_before_it():
    lora = random_lora(tiny())
    unpadded = logits_of(lora, torch.tensor([prompt_of(9)]))
    padded = logits_of(lora, torch.tensor([[*prompt_of(9), 0, 0, 0, 0, 0], prompt_of(14, 1)]))
    torch.testing.assert_close(padded[:1, :9], unpadded, atol=1e-4, rtol=1e-4)


def test_every_matrix_gets_a_gradient_and_the_model_does_not(ids: torch.Tensor):
    module = tiny()
    lora = random_lora(module)
    logits_of(lora, ids).log_softmax(-1)[..., 5].sum().backward()
    assert sorted(lora.first) == sorted(lora.second) == sorted(NAMES)
    assert len(list(lora.parameters())) == 2 * len(NAMES)
    for matrices in lora.parameters():
        assert matrices.grad is not None and len(matrices.grad) == len(module.model.layers)
        assert all(bool(layer.any()) for layer in matrices.grad), "in each layer"
    assert all(weight.grad is None for weight in module.parameters())


def test_the_gradient_is_that_of_the_sum(ids: torch.Tensor):
    """For W + s·BA, by the chain rule: dB = s·dW·Aᵀ and dA = s·Bᵀ·dW, with dW from the merged model."""
    module = tiny()
    lora = random_lora(module)
    whole = merged(module, lora).requires_grad_(True)
    logits_of(lora, ids).log_softmax(-1)[..., 5].mean().backward()
    whole(input_ids=ids).logits.log_softmax(-1)[..., 5].mean().backward()
    for number, layer in enumerate(whole.model.layers):
        for name, block in (("v_proj", layer.self_attn), ("down_proj", layer.mlp)):
            change = getattr(block, name).weight.grad * ALPHA / RANK
            first, second = lora.first[name], lora.second[name]
            assert first.grad is not None and second.grad is not None
            expected = (second[number].T @ change, change @ first[number].T)
            torch.testing.assert_close((first.grad[number], second.grad[number]), expected, atol=1e-5, rtol=1e-3)


def test_the_engine_reads_and_adds_a_saved_adapter(tmp_path: Path):
    module = tiny()
    lora = random_lora(module)
    lora.save(tmp_path / "saved", "somewhere")
    base, expected = module.state_dict(), merged(module, lora).state_dict()
    adapter = read_adapter(tmp_path / "saved", base)
    actual = {name: adapter.added(name, tensor) if name in adapter.pairs else tensor for name, tensor in base.items()}
    assert len(adapter.pairs) == len(NAMES) * len(module.model.layers)
    torch.testing.assert_close(actual, dict(expected))


@torch.no_grad()
def test_a_loaded_adapter_equals_the_saved_one(tmp_path: Path, ids: torch.Tensor):
    module = tiny()
    lora, other = random_lora(module), random_lora(module, seed=4)
    lora.save(tmp_path / "saved", "somewhere")
    assert not torch.equal(logits_of(other, ids), logits_of(lora, ids))
    other.load(tmp_path / "saved")
    for mine, its in zip(lora.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(logits_of(other, ids), logits_of(lora, ids))


@torch.no_grad()
def test_an_adapter_can_be_saved_in_bfloat16(tmp_path: Path):
    module = tiny()
    lora, other = random_lora(module), Lora(module, RANK, ALPHA)
    lora.save(tmp_path / "half", "somewhere", torch.bfloat16)
    lora.save(tmp_path / "whole", "somewhere")
    sizes = [(tmp_path / name / "adapter_model.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.7 * sizes[1]
    other.load(tmp_path / "half")
    for mine, its in zip(lora.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to(torch.bfloat16).float(), its)
