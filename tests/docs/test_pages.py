"""The blocks of README, quickstart, tutorial and how-tos run as they are written, by `tests/docs/page.py`'s rules."""

import re
import shlex
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from rollyard.cli.app import app
from rollyard.sandbox.python import portable_python
from tests.docs import page as runner
from tests.sandbox.runtimes import CACHE

PAGES = runner.pages()
LIMIT_S = 150.0
NO_NAMESPACES = "no network namespaces here (containers often forbid them): "


def runs(page: Path) -> bool:
    return any(block.language in runner.RUN and not (block.reason or block.file) for block in runner.blocks(page))


@pytest.mark.slow  # together
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=pytest.mark.xdist_group(f"page {page.name}")) for page in PAGES],
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path):
    if not runs(page):
        return  # listed below
    is_first = page.name in ("README.md", "quickstart.md")  # they build their own, as a newcomer's service does
    pythons = None if is_first else portable_python(CACHE / "python").folder.parent
    status, output = runner.run(page, tmp_path, limit_s=LIMIT_S, pythons=pythons)
    if output.startswith("unshare: "):
        pytest.skip(NO_NAMESPACES + output)
    assert status == 0, output[-10_000:]


def test_blocks_that_are_not_run_are_listed_with_their_reasons():
    listed = runner.NOT_RUN.read_text().splitlines()
    assert runner.not_run() == listed, "if you mean it: python tests/docs/page.py --not-run > tests/docs/not-run.txt"


def test_the_commands_of_blocks_that_are_not_run_have_valid_arguments():
    """Each `rollyard COMMAND …` is parsed as the command line parses it, and not executed."""
    unrun = [block for page in PAGES for block in runner.blocks(page) if block.reason and block.language == "sh"]
    lines = [line for block in unrun for line in block.code.replace("\\\n", " ").splitlines()]
    commands = [found[1] for line in lines if (found := re.match(r"(?:[A-Z_]+=\S+ )*rollyard (.*)", line))]
    commands = [line for line in commands if "-completion" not in line]  # parsing it installs a completion
    assert len(commands) > 20
    program = get_command(app)
    for line in commands:
        command, arguments = program, shlex.split(line.partition(" > ")[0], comments=True)
        context = command.make_context("rollyard", list(arguments))
        while isinstance(command, TyperGroup):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command = found
            context = command.make_context(command.name, list(arguments), parent=context)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```\nrollyard top\n```\n", "page.md:1: a block in ``"),
        ("<!-- skip -->\n```sh\nls\n```\n", "page.md:1: `skip` is no comment"),
        ("<!-- not run: -->\n```sh\nls\n```\n", "page.md:1: `not run:` is no comment"),
    ],
)
def test_a_block_cannot_leave_the_rules_in_silence(text: str, error: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=error):
        runner.blocks(page)


def test_a_mark_applies_to_the_next_block_only(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n```sh\na\n```\n\n```sh\nb\n```\n\n"
        "<!-- the reader has:\nc\n-->\n\n1. Item:\n\n   ```python\n   if d:\n       e\n   ```\n"
    )
    found = [(block.language, block.code, block.reason, block.line) for block in runner.blocks(page)]
    assert found == [
        ("sh", "a\n", "needs a GPU", 3),
        ("sh", "b\n", "", 7),
        ("sh", "c\n", "", 11),
        ("python", "if d:\n    e\n", "", 17),
    ]


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```sh\necho so far\nfalse\necho further\n```\n", "failed: line 2: false"),
        ("```python\nname = 1\nother\n```\n", 'page.md", line 3, in <module>\n    other\n'),
        ("```sh\ntouch /etc/rollyard-page\n```\n", "failed: line 1: touch /etc/rollyard-page"),
        ("```sh\nrollyard serve --port 1x\n```\n", "ended before it was ready: rollyard serve --port 1x"),
    ],
)
def test_a_block_that_fails_fails_its_page(block: str, error: str, tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(block + "\n```sh\necho later block\n```\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    status, output = runner.run(page, folder, limit_s=LIMIT_S)
    if output.startswith("unshare: "):
        pytest.skip(NO_NAMESPACES + output)
    assert status == 1 and error in output
    assert "\nfurther\n" not in output and "later block" not in output
