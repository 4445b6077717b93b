"""What the image store returns: images, and the result of `prune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.sandbox.base import ImageKind


@dataclass(frozen=True, slots=True)
class Image:
    """A stored image. `reference` is the name by which it was requested; `env` and `workdir` are from its config."""

    reference: str
    digest: str
    size_bytes: int
    kinds: tuple[ImageKind, ...]
    env: Mapping[str, str]
    workdir: str
    user: str
    created_at: float
    used_at: float
    references: tuple[str, ...] = ()  # all its names with a tag
    skipped: int = 0  # devices and FIFOs of its layers, which are not unpacked


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would remove in a dry run."""

    images: tuple[Image, ...]
    in_use: tuple[Image, ...]  # kept only because they are in use
    leftovers: int  # of crashed pulls

    @property
    def freed_bytes(self) -> int:
        return sum(image.size_bytes for image in self.images)
