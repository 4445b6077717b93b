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


def test_a_source_is_read_once(tokenizers):
    assert tokenizers.load(tokenizer_dir()) is tokenizers.load(str(tokenizer_dir()))


def test_a_hub_name_that_is_not_cached_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"nobody/nothing.*hf download"):
        Tokenizers().load("nobody/nothing")


def test_a_folder_without_its_files_says_which(tmp_path):
    shutil.copy(tokenizer_dir() / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequest, match=r"lacks tokenizer_config\.json"):
        Tokenizers().load(tmp_path)


def test_neither_folder_nor_hub_name(tmp_path):
    with pytest.raises(InvalidRequest, match="neither a folder nor a hub name"):
        Tokenizers().load(tmp_path / "nowhere" / "at" / "all")


def test_a_template_file_wins_and_knows_the_usual_extras(tmp_path):
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


def test_named_templates(tmp_path):
    shutil.copytree(tokenizer_dir(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizers().load(tmp_path)
    assert tokenizer.apply_chat_template([], tokenize=False) == "a"
    assert tokenizer.apply_chat_template([], tools=[{}], tokenize=False) == "b"
