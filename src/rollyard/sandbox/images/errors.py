"""What can go wrong with an image, for the person who asked for it. Never in a rollout's record."""

from __future__ import annotations


class ImageError(Exception):
    """What was wrong, and what to do about it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class ImageInUse(ImageError):
    """A sandbox, or a service, holds it."""


class HostileImage(ImageError):
    """A layer tries what no honest layer does, or goes beyond a bound."""
