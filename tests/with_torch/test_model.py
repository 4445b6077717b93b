# pyright: reportMissingImports=false
"""A model run in pieces, over several sequences at once, gives the results of a plain forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

from rollyard.embedded.base import Piece
from rollyard.embedded.transformer.model import Model, Unsupported, load_module
from tests.with_torch.parts import SHAPE, VOCABULARY, checked, prompt_of, tiny


@torch.no_grad()
def plain(module: Any, ids: list[int]) -> torch.Tensor:
    return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_pieces_of_any_size_give_the_logprobs_of_the_whole_sequence(module: Any):
    model = checked(module)
    longs = [prompt_of(40), prompt_of(23, 1), prompt_of(31, 2)]
    caches = [model.new_kv() for _ in longs]
    for size in (1, 5, 1, 9, 3, 2):  # also beyond the window of 8
        pieces = [Piece(ids[kv.length : kv.length + size], kv, True) for ids, kv in zip(longs, caches, strict=True)]
        logprobs = model.forward(pieces).log_softmax(-1)
        for row, ids, kv in zip(logprobs, longs, caches, strict=True):
            torch.testing.assert_close(row, plain(module, ids)[kv.length - 1], atol=1e-4, rtol=0)


def test_a_cut_or_copied_cache_continues_without_the_removed_tokens(module: Any):
    model, ids = checked(module), prompt_of(30)
    kv = model.new_kv()
    model.forward([Piece(ids, kv, False)])
    copied = kv.copy(17, 17)
    kv.cut(17)
    other = [*ids[:17], *prompt_of(8, 3)]
    for cache in (kv, copied):
        (row,) = model.forward([Piece(other[17:], cache, True)]).log_softmax(-1)
        torch.testing.assert_close(row, plain(module, other)[-1], atol=1e-4, rtol=0)


def test_a_model_with_another_kind_of_state_is_refused():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2))
    with pytest.raises(Unsupported):
        checked(mamba)


def test_the_given_model_is_unchanged_and_shares_its_weights():
    module = tiny().train()
    attention = module.config._attn_implementation
    model = checked(module)
    assert module.training and module.config._attn_implementation == attention
    ids = prompt_of(9)
    (before,) = model.forward([Piece(ids, model.new_kv(), True)])
    with torch.no_grad():
        module.model.layers[0].mlp.up_proj.weight.mul_(3.0)
    (after,) = model.forward([Piece(ids, model.new_kv(), True)])
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after.log_softmax(-1), plain(module.eval(), ids)[-1], atol=1e-4, rtol=0)


def test_weights_of_a_folder_are_written_into_the_given_model(tmp_path: Path):
    other = tiny(seed=1)
    other.save_pretrained(tmp_path / "other")
    module = tiny()
    model = checked(module)
    model.write_weights(model.read_weights(tmp_path / "other"))
    torch.testing.assert_close(plain(module, prompt_of(9)), plain(other, prompt_of(9)))
    assert load_module(tmp_path / "other", device="cpu").config.vocab_size == VOCABULARY


def test_weights_of_another_model_are_refused_before_any_is_written(tmp_path: Path):
    tiny("qwen3").save_pretrained(tmp_path / "other")
    module = tiny()
    model, before = checked(module), plain(module, prompt_of(9))
    with pytest.raises(Unsupported, match="not of this model"):
        model.read_weights(tmp_path / "other")
    with pytest.raises(Unsupported, match="cannot be loaded"):
        model.read_weights(tmp_path / "nothing")
    torch.testing.assert_close(plain(module, prompt_of(9)), before)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(Unsupported, match="made for 8192"):
        Model(tiny(), max_context=8193)


def test_an_attention_with_more_inputs_is_refused_even_if_the_results_are_close():
    shape = {**SHAPE, "head_dim": 8, "initializer_range": 0.02}
    with pytest.raises(Unsupported, match="takes more than queries, keys and values"):
        checked(Gemma2ForCausalLM(Gemma2Config(**shape, attn_logit_softcapping=50.0)).eval())
