# pyright: reportMissingImports=false
"""Replacements of transformers' functions are used and give the same results; if they differ, they are not used."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama import modeling_llama

from rollyard.embedded.transformer.fusing import fuse_norms, fuse_rotations
from rollyard.embedded.transformer.model import Model
from tests.with_torch.parts import SHAPE, tiny

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SIZE = {"llama": SHAPE["hidden_size"] // SHAPE["num_attention_heads"], "qwen3": 16}


class Turn:
    """Llama's rotation, with a counter of calls."""

    def __init__(self, sign: float = 1.0) -> None:
        self.calls = 0
        self._sign = sign

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return modeling_llama.apply_rotary_pos_emb(query, key, cos, self._sign * sin)


def logits(module: Any) -> Tensor:
    with torch.inference_mode():
        return module(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", SIZE)
def test_fused_rotations_give_the_same_result(kind: str):
    module = tiny(kind)
    other, turn = copy.deepcopy(module), Turn()
    assert fuse_rotations(module, SIZE[kind], turn) == SHAPE["num_hidden_layers"]
    tried = turn.calls
    assert torch.equal(logits(module), logits(other))
    assert turn.calls == tried + SHAPE["num_hidden_layers"], "only in the given model"


def test_a_different_rotation_is_not_replaced():
    module = tiny()
    before = logits(module)
    assert fuse_rotations(module, SIZE["llama"], Turn(sign=-1.0)) == 0
    assert torch.equal(logits(module), before)


def test_a_kernel_that_fails_is_not_used(caplog: pytest.LogCaptureFixture):
    def fail(*_: Tensor) -> Any:
        raise RuntimeError("no compiler\nat all")

    assert fuse_rotations(tiny(), SIZE["llama"], fail) == 0
    assert [record.message for record in caplog.records] == ["the rotary kernel failed: not fused"], "logged once"


def test_a_replaced_forward_is_not_changed():
    module = tiny()
    for layer in module.model.layers:
        layer.self_attn.forward = layer.self_attn.forward
    assert fuse_rotations(module, SIZE["llama"], Turn()) == 0


def test_untested_arguments_use_the_original_function():
    """Covers an additional argument, tensors with gaps, and angles of another dtype."""
    module, turn = tiny(), Turn()
    fuse_rotations(module, SIZE["llama"], turn)
    fused = module.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    query, key = torch.randn(2, 2, 3, 4, 8)
    cos, sin = torch.randn(2, 2, 4, 8)
    gaps = torch.randn(2, 3, 8, 4).transpose(2, 3)
    tried = turn.calls
    plain: Any = modeling_llama.apply_rotary_pos_emb
    for arguments in (
        (query, key, cos, sin, 1),
        (gaps, key, cos, sin),
        (query, gaps, cos, sin),
        (query, key, cos.double(), sin),
    ):
        for actual, expected in zip(fused(*arguments), plain(*arguments), strict=True):
            assert torch.equal(actual, expected)
    assert turn.calls == tried
    fused(query, key, cos, sin)
    assert turn.calls == tried + 1


class Broken:
    """Kernels that pass the comparison but fail for the sizes of the model."""

    attend_one = None

    @staticmethod
    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if query.shape[1] != 2:
            raise RuntimeError("out of registers")
        return modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)


def test_a_model_for_which_the_kernels_fail_runs_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("rollyard.embedded.transformer.model.FUSED", {"cpu"})
    monkeypatch.setattr("rollyard.embedded.transformer.model.find_kernels", lambda: Broken)
    model = Model(tiny())
    model.check()
    model.take_pool(64)
    assert "the Triton kernels cannot be used: using plain torch" in caplog.text
    assert not any("forward" in vars(part) for part in model._module.modules()), "the model is unchanged"


def test_a_model_for_which_the_kernels_work_uses_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    turn = Turn()
    monkeypatch.setattr("rollyard.embedded.transformer.model.FUSED", {"cpu"})
    monkeypatch.setattr(
        "rollyard.embedded.transformer.model.find_kernels", lambda: Namespace(rotate=turn, attend_one=None)
    )
    model = Model(tiny())
    model.check()
    model.take_pool(64)
    assert turn.calls >= 2 * SHAPE["num_hidden_layers"] and not caplog.records


def test_a_model_without_rotations_is_not_changed():
    plain = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    assert fuse_rotations(plain, 8, Turn()) == 0


def test_fused_norms_give_the_same_result():
    module = tiny()
    before = logits(module)
    fuse_norms(module)
    assert all("forward" in vars(part) for part in module.modules() if type(part).__name__ == "LlamaRMSNorm")
    torch.testing.assert_close(logits(module), before, rtol=0, atol=1e-4)
