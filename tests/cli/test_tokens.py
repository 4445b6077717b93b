"""`rollyard tokens check`: a description of a model's tokens, as a table and as JSON."""

import json
import shutil
from pathlib import Path

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.conftest import Cli


async def test_a_table_shows_each_property(cli: Cli):
    said = await cli("tokens", "check", tokenizer_dir())
    assert said.status == 0
    assert "rendered by chatml" in said.err
    for name in ("prefix-stable", "close token", "bridging after a cut-off", "tool calls", "reasoning", "unicode"):
        assert name in said.out
    assert "streaming" in said.out
    assert "<|im_end|>" in said.out


async def test_json_is_one_object(cli: Cli):
    said = await cli("tokens", "check", tokenizer_dir(), "--renderer", "template", "--json")
    (found,) = said.json
    assert (said.status, found["renderer"]) == (0, "template")
    assert {item["verdict"] for item in found["properties"]} == {"ok"}
    assert all(item["says"] for item in found["properties"])


async def test_a_template_without_a_renderer_is_still_described(cli: Cli, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    said = await cli("tokens", "check", folder, "--json")
    (found,) = said.json
    assert (said.status, found["renderer"]) == (0, None)
    assert "does not close" in found["reason"]
    verdicts = {item["name"]: item["verdict"] for item in found["properties"]}
    assert (verdicts["close token"], verdicts["bridging"], verdicts["unicode"]) == ("no", "does not apply", "ok")


async def test_a_tokenizer_with_no_or_a_broken_template_is_still_described(cli: Cli, tmp_path: Path):
    for index, template in enumerate([None, "{% if", "{{ raise_exception('never') if add_generation_prompt }}"]):
        folder = tmp_path / f"model{index}"
        shutil.copytree(tokenizer_dir(), folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        for extra in ([], ["--renderer", "chatml"]):
            said = await cli("tokens", "check", folder, "--json", *extra)
            assert (said.status, said.err) == (0, "")
            verdicts = {item["name"]: item["verdict"] for item in said.json[0]["properties"]}
            assert (verdicts["close token"], verdicts["unicode"]) == ("no", "ok")


async def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(cli: Cli, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").write_text("{}")
    for model, says in (
        ("nowhere", "neither a folder nor a hub name"),
        ("no-such/model", "not in the local hub cache"),
        (tmp_path, "lacks tokenizer.json"),
        (broken, "cannot be read"),
    ):
        said = await cli("tokens", "check", model)
        assert (said.status, said.out, said.err.count("\n")) == (1, "", 1)
        assert says in said.err


async def test_an_unknown_renderer_is_named_with_the_choices(cli: Cli):
    said = await cli("tokens", "check", tokenizer_dir(), "--renderer", "nope")
    assert said.status == 1
    assert "'nope'" in said.err and "template" in said.err


@pytest.mark.parametrize("renderer", ["chatml", "template"])
async def test_streaming_of_a_reply_is_checked(cli: Cli, renderer: str):
    said = await cli("tokens", "check", tokenizer_dir(), "--renderer", renderer, "--json")
    verdicts = {item["name"]: item for item in said.json[0]["properties"]}
    assert verdicts["streaming"]["verdict"] == "ok"
    assert "pieces while it is sampled" in verdicts["streaming"]["says"]
