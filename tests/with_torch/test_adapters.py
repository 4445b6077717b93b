# pyright: reportMissingImports=false
"""Adapters are added to the base weights, replace each other, and are refused as a whole; directly and over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollyard.embedded.transformer.adapters import CONFIG, WEIGHTS
from rollyard.embedded.transformer.model import Unsupported
from rollyard.engines.base import VersionSpan
from tests.with_torch.parts import checked, served, tiny
from tests.with_torch.test_server import post, request

UP, QUERY = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"
RANK, ALPHA = 4, 8.0


def write_adapter(
    folder: Path, module: Any, modules: tuple[str, ...] = (UP, QUERY), seed: int = 0, **config: Any
) -> Path:
    """Writes an adapter with random matrices, large enough to have an effect."""
    torch.manual_seed(seed)
    tensors = {}
    for name in modules:
        wide, narrow = module.get_submodule(name).weight.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, narrow) / 4
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(wide, RANK) / 4
    return write_files(folder, tensors, **config)


def write_files(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **config}))
    return folder


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def added(base: dict[str, torch.Tensor], folder: Path, scale: float = ALPHA / RANK) -> dict[str, torch.Tensor]:
    """Returns the weights with the adapter of a folder added, computed independently."""
    tensors = load_file(folder / WEIGHTS)
    weights = dict(base)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            second = tensors[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] = base[f"{module}.weight"] + scale * (second @ tensors[name])
    return weights


def assert_weights(module: Any, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(module.state_dict()), expected)


def test_a_new_adapter_replaces_the_previous_one(tmp_path: Path):
    module = tiny()
    model, base = checked(module), weights_of(module)
    first, second = write_adapter(tmp_path / "1", module), write_adapter(tmp_path / "2", module, (QUERY,), seed=1)
    loaded = model.read_weights(first)
    assert_weights(module, base)
    model.write_weights(loaded)
    assert_weights(module, added(base, first))
    assert not torch.equal(module.state_dict()[f"{UP}.weight"], base[f"{UP}.weight"])
    model.write_weights(model.read_weights(first))
    assert_weights(module, added(base, first))
    model.write_weights(model.read_weights(second))
    assert_weights(module, added(base, second))


def test_an_adapter_is_added_to_the_last_full_weights(tmp_path: Path):
    module, other = tiny(), tiny(seed=1)
    model = checked(module)
    other.save_pretrained(tmp_path / "other")
    adapter = write_adapter(tmp_path / "1", module)
    model.write_weights(model.read_weights(adapter))
    model.write_weights(model.read_weights(tmp_path / "other"))
    assert_weights(module, weights_of(other))
    model.write_weights(model.read_weights(adapter))
    assert_weights(module, added(weights_of(other), adapter))


def test_an_adapter_is_added_to_weights_that_a_trainer_has_written_since(tmp_path: Path):
    module = tiny()
    model = checked(module)
    model.write_weights(model.read_weights(write_adapter(tmp_path / "1", module)))
    with torch.no_grad():
        module.get_submodule(UP).weight.mul_(0.5)
    now = weights_of(module)
    second = write_adapter(tmp_path / "2", module, (UP,), seed=1)
    model.write_weights(model.read_weights(second))
    weights = dict(module.state_dict())
    torch.testing.assert_close(weights[f"{UP}.weight"], added(now, second)[f"{UP}.weight"])


def test_an_adapter_for_weights_shared_by_two_modules_is_refused(tmp_path: Path):
    module = tiny("qwen3")  # its embedding and its head are tied
    model, base = checked(module), weights_of(module)
    with pytest.raises(Unsupported, match="shared with another module"):
        model.read_weights(write_adapter(tmp_path / "1", module, ("lm_head",)))
    with pytest.raises(Unsupported, match="is empty"):
        model.read_weights(write_adapter(tmp_path / "2", module, ()))
    assert_weights(module, base)


def test_the_scale_is_that_of_peft(tmp_path: Path):
    module = tiny()
    model, base = checked(module), weights_of(module)
    adapter = write_adapter(tmp_path / "1", module, use_rslora=True, lora_alpha=6)
    model.write_weights(model.read_weights(adapter))
    assert_weights(module, added(base, adapter, 6 / RANK**0.5))


def _first(name: str) -> str:
    return f"base_model.model.{name}.lora_A.weight"


def _second(name: str) -> str:
    return f"base_model.model.{name}.lora_B.weight"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({_first(UP): (RANK, 31), _second(UP): (48, RANK)}, f"{UP} has another size"),
        ({_first(UP): (RANK, 32), _second(UP): (47, RANK)}, f"{UP} has another size"),
        ({_first(UP): (RANK, 32), _second(UP): (48, 3)}, f"{UP} has another size"),
        ({_first(UP): (RANK + 1, 32), _second(UP): (48, RANK + 1)}, f"{UP} has {RANK + 1}"),
        ({_first("model.layers.2.mlp.up_proj"): (RANK, 32)}, "not of this model: model.layers.2.mlp.up_proj"),
        ({_first(UP): (RANK, 32)}, f"not of this model: {UP}"),
        ({f"base_model.model.{UP}.lora_magnitude_vector": (48,)}, "not part of a LoRA adapter"),
        ({f"{UP}.weight": (48, 32)}, "not part of a LoRA adapter"),
    ],
    ids=["narrow", "wide", "rank", "another rank", "module", "half", "magnitude", "whole"],
)
def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tensors: dict[str, tuple[int, ...]], says: str):
    """A valid pair in the same adapter is not written either."""
    module = tiny()
    model, base = checked(module), weights_of(module)
    good = {_first(QUERY): torch.ones(RANK, 32), _second(QUERY): torch.ones(32, RANK)}
    adapter = write_files(tmp_path / "1", good | {name: torch.ones(shape) for name, shape in tensors.items()})
    with pytest.raises(Unsupported, match=says.replace(".", r"\.")) as caught:
        model.read_weights(adapter)
    assert str(adapter) in str(caught.value)
    assert_weights(module, base)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora = True, which is not supported"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "its base is not this model"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"r": None}, "does not specify its rank"),
        ({"r": 0}, "does not specify its rank"),
        ({"lora_alpha": "8"}, "does not specify its rank"),
    ],
)
def test_unsupported_settings_of_an_adapter_are_refused(tmp_path: Path, config: dict[str, Any], says: str):
    module = tiny()
    model, base = checked(module), weights_of(module)
    with pytest.raises(Unsupported, match=says):
        model.read_weights(write_adapter(tmp_path / "1", module, **config))
    assert_weights(module, base)


def test_the_default_settings_of_peft_are_accepted(tmp_path: Path):
    module = tiny()
    model, base = checked(module), weights_of(module)
    plain = {"use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {}, "bias": "none"}
    adapter = write_adapter(tmp_path / "1", module, **plain, alpha_pattern={}, lora_dropout=0.1, inference_mode=True)
    model.write_weights(model.read_weights(adapter))
    assert_weights(module, added(base, adapter))


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_an_unreadable_file_is_refused(tmp_path: Path, file: str):
    module = tiny()
    model, base = checked(module), weights_of(module)
    adapter = write_adapter(tmp_path / "1", module)
    for garbage in (b"", b"\xff\xfe not this", b"{", b"[]"):
        (adapter / file).write_bytes(garbage)
        with pytest.raises(Unsupported, match="cannot be read"):
            model.read_weights(adapter)
    (adapter / file).unlink()
    message = "cannot be read" if file == WEIGHTS else "cannot be loaded"  # without a config it is not an adapter
    with pytest.raises(Unsupported, match=message):
        model.read_weights(adapter)
    assert_weights(module, base)


async def test_a_push_over_http_changes_the_samples_and_their_version(tmp_path: Path):
    module = tiny()
    adapter, other = write_adapter(tmp_path / "1", module), write_adapter(tmp_path / "2", module, seed=1)
    wrong = write_adapter(tmp_path / "3", module, use_dora=True)
    async with served(module) as (engine, client):
        before = await client.generate(request())
        reply = await post(engine, "/update_weights_from_folder", {"path": str(adapter), "version": 3})
        assert reply == (200, {"success": True, "weight_version": "3"})
        after = await client.generate(request("r2"))
        assert after.versions == (VersionSpan(3, 0, 12),)
        assert list(after.logprobs or ()) != list(before.logprobs or ())
        status, body = await post(engine, "/update_weights_from_folder", {"path": str(wrong), "version": 4})
        assert status == 400 and "use_dora" in body["error"]["message"]
        same = await client.generate(request("r3"))
        assert (same.token_ids, same.logprobs, same.versions) == (after.token_ids, after.logprobs, after.versions)
        await post(engine, "/update_weights_from_folder", {"path": str(other), "version": 5})
        await post(engine, "/update_weights_from_folder", {"path": str(adapter), "version": 6})
        again = await client.generate(request("r4"))
        assert (again.token_ids, again.logprobs) == (after.token_ids, after.logprobs), "it replaced the other adapter"


async def test_an_engine_can_start_with_an_adapter(tmp_path: Path):
    module = tiny()
    adapter = write_adapter(tmp_path / "1", module)
    async with served(module) as (engine, client):
        await post(engine, "/update_weights_from_folder", {"path": str(adapter)})
        pushed = await client.generate(request())
    base = weights_of(tiny())
    fresh = tiny()
    async with served(fresh, adapter=adapter) as (engine, client):
        assert_weights(fresh, added(base, adapter))
        generation = await client.generate(request())
        assert (generation.token_ids, generation.logprobs) == (pushed.token_ids, pushed.logprobs)
        await post(engine, "/update_weights_from_folder", {"path": str(adapter)})
        assert_weights(fresh, added(base, adapter))
    with pytest.raises(Unsupported, match="use_dora"):
        async with served(tiny(), adapter=write_adapter(tmp_path / "2", module, use_dora=True)):
            pass
