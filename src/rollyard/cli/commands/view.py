"""`rollyard view`: opens a file of trajectories in the browser, without a service."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from rollyard.cli._browser import open_in_browser
from rollyard.cli._console import AsJson, CommandError, note, print_json


def view(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the page to this file; else to a temporary one, which is kept.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the page's URL, and open no browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open trajectories of a file in the browser. No service is needed.

    Reads records with trajectories as `rollyard submit --out` and `rollouts show --json --messages` write them, ATIF
    trajectories of any version, Inspect's logs as JSON, conversations ({"messages": […]}), each as JSON or JSON Lines,
    and pages that `rollouts show --html` wrote.
    """
    from rollyard.cli._exporting import write_file
    from rollyard.exports.reading import UnreadableFile, read_rollouts

    count = 0

    def counted():
        nonlocal count
        for one in read_rollouts(path):
            count += 1
            yield one

    folder: Path | None = None
    if out_file is None:
        folder = Path(tempfile.mkdtemp(prefix="rollyard-view-"))  # only this user can read it
        out_file = folder / "rollouts.html"
    try:
        write_file(out_file, counted())
    except UnreadableFile as error:
        raise CommandError(error.what, error.remedy, 2) from error
    finally:
        if folder is not None and not out_file.exists():
            folder.rmdir()
    url = out_file.absolute().as_uri()
    if as_json:
        print_json({"file": os.fspath(out_file), "url": url, "rollouts": count})
    else:
        typer.echo(url)
    if not (print_only or as_json) and not open_in_browser(url):
        note("no browser was found: open the URL above")
