"""Resolves the image that a task names to the files that its runtime starts from.

A name with a leading `/` or `.`, or one that ends in `.sif`, is a path on this machine: it must be below the operator's
image folders. Any other name is looked up in the store that `rollyard images` fills. Every submit resolves its image:
this reads files, never the network.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollyard.core.failure import ImageMissing, RuntimeNotAllowed
from rollyard.sandbox.base import ImageKind, Runtime
from rollyard.sandbox.images import Image, ImageError, ImageStore

_FORMS: dict[ImageKind, str] = {"folder": "a folder", "sif": "a SIF file"}


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """What a runtime starts from. `image` is for `ImageStore.hold`; None for a path outside the store."""

    path: Path
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    image: Image | None = None


def resolve_image(
    name: str, runtime: Runtime, folders: Sequence[Path] | None, store: ImageStore | None
) -> ResolvedImage:
    """Returns what `runtime` starts from, or raises `ImageMissing`. If `folders` is None, any path is allowed."""
    if not runtime.image_kinds:
        raise ImageMissing(f"image {name!r}: the runtime {runtime.name} has no images")
    if name.startswith(("/", ".")) or name.endswith(".sif"):
        return ResolvedImage(_checked_path(name, runtime, folders))
    try:
        image = store.find(name) if store is not None else None
    except ImageError as error:
        raise ImageMissing(f"image {name!r}: {error}") from error
    if store is None or image is None:
        raise ImageMissing(f"image {name!r} is not on this machine; fetch it: {_pull(name)}")
    for kind in runtime.image_kinds:
        if kind in image.kinds:
            return ResolvedImage(store.path(image, kind), image.env, image)
    raise ImageMissing(
        f"image {name!r} is here as {' and '.join(_FORMS[kind] for kind in image.kinds)} only, and the runtime"
        f" {runtime.name} reads {_reads(runtime)}; fetch it: {_pull(name)} --as {runtime.image_kinds[0]}"
    )


def _checked_path(name: str, runtime: Runtime, folders: Sequence[Path] | None) -> Path:
    path = Path(os.path.realpath(name))
    if folders is not None and not any(path.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise RuntimeNotAllowed(
            f"image {name!r} is not in a folder that the operator's setting `images` names; add its folder there, or"
            f" copy it: {_pull(name)}"
        )
    if path.is_dir():
        kind: ImageKind = "folder"
    elif path.is_file() and path.suffix == ".sif":
        kind = "sif"
    else:
        raise ImageMissing(f"image {name!r} is neither a folder nor a .sif file on this machine")
    if kind not in runtime.image_kinds:
        raise ImageMissing(f"image {name!r} is {_FORMS[kind]}, and the runtime {runtime.name} reads {_reads(runtime)}")
    return path


def _pull(name: str) -> str:
    return f"rollyard images pull {shlex.quote(name)}"


def _reads(runtime: Runtime) -> str:
    return " or ".join(_FORMS[kind] for kind in runtime.image_kinds)
