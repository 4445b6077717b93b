"""The pages "coming from": Rollyard's side of each example, installed as a package and run by the page's commands."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rollyard.testing.script import FolderTokenizer, Reply, Rules, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.cli.conftest import Cli
from tests.client.served import call
from tests.service.prorl_parts import open_trainer
from tests.test_docs import ROOT, blocks

ENGINE = "http://127.0.0.1:8000"  # in the commands of the pages


def page(name: str) -> Path:
    return ROOT / "docs" / "how-to" / f"coming-from-{name}.md"


def install(name: str, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the environment of that name as a package, from the page's code."""
    (code,) = [code for code in blocks(source, "python") if "from rollyard" in code and f'name = "{name}"' in code]
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rollyard.environments]\n{name} = {name}:{name.title()}\n")
    monkeypatch.syspath_prepend(folder)


async def pass_at_1(source: Path, cli: Cli, script: Callable[[Turn], Reply]) -> float:
    """Runs the page's commands of Rollyard in their order, and returns what the last one, the evaluation, prints."""
    (block,) = [block for block in blocks(source, "sh") if block.startswith("rollyard tasks import")]
    importing, validation, evaluation = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    imported, validated = await cli(*importing), await cli(*validation)
    assert (imported.status, validated.status) == (0, 0), (imported, validated)
    assert validation[:2] == ["tasks", "validate"] and "2 tasks, 0 with problems, 0 not tried" in validated.err
    folder = tokenizer_dir()
    async with ScriptedEngine(script, tokenizer=FolderTokenizer(folder), root=str(folder)) as engine:
        assert ENGINE in evaluation
        result = await cli(*[engine.url if word == ENGINE else word for word in evaluation], "--json")
    assert result.status == 0, result
    return result.json[0]["all"]["pass_at"]["1"]["mean"]


async def test_the_environment_that_comes_from_verifiers_runs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install("stock", page("verifiers"), tmp_path / "packages", monkeypatch)

    def looks_up_apples_and_guesses_pears(turn: Turn) -> Reply:
        if "apples" not in turn.text:
            return Reply("70")
        return Reply(re.findall(r"\d+", turn.text)[-1] if turn.number else call("count", item="apples"))

    assert await pass_at_1(page("verifiers"), cli, looks_up_apples_and_guesses_pears) == 0.5


async def test_the_environment_that_comes_from_nemo_gym_runs_on_its_rows(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    install("shelf", page("nemo-gym"), tmp_path / "packages", monkeypatch)
    (row,) = (json.loads(text) for text in blocks(page("nemo-gym"), "json"))
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'target': 2})}\n")
    takes_five = Rules(default=(Reply(call("take", count=2)), Reply(call("take", count=3)), Reply("Done.")))
    assert await pass_at_1(page("nemo-gym"), cli, takes_five) == 0.5


async def test_the_handler_that_comes_from_prorl_agent_runs_by_its_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install("guess", page("prorl"), tmp_path / "packages", monkeypatch)
    (commands,) = [block for block in blocks(page("prorl"), "sh") if block.startswith("curl")]
    calls = [shlex.split(line) for line in commands.replace("\\\n", "").splitlines()]
    assert [words[3].partition(":8006")[2] for words in calls] == ["/add_llm_server", "/start", "/process"]
    asked = json.loads(calls[-1][-1])
    script = Rules(rules=(("my number", (Reply("5"), Reply("8"), Reply("7"))),))
    async with (
        ScriptedEngine(script, dialect="prorl", tokenizer=FolderTokenizer(tokenizer_dir())) as engine,
        open_trainer(tmp_path / "site", engine) as trainer,
    ):
        found = await trainer.post("/process", asked)
        missed = await trainer.post("/process", {**asked, "instance": {**asked["instance"], "number": 1}})
    assert (found.status, missed.status) == (200, 200), (found.body, missed.body)
    contents = [message["content"] for message in found.body["messages"]]
    assert contents[1:] == ["5", "Too low.", "8", "Too high.", "7"]
    assert (found.body["resolved"], missed.body["resolved"]) == (True, False)
