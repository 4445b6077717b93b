"""What the store tells of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollyard.sandbox.base import ImageKind


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is here. `reference` is the name it was asked for by; `env` and `workdir` are its own wishes."""

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
    skipped: int = 0  # devices and FIFOs of its layers, which nobody unpacks here


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or would."""

    images: tuple[Image, ...]
    in_use: tuple[Image, ...]  # those that it would have removed
    leftovers: int  # of crashed pulls

    @property
    def freed_bytes(self) -> int:
        return sum(image.size_bytes for image in self.images)
