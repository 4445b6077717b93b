"""Images: pulled from registries, archives, SIF files and folders, and stored by digest in the forms that runtimes use.

An image is made once, under a lock that all processes share, and is then used by name. Submit looks the name up in a
file and refuses a task whose image is missing. The stores of other tools are not touched.

Invariants. An image with a record is complete. A crash leaves a `.partial` folder, which the next pull of that image
continues or `prune` removes. All data is verified by its sha256 before use. Unpacking needs no root and follows no
link out of the image (`unpack`). An image in use is not removed.
"""

from rollyard.sandbox.images.build import build_image
from rollyard.sandbox.images.errors import HostileImage, ImageError, ImageInUse
from rollyard.sandbox.images.image import Image, Pruned
from rollyard.sandbox.images.reference import Reference, parse_reference
from rollyard.sandbox.images.registry import RetrySettings
from rollyard.sandbox.images.sources import OnProgress, PullStep
from rollyard.sandbox.images.store import ImageStore
from rollyard.sandbox.images.unpack import UnpackBounds, Unpacker

__all__ = [
    "HostileImage",
    "Image",
    "ImageError",
    "ImageInUse",
    "ImageStore",
    "OnProgress",
    "Pruned",
    "PullStep",
    "Reference",
    "RetrySettings",
    "UnpackBounds",
    "Unpacker",
    "build_image",
    "parse_reference",
]
