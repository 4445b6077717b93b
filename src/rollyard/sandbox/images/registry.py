"""A read-only client for registries (the Docker v2 / OCI distribution protocol).

It uses HTTPS, except on loopback or where the operator allows plain HTTP; a redirect never changes from HTTPS to HTTP.
A login is sent to the registry and to the token server that its challenge names, never to the target of a redirect. An
interrupted download resumes where it stopped (Range), also after a crash: the data so far is kept as `.part`. Nothing
is used before its sha256 and size have been verified.
"""

# The loop only stats and opens a few files; slow work (writing, hashing) runs in threads.
# ruff: noqa: ASYNC230, ASYNC240

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from yarl import URL

from rollyard.sandbox.images.auth import find_login, has_helper, parse_challenge
from rollyard.sandbox.images.errors import HostileImage, ImageError
from rollyard.sandbox.images.oci import (
    CHUNK,
    INDEXES,
    MANIFESTS,
    MOST_JSON_BYTES,
    Blob,
    FoundImage,
    ProgressCallback,
    read_image,
    sha256,
    verify,
    verify_file,
)
from rollyard.sandbox.images.reference import HUB, Reference

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("rollyard.sandbox")

HUB_API = "registry-1.docker.io"  # the host of the Docker Hub's API
MOST_REDIRECTS = 5
MOST_BREAKS = 100  # interruptions of one download, even if each try makes progress
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Retries and timeouts for a registry. A download fails after `tries` in a row that received no byte."""

    tries: int = 5
    wait_s: float = 0.5  # doubled each time
    connect_s: float = 30.0
    silence_s: float = 60.0


class _Transient(Exception):
    """A failure that is worth a retry."""


class Registry:
    """A client for one image in its registry; use it with `async with`."""

    def __init__(
        self, reference: Reference, *, is_insecure: bool = False, patience: RetrySettings | None = None
    ) -> None:
        self._reference = reference
        self._patience = patience or RetrySettings()
        host = HUB_API if reference.host == HUB else reference.host
        self._is_plain = is_insecure or reference.is_loopback
        self._base = URL(f"{'http' if self._is_plain else 'https'}://{host}/v2/{reference.name}/")
        self._authorization = ""
        self._asking = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp  # here, because it takes 0.1 s, and few services need it

        patience = self._patience
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=patience.connect_s, sock_read=patience.silence_s)
        # The environment's proxies do not apply to loopback.
        is_outside = not self._reference.is_loopback
        self._http = aiohttp.ClientSession(timeout=timeout, trust_env=is_outside, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def resolve(self) -> FoundImage:
        version = self._reference.version
        raw = await self._small(f"manifests/{version}", (*INDEXES, *MANIFESTS))
        if self._reference.digest and sha256(raw) != self._reference.digest:
            raise ImageError(f"the registry answered {self._reference} with {sha256(raw)}")
        return await read_image(raw, self._read)

    async def fetch(self, blob: Blob, folder: Path, on_progress: ProgressCallback) -> Path:
        import aiohttp

        target = folder / blob.digest.removeprefix("sha256:")
        part = target.with_name(target.name + ".part")
        if target.is_file() and await asyncio.to_thread(verify_file, target, blob):  # verified again: it is not fsynced
            on_progress(blob.size)
            return target
        part.touch()
        failures = broken = 0
        while True:
            have = part.stat().st_size
            try:
                await self._continue_download(blob, part, on_progress)
                if not await asyncio.to_thread(verify_file, part, blob):
                    part.write_bytes(b"")
                    raise _Transient("its sha256 differs from the manifest's")
                part.rename(target)
                return target
            except (aiohttp.ClientError, TimeoutError, _Transient) as error:
                broken += 1
                failures = 1 if part.stat().st_size > have else failures + 1
                why = str(error) or type(error).__name__
                if failures >= self._patience.tries or broken >= MOST_BREAKS:
                    raise ImageError(f"{blob.digest} cannot be downloaded: {why}", "try again later") from error
                log.info("download interrupted", extra={"blob": blob.digest, "at": part.stat().st_size, "why": why})
                await asyncio.sleep(self._patience.wait_s * 2 ** (failures - 1))

    async def _continue_download(self, blob: Blob, part: Path, on_progress: ProgressCallback) -> None:
        """Appends to the file until it is as long as the blob."""
        have = part.stat().st_size
        if have > blob.size:
            part.write_bytes(b"")
            have = 0
        if have == blob.size:
            on_progress(have)
            return
        headers = {"Range": f"bytes={have}-"} if have else {}
        async with await self._open(f"blobs/{blob.digest}", headers) as reply:
            is_resumed = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if reply.status == 416 or (reply.status == 206 and not is_resumed):
                part.write_bytes(b"")
                raise _Transient("the registry cannot resume the download")
            await self._check(reply, f"blob {blob.digest}")
            with open(part, "ab" if is_resumed else "wb") as file:
                on_progress(file.tell())
                async for data in reply.content.iter_chunked(CHUNK):
                    if file.tell() + len(data) > blob.size:
                        raise HostileImage(
                            f"{blob.digest} is longer than the {blob.size:,} bytes that its manifest declares"
                        )
                    await asyncio.to_thread(file.write, data)
                    on_progress(file.tell())
        if part.stat().st_size < blob.size:
            raise _Transient(f"it ended at {part.stat().st_size:,} of {blob.size:,} bytes")

    async def _read(self, blob: Blob) -> bytes:
        if blob.size > MOST_JSON_BYTES:
            raise HostileImage(f"a manifest has {blob.size:,} bytes")
        for path in (f"manifests/{blob.digest}", f"blobs/{blob.digest}"):
            with suppress(_NotFound):
                return verify(await self._small(path, MANIFESTS), blob)
        raise ImageError(f"{self._base.host} does not have {blob.digest}")

    async def _small(self, path: str, accept: tuple[str, ...]) -> bytes:
        import aiohttp

        failures = 0
        while True:
            try:
                async with await self._open(path, {"Accept": ", ".join(accept)}) as reply:
                    await self._check(reply, path)
                    return await _whole(reply, path)
            except (aiohttp.ClientError, TimeoutError, _Transient) as error:
                failures += 1
                if failures >= self._patience.tries:
                    why = str(error) or type(error).__name__
                    hint = "is it the right name? A registry without HTTPS needs --insecure"
                    raise ImageError(f"{self._base.host} did not return {path}: {why}", hint) from error
                await asyncio.sleep(self._patience.wait_s * 2 ** (failures - 1))

    async def _check(self, reply: aiohttp.ClientResponse, what: str) -> None:
        if reply.status in (200, 206):
            return
        if reply.status in _AGAIN:
            raise _Transient(f"the registry answered {reply.status}")
        if reply.status == 404:
            raise _NotFound(
                f"there is no {self._reference} ({what})", "check its name and tag; a private one may need a login"
            )
        if reply.status in (401, 403):
            hint = "log in first: podman login or docker login"
            if has_helper():
                hint += " (logins in a credential helper are not read; set REGISTRY_AUTH_FILE to a file with `auths`)"
            raise ImageError(f"{self._base.host} denies access to {self._reference} ({reply.status})", hint)
        raise ImageError(f"{self._base.host} answered {reply.status} for {what}")

    # --- one request: redirects, and the challenge ---

    async def _open(self, path: str, headers: dict[str, str]) -> aiohttp.ClientResponse:
        used = self._authorization
        reply = await self._follow(self._base / path, headers, used)
        is_its_own = reply.url.origin() == self._base.origin()  # the target of a redirect gets no login
        if reply.status == 401 and is_its_own and "WWW-Authenticate" in reply.headers:
            challenge = reply.headers["WWW-Authenticate"]
            reply.release()
            async with self._asking:
                if self._authorization == used:  # else another download has authenticated meanwhile
                    self._authorization = await self._answer(challenge)
            reply = await self._follow(self._base / path, headers, self._authorization)
        return reply

    async def _follow(self, url: URL, headers: dict[str, str], authorization: str) -> aiohttp.ClientResponse:
        assert self._http is not None
        origin = url.origin()
        for _ in range(MOST_REDIRECTS + 1):
            auth_headers = {"Authorization": authorization} if authorization and url.origin() == origin else {}
            reply = await self._http.get(url, headers={**headers, **auth_headers}, allow_redirects=False)
            if reply.status not in (301, 302, 303, 307, 308) or "Location" not in reply.headers:
                return reply
            reply.release()
            url = self._private(reply.headers["Location"], url)
        raise ImageError(f"{origin.host} redirects too often")

    def _private(self, text: str, base: URL | None = None) -> URL:
        """Returns a URL that the registry refers to. Raises ImageError if it is not allowed."""
        try:
            url = base.join(URL(text)) if base is not None else URL(text)
        except ValueError:
            url = URL()
        if not url.host or url.scheme not in ("http", "https") or (url.scheme == "http" and not self._is_plain):
            place = f"{url.scheme}://{url.host}" if url.host else "nowhere"
            raise ImageError(f"{self._base.host} redirects to {place}, which is not HTTPS", "allow it: --insecure")
        return url

    async def _answer(self, challenge: str) -> str:
        """Returns an Authorization header for the registry's challenge; empty if no login is available or accepted."""
        assert self._http is not None
        login = find_login(self._reference.host)
        scheme, parameters = parse_challenge(challenge)
        if scheme == "basic":
            return login.header if login else ""
        if scheme != "bearer" or not parameters.get("realm"):
            raise ImageError(f"{self._base.host} requires authentication by {scheme!r}, which is not supported")
        realm = self._private(parameters["realm"])
        query = {"scope": parameters.get("scope") or f"repository:{self._reference.name}:pull"}
        if parameters.get("service"):
            query["service"] = parameters["service"]
        headers = {"Authorization": login.header} if login else {}
        async with self._http.get(realm.update_query(query), headers=headers, allow_redirects=False) as reply:
            if reply.status in _AGAIN:
                raise _Transient(f"{realm.host} answered {reply.status}")
            if reply.status != 200:
                return ""  # the registry then refuses the request, and that error has the remedy
            raw = await _whole(reply, "a token")
        return f"Bearer {_token(raw, str(realm.host))}"


class _NotFound(ImageError):
    """The registry answered 404."""


async def _whole(reply: aiohttp.ClientResponse, what: str) -> bytes:
    raw = bytearray()
    async for data in reply.content.iter_chunked(CHUNK):
        raw += data
        if len(raw) > MOST_JSON_BYTES:
            raise HostileImage(f"{what} is larger than {MOST_JSON_BYTES:,} bytes")
    return bytes(raw)


def _token(raw: bytes, host: str) -> str:
    with suppress(ValueError):
        body = json.loads(raw)
        token = isinstance(body, dict) and (body.get("token") or body.get("access_token"))
        if isinstance(token, str) and token:
            return token
    raise ImageError(f"{host} did not return a token")
