"""A package index and a hub on 127.0.0.1, with real HTTP. A test can stop a download halfway."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "someone/tiny"


class Index:
    """Serves one wheel at `/simple/tiny-weights/`, and the files of a folder at `/someone/tiny/resolve/REVISION/…` with
    the hub's description of that repository."""

    def __init__(self, wheel: Path | None = None, folder: Path | None = None) -> None:
        self.wheel = wheel
        self.folder = folder
        self.url = ""
        self.downloads = 0
        self.goes_on = threading.Event()
        """While it is cleared, the download of a wheel stops halfway."""
        self.goes_on.set()
        self.is_halfway = threading.Event()
        self.disconnected = threading.Event()
        """Set when the client disconnects halfway."""

    def answer(self, path: str) -> bytes | None:
        if self.wheel and path == "/simple/tiny-weights/":
            return f'<a href="/files/{self.wheel.name}">{self.wheel.name}</a>'.encode()
        if self.wheel and path == f"/files/{self.wheel.name}":
            return self.wheel.read_bytes()
        if self.folder and path.startswith(f"/api/models/{REPOSITORY}/"):
            files = sorted(self.folder.iterdir())
            if path.endswith("/revision/main"):
                siblings = [{"rfilename": file.name} for file in files]
                return json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": siblings}).encode()
            tree = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": REVISION} for file in files]
            return json.dumps(tree).encode()
        base = f"/{REPOSITORY}/resolve/{REVISION}/"
        if self.folder and path.startswith(base) and (self.folder / path.removeprefix(base)).is_file():
            return (self.folder / path.removeprefix(base)).read_bytes()
        return None


@contextmanager
def serving(index: Index) -> Generator[Index, None, None]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._begin()

        def do_GET(self) -> None:
            body = self._begin()
            if body is None:
                return
            if not self.path.endswith(".whl"):
                self.wfile.write(body)
                return
            index.downloads += 1
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            index.is_halfway.set()
            if not index.goes_on.is_set():
                self.connection.settimeout(0.05)
                while not index.goes_on.is_set():
                    try:
                        is_closed = self.connection.recv(1) == b""
                    except TimeoutError:
                        continue
                    except OSError:
                        is_closed = True
                    if is_closed:
                        index.disconnected.set()
                        return
            self.wfile.write(body[half:])

        def _begin(self) -> bytes | None:
            body = index.answer(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("X-Repo-Commit", REVISION)
            if body is None and self.path.startswith("/api/models/"):
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("ETag", f'"{sha256(body or b"").hexdigest()}"')
            self.end_headers()
            return body

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield index
    finally:
        index.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
