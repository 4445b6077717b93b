"""docs/reference/cli.md, written from the commands themselves. A test compares the two.

python -m rollyard.cli._reference > docs/reference/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from rollyard.cli.app import app

HEAD = """# The command line

Every command prints data on stdout, and progress and notes on stderr. With `--json` data is JSON, one object per line.
Exit status: 0 done, 1 it went wrong (one line on stderr says what, and what to do), 2 wrong usage, 130 interrupted.

Commands that talk to a service find it by `--url` and `--token`, else `ROLLYARD_URL` and `ROLLYARD_TOKEN`, else by the
settings on this machine (`rollyard config`). This page is written by `python -m rollyard.cli._reference`.
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_command(get_command(app), "rollyard"))


def _command(command: Any, path: str) -> Iterator[str]:
    children: dict[str, Any] = getattr(command, "commands", {})
    if not children:
        yield f"\n## `{path}`\n\n{_paragraphs(command.help)}\n"
        yield from _parameters(command.params, path)
        yield f"\n```\n{command.epilog.removeprefix('Example: ')}\n```\n"
    for name in sorted(children):
        yield from _command(children[name], f"{path} {name}")


def _parameters(parameters: list[Any], path: str) -> Iterator[str]:
    rows: list[str] = []
    for parameter in parameters:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        name = " / ".join((*parameter.opts, *parameter.secondary_opts)) if is_option else parameter.metavar or "NAME"
        text = (parameter.help or "").replace("|", "\\|")
        default = parameter.default
        if is_option and default not in (None, False, True, (), []) and "[default" not in text:
            text += f" [default: {default}]"
        rows.append(f"| `{name}` | {text} |\n")
    if rows:
        yield "\n| | |\n| --- | --- |\n"
        yield from rows


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


if __name__ == "__main__":
    sys.stdout.write(reference())
