"""Images: from registries, archives, SIF files and folders to what a runtime starts from, kept by digest here.

An image is made once, under a lock that all processes share, and used by name for ever after: a task that names one
that is not here is refused at submit, by a look at a file. Other tools' stores are not touched.

Invariants. What has a record is whole; a crash leaves a `.partial` that the next pull of that image takes over, or
`prune` removes. Every byte is verified by its sha256 before it is used. Unpacking needs no root and follows no link out
(`unpack`). An image in use is not removed.
"""

from rollyard.sandbox.images.build import build_image
from rollyard.sandbox.images.errors import HostileImage, ImageError, ImageInUse
from rollyard.sandbox.images.image import Image, Pruned
from rollyard.sandbox.images.reference import Reference, parse_reference
from rollyard.sandbox.images.registry import RetrySettings
from rollyard.sandbox.images.sources import PullStep, Tell
from rollyard.sandbox.images.store import ImageStore
from rollyard.sandbox.images.unpack import UnpackBounds, Unpacker

__all__ = [
    "HostileImage",
    "Image",
    "ImageError",
    "ImageInUse",
    "ImageStore",
    "Pruned",
    "PullStep",
    "Reference",
    "RetrySettings",
    "Tell",
    "UnpackBounds",
    "Unpacker",
    "build_image",
    "parse_reference",
]
