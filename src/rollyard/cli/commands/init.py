"""`rollyard init`: writes a small project with an environment of its own, from the files in `cli/project`.

The templates are complete files. `PROJECT` in them stands for the environment's name; nothing else is replaced.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, print_json

FILES = {
    "README.md": "README.md",
    "Makefile": "Makefile",
    "rollyard.toml": "rollyard.toml",
    "environment.py": "environment.py",
    "tasks.jsonl": "tasks.jsonl",
    "test_environment.py": "test_environment.py",
    "train.py": "train.py",
    "lora.py": "lora.py",
    "gitignore": ".gitignore",
}
"""The templates, and their names in a project."""

PLACEHOLDER = "PROJECT"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the project; a new or an empty one.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the environment; else derived from the folder's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a small project: an environment with an oracle, ten tasks, a test, and a trainer.

    `make test` in it runs the tasks in real sandboxes, without a model. Nothing has to be installed or registered:
    commands that are started in the folder find the environment by its rollyard.toml. The tutorial in docs/tutorial
    continues from here to a trained adapter.
    """
    name = name or re.sub(r"\W+", "_", folder.resolve().name.lower(), flags=re.ASCII).strip("_")
    _check_name(name)
    written = _write(folder, name)
    steps = [*_activation(), f"cd {folder}", "make test", "rollyard tasks try tasks.jsonl:1 --agent oracle"]
    if as_json:
        print_json({"folder": str(folder.resolve()), "name": name, "files": written, "next": steps})
        return
    typer.echo(f"The environment {name} is in {folder}: {', '.join(written)}.\n\nNext:")
    for step in steps:
        typer.echo(f"  {step}")
    typer.echo("Then train an adapter, with `make engine`, `make serve` and `make train` in three terminals: README.md")


def _check_name(name: str) -> None:
    from rollyard.plugins import plugins

    if not _NAME.fullmatch(name):
        raise CommandError(
            f"{name!r} cannot be the name of an environment",
            "give one with --name: a lower case letter, then lower case letters, digits and _",
            2,
        )
    if name in {point.name for point in plugins("rollyard.environments")}:
        raise CommandError(f"there is an environment {name} already", "give another name with --name", 2)


def _write(folder: Path, name: str) -> list[str]:
    """Writes the files and returns their names. Raises CommandError if the folder has files."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            what = "is not empty" if folder.is_dir() else "is a file"
            raise CommandError(f"{folder} {what}", "give a new folder; nothing was written")
        folder.mkdir(parents=True, exist_ok=True)
        templates = resources.files("rollyard.cli").joinpath("project")
        for template, file in FILES.items():
            text = templates.joinpath(template).read_text("utf-8")
            (folder / file).write_text(text.replace(PLACEHOLDER, name), "utf-8")
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}", "give another folder") from error
    return list(FILES.values())


def _activation() -> list[str]:
    """The command that makes this Python the one of `make test`, if it is not already."""
    found = shutil.which("python3")
    is_in_environment = sys.prefix != sys.base_prefix
    is_active = found is not None and Path(found).parent == Path(sys.prefix) / "bin"
    return [f". {sys.prefix}/bin/activate"] if is_in_environment and not is_active else []
