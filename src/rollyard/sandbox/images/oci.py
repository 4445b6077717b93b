"""Reads the index, manifest and config of an OCI or Docker image.

Invariants. Nothing is used before its sha256 and size match what the document that references it declares. Of an
index, only the entry for this machine's platform is used; an image for another platform is refused, not tried.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollyard.sandbox.images.errors import HostileImage, ImageError
from rollyard.sandbox.images.reference import DIGEST

MOST_LAYERS = 512  # Docker allows 127
MOST_JSON_BYTES = 4 << 20  # as registries do
CHUNK = 1 << 20
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class Blob:
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Config:
    """The run settings of an image. `user` is for information only: a sandbox has its own user."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class FoundImage:
    """An image at its source. `also` are other digests by which it may be requested: those of its indexes."""

    digest: str
    config: Config = field(default_factory=Config)
    layers: tuple[Blob, ...] = ()
    also: tuple[str, ...] = ()


ProgressCallback = Callable[[int], None]
"""Progress callback: receives the number of bytes of a blob that are available so far."""


class BlobSource(Protocol):
    """The source of an image that consists of layers."""

    async def resolve(self) -> FoundImage: ...

    async def fetch(self, blob: Blob, folder: Path, on_progress: ProgressCallback) -> Path:
        """Returns the blob as a verified file: below `folder`, or at its existing path."""
        ...


def machine() -> str:
    """This machine's architecture, as OCI names it."""
    name = platform.machine()
    return _MACHINES.get(name, name)


async def read_image(raw: bytes, read: Callable[[Blob], Awaitable[bytes]], *, tag: str = "") -> FoundImage:
    """Returns the image for this machine from an index or a manifest. `read` returns a small, verified blob."""
    also: tuple[str, ...] = ()
    for _ in range(3):  # an index may refer to another one
        body = read_json(raw)
        if "manifests" not in body:
            break
        also = (*also, sha256(raw))
        raw = await read(choose(body, tag))
        tag = ""
    else:
        raise ImageError("its index contains only further indexes")
    if body.get("schemaVersion") != 2 or not isinstance(body.get("config"), dict):
        raise ImageError("its manifest has an unsupported format", "push it again with a newer tool")
    layers = tuple(blob_of(layer) for layer in as_list(body.get("layers")))
    if len(layers) > MOST_LAYERS:
        raise HostileImage(f"it has {len(layers)} layers")
    config = read_config(await read(blob_of(body["config"])))
    return FoundImage(sha256(raw), config, layers, also)


def choose(index: Mapping[str, Any], tag: str = "") -> Blob:
    """Returns the entry of an index for this machine; with a tag, among the entries that have it."""
    entries = [entry for entry in as_list(index.get("manifests")) if isinstance(entry, dict)]
    if tag:
        names = [as_table(entry.get("annotations")).get(REF_NAME, "") for entry in entries]
        entries = [entry for entry, name in zip(entries, names, strict=True) if tag in (name, name.rpartition(":")[2])]
        if not entries:
            raise ImageError(f"it has no tag {tag!r}", f"it has: {', '.join(filter(None, names)) or 'none'}")
    places = [as_table(entry.get("platform")) for entry in entries]
    fitting = [
        entry
        for entry, place in zip(entries, places, strict=True)
        if not place or (place.get("os"), place.get("architecture")) == ("linux", machine())
    ]
    if not fitting:
        there = sorted({f"{place.get('os')}/{place.get('architecture')}" for place in places})
        raise ImageError(f"it is not made for linux/{machine()}", f"it has: {', '.join(there) or 'nothing'}")
    return blob_of(fitting[0])


def read_config(raw: bytes) -> Config:
    body = read_json(raw)
    target_platform = (body.get("os") or "linux", body.get("architecture") or machine())
    if target_platform != ("linux", machine()):
        raise ImageError(f"it is made for {'/'.join(map(str, target_platform))}; this machine is linux/{machine()}")
    config = as_table(body.get("config"))
    pairs = (str(pair).partition("=") for pair in as_list(config.get("Env")))
    env = {name: value for name, equals, value in pairs if name and equals and "\0" not in name + value}
    return Config(env, str(config.get("WorkingDir") or ""), str(config.get("User") or ""))


def blob_of(entry: object) -> Blob:
    body = as_table(entry)
    digest, size = body.get("digest"), body.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ImageError(f"{digest!r} is not a supported digest (sha256)")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageError(f"{digest} has no size")
    return Blob(digest, size)


def sha256(raw: bytes) -> str:
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def verify(raw: bytes, blob: Blob) -> bytes:
    if len(raw) != blob.size or sha256(raw) != blob.digest:
        raise ImageError(f"{blob.digest} does not match its content: {len(raw)} bytes with {sha256(raw)}")
    return raw


def verify_file(path: Path, blob: Blob) -> bool:
    """Blocking."""
    if path.stat().st_size != blob.size:
        return False
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest() == blob.digest


def read_json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"a manifest is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ImageError("a manifest is not a JSON object")
    return body


def as_table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
