"""`rollyard tokens check`: a description of a model's tokens, as a table and as JSON."""

import json
import shutil
from pathlib import Path

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.conftest import Cli


async def test_a_table_shows_each_property(cli: Cli):
    result = await cli("tokens", "check", tokenizer_dir())
    assert result.status == 0
    assert "rendered by chatml" in result.err
    for name in ("prefix-stable", "close token", "bridging after a cut-off", "tool calls", "reasoning", "unicode"):
        assert name in result.out
    assert "streaming" in result.out
    assert "<|im_end|>" in result.out


async def test_json_is_one_object(cli: Cli):
    result = await cli("tokens", "check", tokenizer_dir(), "--renderer", "template", "--json")
    (report,) = result.json
    assert (result.status, report["renderer"]) == (0, "template")
    assert {item["verdict"] for item in report["properties"]} == {"ok"}
    assert all(item["says"] for item in report["properties"])


async def test_a_template_without_a_renderer_is_still_described(cli: Cli, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    result = await cli("tokens", "check", folder, "--json")
    (report,) = result.json
    assert (result.status, report["renderer"]) == (0, None)
    assert "does not close" in report["reason"]
    verdicts = {item["name"]: item["verdict"] for item in report["properties"]}
    assert (verdicts["close token"], verdicts["bridging"], verdicts["unicode"]) == ("no", "does not apply", "ok")


async def test_a_tokenizer_with_no_or_a_broken_template_is_still_described(cli: Cli, tmp_path: Path):
    for index, template in enumerate([None, "{% if", "{{ raise_exception('never') if add_generation_prompt }}"]):
        folder = tmp_path / f"model{index}"
        shutil.copytree(tokenizer_dir(), folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        for extra in ([], ["--renderer", "chatml"]):
            result = await cli("tokens", "check", folder, "--json", *extra)
            assert (result.status, result.err) == (0, "")
            verdicts = {item["name"]: item["verdict"] for item in result.json[0]["properties"]}
            assert (verdicts["close token"], verdicts["unicode"]) == ("no", "ok")


async def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(cli: Cli, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    (broken / "tokenizer_config.json").write_text("{}")
    for model, expected in (
        ("nowhere", "neither a folder nor a hub name"),
        ("no-such/model", "not in the local hub cache"),
        (tmp_path, "lacks tokenizer.json"),
        (broken, "cannot be read"),
    ):
        result = await cli("tokens", "check", model)
        assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
        assert expected in result.err


async def test_an_unknown_renderer_is_named_with_the_choices(cli: Cli):
    result = await cli("tokens", "check", tokenizer_dir(), "--renderer", "nope")
    assert result.status == 1
    assert "'nope'" in result.err and "template" in result.err


@pytest.mark.parametrize("renderer", ["chatml", "template"])
async def test_streaming_of_a_reply_is_checked(cli: Cli, renderer: str):
    result = await cli("tokens", "check", tokenizer_dir(), "--renderer", renderer, "--json")
    verdicts = {item["name"]: item for item in result.json[0]["properties"]}
    assert verdicts["streaming"]["verdict"] == "ok"
    assert "pieces while it is sampled" in verdicts["streaming"]["says"]
