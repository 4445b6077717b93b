"""`--install-completion SHELL`, `--show-completion SHELL`. Without a name, Typer looks for the shell that runs us."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.cli._console import CommandError

OPTIONS = ("--install-completion", "--show-completion")


def complete_for(argv: Sequence[str]) -> bool:
    """Installs or prints the completion of a shell that is named. Returns False if the line is not such a call.

    Typer ignores the name, and fails where no shell runs: in a Dockerfile, under a configuration manager."""
    if len(argv) != 2 or argv[0] not in OPTIONS or argv[1].startswith("-"):
        return False
    import typer
    from typer._completion_shared import Shells, get_completion_script, install

    option, shell = argv
    names = [one.value for one in Shells]
    if shell not in names:
        raise CommandError(f"{shell!r} is no shell with completion", f"name one of: {', '.join(names)}", 2)
    if option == "--show-completion":
        typer.echo(get_completion_script(prog_name="rollyard", complete_var="_ROLLYARD_COMPLETE", shell=shell))
    else:
        name, path = install(shell=shell, prog_name="rollyard", complete_var="_ROLLYARD_COMPLETE")
        typer.echo(f"{name} completion is installed in {path}: start a new shell")
    return True
