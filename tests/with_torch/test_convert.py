# pyright: reportMissingImports=false
"""Compares our reading of a GGUF file with that of the packages `gguf` and `transformers`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer

from rollyard.embedded.formats.convert import convert
from rollyard.embedded.formats.gguf import Gguf
from rollyard.embedded.transformer.model import Model, load_module
from tests.embedded.tiny_gguf import write_gguf


def test_tensors_equal_those_of_the_gguf_package(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(file)
    with Gguf(file) as opened:
        assert opened.names == tuple(tensor.name for tensor in reader.tensors)
        for tensor in reader.tensors:
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(opened.tensor(tensor.name), expected), tensor.name
        for name in ("tokenizer.ggml.tokens", "llama.rope.freq_base", "llama.block_count"):
            assert opened.values[name] == reader.fields[name].contents()


def test_the_folder_can_be_loaded_and_run(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert(write_gguf(tmp_path / "tiny.gguf"), folder)
    module = load_module(folder, device="cpu")
    assert module.dtype is torch.bfloat16 and module.config.rope_parameters["rope_theta"] == 50000.0
    module = module.float()
    Model(module).check()
    # The weights equal those of the file, rounded to bfloat16.
    with Gguf(tmp_path / "tiny.gguf") as opened:
        v = torch.from_numpy(opened.tensor("blk.0.attn_v.weight"))
    assert torch.equal(module.model.layers[0].self_attn.v_proj.weight, v.to(torch.bfloat16).float())


def test_q_and_k_have_the_row_order_of_transformers(tmp_path: Path):
    """Adjacent rows of the file are half a head apart in the folder."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert(write_gguf(tmp_path / "tiny.gguf"), folder)
    attention = load_module(folder, device="cpu").float().model.layers[0].self_attn
    with Gguf(tmp_path / "tiny.gguf") as opened:
        for projection, name in ((attention.q_proj, "attn_q"), (attention.k_proj, "attn_k")):
            rows = torch.from_numpy(opened.tensor(f"blk.0.{name}.weight")).to(torch.bfloat16).float()
            head = 16
            for at in range(len(rows)):
                place = at // head * head + (at % head) % 2 * (head // 2) + (at % head) // 2
                assert torch.equal(projection.weight[place], rows[at])


def test_the_tokenizer_has_its_template_and_its_special_tokens(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    convert(write_gguf(tmp_path / "tiny.gguf"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>the<|im_end|>" and ids[0] == 1 and ids[-1] == 2
