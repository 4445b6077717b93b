"""Errors of image commands, for the operator. They never appear in a rollout's record."""

from __future__ import annotations


class ImageError(Exception):
    """An image cannot be pulled, built, read or removed. `what` is the cause, `remedy` how to fix it."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class ImageInUse(ImageError):
    """A sandbox or a service holds the image."""


class HostileImage(ImageError):
    """An image exceeds a limit, or contains an entry that only a malicious image has."""
