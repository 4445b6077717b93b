"""`rollyard images`: the images that tasks may name as `sandbox.image`, stored on this machine by digest.

Works on the settings' data folder, with or without a running service: both use the same store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from rollyard.cli._console import AsJson, CommandError, note, plain, print_json, print_lines, run, seconds, show, table
from rollyard.cli._progress import PullBars, size

if TYPE_CHECKING:
    from rollyard.sandbox.base import ImageKind
    from rollyard.sandbox.images import Image, ImageStore
    from rollyard.service.settings import Settings

T = TypeVar("T")

images = typer.Typer(help="Sandbox images on this machine: pull, build, list, prune, remove.", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Option("--config", help="The TOML file; else $ROLLYARD_CONFIG, else ./rollyard.toml.")
]
DataDir = Annotated[Path | None, typer.Option(help="The service's data folder; else from the settings.")]
As = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="FORM", help="folder or sif, may be repeated; else what the allowed runtimes use."),
]
Name = Annotated[str | None, typer.Option(help="Name for tasks to use; else its own name.")]

_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@images.command("pull", epilog="Example: rollyard images pull docker://ubuntu:24.04 --as sif")
def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="docker://NAME:TAG or NAME:TAG; oci:DIR, oci-archive:FILE, docker-archive:FILE; a .sif file or a"
            " folder by path.",
        ),
    ],
    forms: As = None,
    name: Name = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain HTTP to the registry.")] = False,
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Pull an image, verify it, and store it in the form that the runtimes use.

    Parts that are already stored are not fetched again. Uses the logins of `podman login` and `docker login`.
    """
    settings = _settings(file, data_dir)
    kinds = _kinds(forms, settings)
    with PullBars() as progress:
        image = _run(_store(settings).pull(source, kinds, name=name, is_insecure=insecure, on_progress=progress.report))
    _show_one(image, as_json)


@images.command("build", epilog="Example: rollyard images build tasks/fix-the-parser --name fix-the-parser:1")
def build(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="An Apptainer .def file, a Dockerfile, or a folder with one.")
    ],
    forms: As = None,
    name: Name = None,
    context: Annotated[Path | None, typer.Option(help="Build context of a Dockerfile; else its own folder.")] = None,
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Build an image and store it.

    A .def file is built by Apptainer, a Dockerfile by podman, docker or buildah: the first that works here.
    """
    from rollyard.sandbox.images import build_image

    settings = _settings(file, data_dir)
    kinds = _kinds(forms, settings)
    with PullBars() as progress:
        image = _run(
            build_image(_store(settings), recipe, kinds, name=name, context=context, on_progress=progress.report)
        )
    _show_one(image, as_json)


@images.command("list", epilog="Example: rollyard images list --json")
def list_images(file: File = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the images that tasks may name."""
    import time

    stored = _guard(_store(_settings(file, data_dir)).list)
    if as_json:
        print_lines(as_body(image) for image in stored)
    elif not stored:
        note("there is no image; pull one: rollyard images pull NAME:TAG")
    else:
        grid = table("name", "digest", "kept as", "size", "last used", right=("size", "last used"))
        for image in stored:
            names = "\n".join(image.references) or "–"
            ago = seconds(max(1.0, time.time() - image.used_at)) + " ago"
            kinds = ", ".join(image.kinds)
            grid.add_row(plain(names), image.digest.removeprefix("sha256:")[:12], kinds, size(image.size_bytes), ago)
        show(grid)


@images.command("prune", epilog="Example: rollyard images prune --older-than 30d --max-size 200G --dry-run")
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove images not used for this long: 12h, 30d, 4w.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove the longest unused ones until the rest fits: 500M, 200G.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")
    ] = False,
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove unused images, and the leftovers of crashed pulls. An image in use is never removed."""
    older_than_s = None if older_than is None else _amount(older_than, _UNITS_S, "--older-than")
    max_bytes = None if max_size is None else _amount(max_size, _UNITS_BYTES, "--max-size")
    store = _store(_settings(file, data_dir))
    pruned = _guard(lambda: store.prune(older_than_s=older_than_s, max_bytes=max_bytes, is_dry_run=dry_run))
    if as_json:
        print_json(
            {
                "removed": [as_body(image) for image in pruned.images],
                "in_use": [as_body(image) for image in pruned.in_use],
                "leftovers": pruned.leftovers,
                "freed_bytes": pruned.freed_bytes,
                "dry_run": dry_run,
            }
        )
        return
    would = "would be " if dry_run else ""
    for image in pruned.images:
        note(f"{image.reference} {would}removed ({size(image.size_bytes)})")
    for image in pruned.in_use:
        note(f"{image.reference} is in use and is kept")
    note(f"{size(pruned.freed_bytes)} {would}freed, {pruned.leftovers} leftovers {would}removed")


@images.command("remove", epilog="Example: rollyard images remove ubuntu:24.04")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Names or digests.")],
    file: File = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove names of images. An image is deleted with its last name, or if it is named by digest."""
    store = _store(_settings(file, data_dir))
    for name in names:
        image = _guard(lambda name=name: store.remove(name))
        if as_json:
            print_json({"name": name, "digest": image.digest, "removed": True})
        else:
            note(f"{name} is removed")


def as_body(image: Image) -> dict[str, Any]:
    """Returns an image as a JSON object."""
    return {**asdict(image), "env": dict(image.env)}


def _show_one(image: Image, as_json: bool) -> None:
    if as_json:
        print_json(as_body(image))
        return
    if image.skipped:
        note(f"{image.skipped} devices or FIFOs in it were skipped")
    note(f"{image.reference} is stored as {' and '.join(image.kinds)} ({size(image.size_bytes)}, {image.digest})")


def _settings(file: Path | None, data_dir: Path | None) -> Settings:
    from rollyard.service.settings import load_settings

    return load_settings({"data_dir": data_dir}, os.environ, file).settings


def _store(settings: Settings) -> ImageStore:
    from rollyard.sandbox.images import ImageStore
    from rollyard.service.machine import IMAGES, open_data_dir

    open_data_dir(settings.data_dir)
    return ImageStore(settings.data_dir / IMAGES)


def _kinds(forms: list[str] | None, settings: Settings) -> list[ImageKind]:
    """Returns the requested forms; else the preferred form of each allowed runtime."""
    from rollyard.sandbox import ApptainerRuntime, BubblewrapRuntime, LocalRuntime, OciRuntime

    there = {kind.name: kind.image_kinds for kind in (BubblewrapRuntime, ApptainerRuntime, OciRuntime, LocalRuntime)}
    makable: tuple[Literal["folder"], Literal["sif"]] = ("folder", "sif")
    if forms:
        for form in forms:
            if form not in makable:
                raise CommandError(f"--as {form}: expected folder or sif", "see `rollyard images pull --help`", 2)
        return [kind for kind in makable if kind in forms]
    kinds: list[ImageKind] = []
    for name in settings.runtimes:
        best: ImageKind | None = next(iter(there.get(name, ())), None)
        if best is not None and best not in kinds:
            kinds.append(best)
    if not kinds:
        allowed = ", ".join(settings.runtimes)
        raise CommandError(f"no allowed runtime uses images ({allowed})", "allow bubblewrap or apptainer, or give --as")
    return kinds


def _amount(text: str, units: dict[str, int], option: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]?)(?:i?b)?", text.strip().lower())
    if match is None or match[2] not in units:
        examples = ", ".join(f"5{unit}" for unit in units if unit)
        raise CommandError(f"{option} {text}: expected a number with a unit", f"such as {examples}", 2)
    return int(float(match[1]) * units[match[2]])


def _run(work: Coroutine[object, object, T]) -> T:
    return _guard(lambda: run(work))


def _guard(work: Callable[[], T]) -> T:
    from rollyard.sandbox.images import ImageError

    try:
        return work()
    except ImageError as error:
        raise CommandError(error.what, error.remedy) from error
