"""Conversion of GGUF files to folders: their content, and refusals. (tests/with_torch compares with other packages.)"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollyard.embedded.formats.convert import convert
from rollyard.embedded.formats.gguf import BadGguf, Gguf
from tests.embedded.tiny_gguf import SPECIAL, TEMPLATE, WIDTH, write_gguf


def folder_of(tmp_path: Path, name: str = "folder", **changed: Any) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    convert(write_gguf(tmp_path / f"{name}.gguf", **changed), folder)
    return folder


def test_the_config_and_template_match_the_file(tmp_path: Path):
    folder = folder_of(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (64, 2, 16)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["tie_word_embeddings"] and config["eos_token_id"] == 2
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_the_tokenizer_is_lossless_and_has_its_special_tokens(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(folder_of(tmp_path) / "tokenizer.json"))
    text = "<|im_start|>in the näh 漢\n<|im_end|>"
    encoding = tokenizer.encode(text)
    assert encoding.ids[0] == SPECIAL.index("<|im_start|>") and encoding.ids[-1] == SPECIAL.index("<|im_end|>")
    assert "Ġthe" in encoding.tokens, "merged by the rules of the file"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_weights_are_bfloat16_rounded_to_even(tmp_path: Path):
    file = folder_of(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"} and list(header) == sorted(header)
    norm = header["model.norm.weight"]
    begin, end = norm["data_offsets"]
    bits = np.frombuffer(data[8 + length + begin : 8 + length + end], "<u2").astype(np.uint32) << 16
    exact = np.linspace(0.5, 1.5, WIDTH, dtype=np.float32)
    assert norm["shape"] == [WIDTH] and np.abs(bits.view(np.float32) / exact - 1).max() <= 2**-8
    assert max(each["data_offsets"][1] for each in header.values()) == len(data) - 8 - length


def test_the_same_file_gives_the_same_bytes(tmp_path: Path):
    one, two = folder_of(tmp_path, "one"), folder_of(tmp_path, "two")
    names = sorted(path.name for path in one.iterdir())
    assert len(names) == 6 and all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"general__architecture": "gemma"}, "is a gemma model"),
        ({"tokenizer__ggml__model": "llama"}, "a llama tokenizer"),
        ({"llama__rope__freq_base": None}, "has no field llama.rope.freq_base"),
    ],
)
def test_an_unsupported_kind_of_model_is_refused(tmp_path: Path, changed: dict[str, Any], says: str):
    with pytest.raises(BadGguf, match=says):
        folder_of(tmp_path, **changed)


def test_an_invalid_or_truncated_file_is_refused(tmp_path: Path):
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for bad, expected in (
        (b"", "empty"),
        (b"PK\3\4 and more", "not a GGUF file"),
        (whole[:4] + struct.pack("<I", 9) + whole[8:], "version 9"),
        (whole[:600], "cut off|beyond the end"),
    ):
        (tmp_path / "bad.gguf").write_bytes(bad)
        with pytest.raises(BadGguf, match=expected):
            Gguf(tmp_path / "bad.gguf")
    (tmp_path / "bad.gguf").write_bytes(whole[:-100])
    with Gguf(tmp_path / "bad.gguf") as gguf, pytest.raises(BadGguf, match=r"output_norm\.weight is cut off"):
        gguf.tensor("output_norm.weight")
