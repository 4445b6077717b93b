"""A tiny registry on loopback, and images to put into it: real tar layers, real manifests, real HTTP."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from rollyard.sandbox.images.oci import INDEXES, MANIFESTS, machine

BUSYBOX = Path("/bin/busybox")
Entry = tuple[str, str, bytes | str, int]
"""A name, a kind (file, folder, link, hard, device, fifo), its content or link target, and a mode."""


def file(name: str, data: bytes | str = b"", mode: int = 0o644) -> Entry:
    return (name, "file", data.encode() if isinstance(data, str) else data, mode)


def folder(name: str, mode: int = 0o755) -> Entry:
    return (name, "folder", b"", mode)


def link(name: str, target: str) -> Entry:
    return (name, "link", target, 0o777)


def hard(name: str, target: str) -> Entry:
    return (name, "hard", target, 0o644)


_TYPES = {
    "folder": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
    "fifo": tarfile.FIFOTYPE,
}


def tar(*entries: Entry) -> bytes:
    """Returns an uncompressed layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, what, mode in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.mtime, member.uid, member.gid = mode, 1_000_000_000, 12345, 12345
            if kind == "file":
                assert isinstance(what, bytes)
                member.size = len(what)
                archive.addfile(member, io.BytesIO(what))
                continue
            member.type = _TYPES[kind]
            if isinstance(what, str):
                member.linkname = what
            archive.addfile(member)
    return out.getvalue()


def busybox() -> tuple[Entry, ...]:
    """Returns the entries of a root in which a sandbox can run."""
    return (
        folder("bin"),
        file("bin/busybox", BUSYBOX.read_bytes(), 0o755),
        *(link(f"bin/{name}", "busybox") for name in ("sh", "cat", "echo", "sleep", "ls", "env")),
        *(folder(name) for name in ("proc", "dev", "tmp", "etc", "workspace", "home/agent")),
        file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
    )


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def described(data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": sha256(data), "size": len(data), **more}


@dataclass
class Packed:
    """An image as stored in a registry."""

    manifest: bytes
    config: bytes
    layers: list[bytes]

    @property
    def digest(self) -> str:
        return sha256(self.manifest)

    @property
    def blobs(self) -> dict[str, bytes]:
        return {sha256(data): data for data in (self.config, *self.layers)}


def pack(*layers: bytes, env: Sequence[str] = (), workdir: str = "", architecture: str | None = None) -> Packed:
    packed = [gzip.compress(layer, mtime=0) for layer in layers]
    config = json.dumps(
        {
            "os": "linux",
            "architecture": architecture or machine(),
            "config": {"Env": list(env), "WorkingDir": workdir, "User": "nobody"},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFESTS[0],
            "config": described(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [described(data, "application/vnd.oci.image.layer.v1.tar+gzip") for data in packed],
        }
    ).encode()
    return Packed(manifest, config, packed)


def index_of(*images: tuple[Packed, str]) -> bytes:
    """Returns a manifest list of images and their architectures."""
    entries = [
        described(image.manifest, MANIFESTS[0], platform={"os": "linux", "architecture": architecture})
        for image, architecture in images
    ]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": entries}).encode()


def write_layout(target: Path, image: Packed, tag: str = "v1") -> None:
    """Writes an OCI image layout."""
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for digest, data in {**image.blobs, image.digest: image.manifest}.items():
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    entry = described(image.manifest, MANIFESTS[0], annotations={"org.opencontainers.image.ref.name": tag})
    (target / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


@dataclass
class Registry:
    """A registry to use with `async with`. Its fields set how it misbehaves."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)  # by name:tag, and by digest
    login: tuple[str, str] | None = None  # requires a token, which only this user gets
    breaks: list[int] = field(default_factory=list)  # the next blobs are cut after so many bytes
    ignores_range: bool = False
    blob_gate: asyncio.Event | None = None  # blobs stop halfway until it is set
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # a blob is halfway
    log: list[str] = field(default_factory=list)
    redirect: str = ""  # where blobs are redirected to
    url: str = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/token", self._token)
        app.router.add_get("/v2/{name:.+}/manifests/{version}", self._manifest)
        app.router.add_get("/v2/{name:.+}/blobs/{digest}", self._blob)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.blob_gate is not None:
            self.blob_gate.set()
        await self._runner.cleanup()

    def put(self, name: str, image: Packed, index: bytes | None = None) -> str:
        """Adds an image and returns its reference."""
        self.blobs |= image.blobs
        self.manifests |= {image.digest: image.manifest, name: index or image.manifest}
        if index is not None:
            self.manifests[sha256(index)] = index
        return f"{self.url}/{name}"

    def asked(self, word: str) -> list[str]:
        return [line for line in self.log if word in line]

    def _refused(self, request: web.Request) -> web.Response | None:
        if self.login is None or request.headers.get("Authorization") == "Bearer good-token":
            return None
        name = request.match_info["name"]
        challenge = f'Bearer realm="http://{self.url}/token",service="tests",scope="repository:{name}:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    async def _token(self, request: web.Request) -> web.Response:
        self.log.append(f"token {request.query.get('scope')}")
        assert self.login is not None
        right = "Basic " + base64.b64encode(":".join(self.login).encode()).decode()
        if request.headers.get("Authorization") != right:
            return web.Response(status=401)
        return web.json_response({"token": "good-token"})

    async def _manifest(self, request: web.Request) -> web.Response:
        name, version = request.match_info["name"], request.match_info["version"]
        self.log.append(f"manifest {version}")
        if refused := self._refused(request):
            return refused
        raw = self.manifests.get(version if version.startswith("sha256:") else f"{name}:{version}")
        return web.Response(status=404) if raw is None else web.Response(body=raw)

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        asked = request.headers.get("Range", "")
        has_login = "with authorization" if "Authorization" in request.headers else ""
        self.log.append(f"blob {digest} {asked} {has_login}".strip())
        if refused := self._refused(request):
            return refused
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect + digest})
        if digest not in self.blobs:
            return web.Response(status=404)
        data, headers, status, begin = self.blobs[digest], {}, 200, 0
        if asked and not self.ignores_range:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers, status = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}, 206
        reply = web.StreamResponse(status=status, headers=headers)
        reply.content_length = len(data) - begin
        await reply.prepare(request)
        end = min(len(data), begin + self.breaks.pop(0)) if self.breaks else len(data)
        half = begin + (end - begin) // 2
        await reply.write(data[begin:half])
        if self.blob_gate is not None and half > begin:
            self.reached.set()
            await self.blob_gate.wait()
        await reply.write(data[half:end])
        if end < len(data):
            assert request.transport is not None
            request.transport.abort()
        return reply
