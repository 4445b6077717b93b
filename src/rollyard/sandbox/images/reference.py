"""Parses the names of images and of their sources into plain data. No I/O except `exists`.

    ubuntu:24.04, docker://ghcr.io/org/name:tag, host:5000/name@sha256:…     a registry
    oci:DIR[:TAG]   oci-archive:FILE[:TAG]   docker-archive:FILE[:TAG]       files that other tools wrote
    ./image.sif   /images/root   ~/root                                      a SIF file or a root folder, by path

A path begins with `/`, `.` or `~`, or ends with `.sif`: a folder `ubuntu` in the working directory never changes the
meaning of `ubuntu`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollyard.sandbox.images.errors import ImageError

HUB = "docker.io"
"""The default registry, as in other tools."""

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Reference:
    """An image in a registry. With a digest, the tag is for information only."""

    host: str
    name: str
    tag: str = "latest"
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.host}/{self.name}@{self.digest}" if self.digest else f"{self.host}/{self.name}:{self.tag}"

    @property
    def version(self) -> str:
        """The version to request from a registry."""
        return self.digest or self.tag

    @property
    def is_loopback(self) -> bool:
        host = self.host.rpartition(":")[0] if re.search(r":[0-9]+$", self.host) else self.host
        try:
            return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of an image, and the name that it gets unless another is given."""

    kind: Literal["registry", "oci", "oci-archive", "docker-archive", "sif", "folder"]
    name: str
    reference: Reference | None = None
    path: Path = Path()
    tag: str = ""


def parse_reference(text: str) -> Reference:
    """Parses a name in a registry. Raises `ImageError` if it is not valid."""
    remainder, _, digest = text.removeprefix("docker://").partition("@")
    if digest and not DIGEST.fullmatch(digest):
        raise ImageError(f"{text!r}: {digest!r} is not a digest", "a digest is sha256: and 64 of 0-9a-f")
    first, slash, after = remainder.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host, remainder = first, after
    else:
        host = HUB
    name, colon, tag = remainder.partition(":")
    if host == HUB and "/" not in name:
        name = f"library/{name}"
    if not _HOST.fullmatch(host) or not _NAME.fullmatch(name) or len(name) > 255:
        raise ImageError(f"{text!r} is not the name of an image", "names are like ubuntu:24.04 or host/org/name:tag")
    if colon and not _TAG.fullmatch(tag):
        raise ImageError(f"{text!r}: {tag!r} is not a tag")
    return Reference(host, name, tag or "latest", digest)


def parse_origin(text: str) -> Origin:
    """Parses the source of an image. A path must exist."""
    scheme, _, remainder = text.partition(":")
    if scheme in ("oci", "oci-archive", "docker-archive"):
        path, tag = _path_and_tag(remainder)
        return Origin(scheme, _own_name(path, tag), path=path, tag=tag)
    if text.startswith(("/", ".", "~")) or text.endswith(".sif"):
        path = _there(Path(text).expanduser())
        return Origin("folder" if path.is_dir() else "sif", _own_name(path, ""), path=path)
    reference = parse_reference(text)
    return Origin("registry", str(reference), reference)


def own_name(text: str) -> str:
    """Normalizes a name that the operator gives to an image; adds `:latest` unless it has a tag."""
    name, colon, tag = text.rpartition(":") if re.search(r":[^/]*$", text) else (text, "", "")
    host, slash, repository = name.partition("/")
    is_good = _NAME.fullmatch(name) or (slash and _HOST.fullmatch(host) and _NAME.fullmatch(repository))
    if not is_good or (colon and not _TAG.fullmatch(tag)):
        raise ImageError(f"{text!r} is not valid as an image name", "use lower-case letters, digits and . _ - / :tag")
    return f"{name}:{tag or 'latest'}"


def spellings(name: str) -> Iterator[str]:
    """Yields the normalized forms of a name: as the operator's own name first, then as a registry's."""
    for spell in (own_name, lambda text: str(parse_reference(text))):
        with suppress(ImageError):
            yield spell(name)


def _own_name(path: Path, tag: str) -> str:
    """Derives an image name from the file's name; empty if that is not possible: then `--name` is required."""
    stem = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower().removesuffix(".sif").removesuffix(".tar")).strip("-")
    tag = tag.rpartition(":")[2] if ":" in tag else tag  # `docker save` writes whole names
    return f"{stem}:{tag if _TAG.fullmatch(tag) else 'latest'}" if stem else ""


def _path_and_tag(text: str) -> tuple[Path, str]:
    whole = Path(text).expanduser()
    if whole.exists():
        return whole, ""
    for place in (match.start() for match in re.finditer(":", text)):
        path = Path(text[:place]).expanduser()
        if path.exists():
            return path, text[place + 1 :]
    return _there(whole), ""


def _there(path: Path) -> Path:
    if not path.exists():
        raise ImageError(f"there is no {path}")
    return path
