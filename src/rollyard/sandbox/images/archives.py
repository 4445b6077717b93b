"""Images in files that other tools wrote: an OCI layout, a tar archive of one, or the output of `docker save`.

Invariants. As for any image (`oci`), nothing is used before its sha256 and size have been verified. Members of an
archive are read by name; their names never become paths on disk.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollyard.sandbox.images.errors import HostileImage, ImageError
from rollyard.sandbox.images.oci import (
    CHUNK,
    MOST_JSON_BYTES,
    MOST_LAYERS,
    Blob,
    FoundImage,
    ProgressCallback,
    as_list,
    as_table,
    blob_of,
    read_config,
    read_image,
    read_json,
    sha256,
    verify,
    verify_file,
)


class Layout:
    """`oci:DIR[:TAG]`: an image layout. Its blobs are read in place."""

    def __init__(self, folder: Path, tag: str = "") -> None:
        self._folder, self._tag = folder, tag

    async def resolve(self) -> FoundImage:
        try:
            raw = await asyncio.to_thread((self._folder / "index.json").read_bytes)
        except OSError as error:
            raise ImageError(f"{self._folder} is not an OCI image layout: {error.strerror}") from error
        resolved = await read_image(raw, self._read, tag=self._tag)
        return FoundImage(
            resolved.digest, resolved.config, resolved.layers, resolved.also[1:]
        )  # the digest of index.json itself is not a name

    async def fetch(self, blob: Blob, folder: Path, on_progress: ProgressCallback) -> Path:
        path = self._path(blob)
        if not path.is_file() or not await asyncio.to_thread(verify_file, path, blob):
            raise ImageError(f"{blob.digest} is missing or broken in {self._folder}")
        on_progress(blob.size)
        return path

    async def _read(self, blob: Blob) -> bytes:
        if blob.size > MOST_JSON_BYTES:
            raise HostileImage(f"a manifest has {blob.size:,} bytes")
        try:
            return verify(await asyncio.to_thread(self._path(blob).read_bytes), blob)
        except OSError as error:
            raise ImageError(f"{blob.digest} is missing in {self._folder}") from error

    def _path(self, blob: Blob) -> Path:
        return self._folder / "blobs" / "sha256" / blob.digest.removeprefix("sha256:")


class Archive:
    """`oci-archive:FILE[:TAG]` and `docker-archive:FILE[:TAG]`, distinguished by their contents. Layers of the second
    kind are verified by the config's diff_ids."""

    def __init__(self, file: Path, tag: str = "") -> None:
        self._file, self._tag = file, tag
        self._layers: dict[str, str] = {}  # digest → member

    async def resolve(self) -> FoundImage:
        try:
            return await asyncio.to_thread(self._resolve)
        except (KeyError, TypeError, ValueError, EOFError, OSError, tarfile.TarError) as error:
            raise ImageError(f"{self._file} is not an image archive: {error}") from error

    async def fetch(self, blob: Blob, folder: Path, on_progress: ProgressCallback) -> Path:
        target = folder / blob.digest.removeprefix("sha256:")
        member = self._layers.get(blob.digest) or f"blobs/sha256/{target.name}"
        await asyncio.to_thread(self._copy, member, blob, target, on_progress)
        return target

    def _resolve(self) -> FoundImage:
        with self._open() as tar:
            names = {name.removeprefix("./") for name in tar.getnames()}
        if "manifest.json" not in names:
            return self._resolve_layout()
        entries = [entry for entry in json.loads(self._small("manifest.json")) if isinstance(entry, dict)]
        if self._tag:
            entries = [entry for entry in entries if _has_tag(entry, self._tag)]
        if len(entries) != 1:
            raise ImageError(f"{self._file} has {len(entries)} images with that name", "choose one: FILE:TAG")
        raw = self._small(str(entries[0]["Config"]))
        diff_ids = as_list(as_table(read_json(raw).get("rootfs")).get("diff_ids"))
        members = [str(name) for name in as_list(entries[0].get("Layers"))]
        if len(diff_ids) != len(members) or len(members) > MOST_LAYERS:
            raise ImageError(f"{self._file} has {len(members)} layers, but its config lists {len(diff_ids)}")
        with self._open() as tar:
            layers = tuple(
                blob_of({"digest": digest, "size": self._member(tar, member).size})
                for digest, member in zip(diff_ids, members, strict=True)
            )
        self._layers = {blob.digest: member for blob, member in zip(layers, members, strict=True)}
        return FoundImage(sha256(raw), read_config(raw), layers)

    def _resolve_layout(self) -> FoundImage:
        async def read(blob: Blob) -> bytes:
            return verify(self._small(f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"), blob)

        return asyncio.run(read_image(self._small("index.json"), read, tag=self._tag))

    def _open(self) -> tarfile.TarFile:
        try:
            return tarfile.open(self._file)
        except (OSError, tarfile.TarError) as error:
            raise ImageError(f"{self._file} is not a tar archive: {error}") from error

    def _member(self, tar: tarfile.TarFile, name: str) -> tarfile.TarInfo:
        for spelled in (name, f"./{name}"):
            try:
                member = tar.getmember(spelled)
                if member.issym():  # older versions of `docker save` write a repeated layer as a link to the first
                    member = tar.getmember(posixpath.normpath(posixpath.join(member.name, "..", member.linkname)))
                if not member.isreg():
                    raise ImageError(f"{self._file}: {name} is not a file")
                return member
            except KeyError:
                continue
        raise ImageError(f"{self._file} has no {name}")

    def _small(self, name: str) -> bytes:
        with self._open() as tar:
            member = self._member(tar, name)
            if member.size > MOST_JSON_BYTES:
                raise HostileImage(f"{name} has {member.size:,} bytes")
            file = tar.extractfile(member)
            return file.read() if file else b""

    def _copy(self, name: str, blob: Blob, target: Path, on_progress: ProgressCallback) -> None:
        with self._open() as tar, open(target, "wb") as out:
            member = self._member(tar, name)
            if member.size != blob.size:
                raise ImageError(f"{self._file}: layer {name} has {member.size:,} bytes, not {blob.size:,}")
            file = tar.extractfile(member)
            while file and (data := file.read(CHUNK)):
                out.write(data)
                on_progress(out.tell())
        if not verify_file(target, blob):
            raise ImageError(f"{self._file}: layer {name} does not match its manifest")


def _has_tag(entry: Mapping[str, Any], tag: str) -> bool:
    return any(tag in (name, str(name).rpartition(":")[2]) for name in as_list(entry.get("RepoTags")))
