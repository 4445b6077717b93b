import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.failure import InvalidRequest
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens import Tokenizers

from .strategies import MARKERS, spiked


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_survives_encoding(small, text):
    assert small.decode(small.encode(small.escape(text))) == text


@given(text=spiked)
def test_escaped_text_never_becomes_a_marker(small, text):
    ids = small.encode(small.escape(text))
    assert not {small.special_id(marker) for marker in MARKERS} & set(ids)
    assert small.decode(ids) == text


def test_a_lone_surrogate_becomes_a_replacement_character(small):
    assert small.decode(small.encode("a\ud800b")) == "a�b"
    assert small.decode(small.encode(small.escape("a\udfffb"))) == "a�b"


def test_markers_are_found_as_ids(small):
    assert small.encode("<|im_end|>") == [small.special_id("<|im_end|>")]
    assert small.eos_token_id == small.special_id("<|im_end|>")
    assert small.convert_tokens_to_ids(["<think>", "no such token"]) == [small.special_id("<think>"), None]


def test_a_source_is_loaded_once(tokenizers):
    assert tokenizers.load(tokenizer_dir()) is tokenizers.load(str(tokenizer_dir()))


def test_an_uncached_hub_name_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"unknown/nothing.*hf download"):
        Tokenizers().load("unknown/nothing")


def test_an_incomplete_folder_is_refused_with_the_missing_files(tmp_path):
    shutil.copy(tokenizer_dir() / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match=r"lacks tokenizer_config\.json"):
        Tokenizers().load(tmp_path)


def test_a_source_that_is_neither_folder_nor_hub_name_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="neither a folder nor a hub name"):
        Tokenizers().load(tmp_path / "nowhere" / "at" / "all")


def test_a_template_file_takes_precedence_and_supports_the_usual_extensions(tmp_path):
    shutil.copytree(tokenizer_dir(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ eos_token }}{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    )
    tokenizer = Tokenizers().load(tmp_path)
    messages = [{"role": "user", "content": "ü"}, {"role": "user", "content": "never seen"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == '"ü"4<|im_end|>'
    with pytest.raises(Exception, match="no tools"):
        tokenizer.apply_chat_template(messages, tools=[{}])


def test_the_named_template_for_tools_is_used_with_tools(tmp_path):
    shutil.copytree(tokenizer_dir(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizers().load(tmp_path)
    assert tokenizer.apply_chat_template([], tokenize=False) == "a"
    assert tokenizer.apply_chat_template([], tools=[{}], tokenize=False) == "b"
