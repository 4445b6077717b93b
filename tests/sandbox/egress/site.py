"""Real servers on this machine's loopback, names for them, and a real sandbox whose egress proxy reaches some of them.

`allowed.test` and names below `sub.test` are on the list; `forbidden.test` and all others are not, although their
servers are on the same loopback. Every server counts its connections, and every lookup is counted.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import ssl
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollyard.core.egress import EgressCeiling, HostRule
from rollyard.sandbox import CONTROL_DIR, ExecResult, Sandbox, SandboxSpec
from rollyard.sandbox.egress import Egress, EgressLedger, ProxyBounds, egress_env
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from tests import worker

ALLOWED, FORBIDDEN = "allowed.test", "forbidden.test"
BIG_BYTES = 1 << 20
QUICK = ProxyBounds(connections=4, most_bytes=200_000, head_s=2.0, connect_s=5.0, idle_s=2.0, names=8)


class Server:
    """Answers HTTP, or HTTP in TLS, one request per connection; `requests` contains the requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = self.open = 0
        self.requests: list[bytes] = []
        self.raw: bytes | None = None  # its answer, if set
        self.names: list[str | None] = []  # requested by TLS clients

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            if self.raw is None:
                await self.respond(head, reader, writer)
            else:
                writer.write(self.raw)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def respond(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = head.decode("latin-1").split("\r\n")
        match = re.search(r"[A-Z] (\S+) HTTP/1", head.decode("latin-1"))
        path = match[1] if match else ""
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        body = b"welcome\n"
        if "content-length" in headers:
            body = b"got " + await reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b"got " + await reader.readuntil(b"0\r\n\r\n")
        if path.startswith("/redirect/"):
            where = path.removeprefix("/redirect/")
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode())
        elif path == "/big":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BIG_BYTES + bytes(BIG_BYTES))
        elif path == "/chunks":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")
        elif path == "/silent":
            await reader.read()
        elif path == "/echo":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while data := await reader.read(4096):
                writer.write(data)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            if not head.startswith(b"HEAD"):
                writer.write(body)
        await writer.drain()


class Names:
    """The resolver: each name has a list of answers, the last of which is repeated. `asked` contains all lookups."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Sequence[str]]] = {}
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.most = self._now = 0  # concurrent lookups

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if host in self.silent:
                await asyncio.Event().wait()
        finally:
            self._now -= 1
        answers = self.answers.get(host)
        if not answers:
            raise OSError(f"{host} is not known")
        return answers.pop(0) if len(answers) > 1 else answers[0]


@dataclass
class Site:
    allowed: Server
    allowed_tls: Server
    forbidden: Server
    forbidden_tls: Server
    names: Names
    certificate: Path
    sandbox: Sandbox
    ledger: EgressLedger

    async def python(self, script: str, timeout_s: float = 60.0) -> str:
        """Runs a script inside, with `preamble.py` before it, and returns its output."""
        result = await self.run(["python3", "-c", PREAMBLE + script, *self.arguments], timeout_s)
        assert result.status == 0, result.stderr.decode("utf-8", "replace")
        return result.stdout.decode("utf-8", "replace")

    async def run(self, command: str | list[str], timeout_s: float = 60.0) -> ExecResult:
        return await self.sandbox.exec(command, timeout_s=timeout_s)

    @property
    def arguments(self) -> list[str]:
        servers = (self.allowed, self.allowed_tls, self.forbidden, self.forbidden_tls)
        return [str(server.port) for server in servers]

    @property
    def verdicts(self) -> dict[str, int]:
        return self.ledger.verdicts

    def check_unreached(self) -> None:
        """Checks that no forbidden server was connected to and no forbidden name looked up."""
        assert self.forbidden.connections == 0, self.forbidden.requests
        assert self.forbidden_tls.connections == 0, self.forbidden_tls.requests
        allowed_names = {
            name for name in self.names.asked if name in (ALLOWED, *self.names.answers) and name != FORBIDDEN
        }
        assert set(self.names.asked) == allowed_names


PREAMBLE = (Path(__file__).parent / "preamble.py").read_text()


@asynccontextmanager
async def open_site(
    runtime: LaunchedRuntime,
    *,
    bounds: ProxyBounds | None = None,
    methods: tuple[str, ...] = ("GET", "HEAD", "POST"),
) -> AsyncGenerator[Site, None]:
    names, ledger = Names(), EgressLedger()
    certificate, key = make_certificate()
    async with AsyncExitStack() as stack:

        async def listening(*, is_tls: bool) -> Server:
            server = Server(worker.free_port())
            context = None
            if is_tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate, key)
                context.sni_callback = lambda _, name, __: server.names.append(name)
            listener = await asyncio.start_server(server.answer, "127.0.0.1", server.port, ssl=context)
            await stack.enter_async_context(listener)
            stack.callback(listener.close)
            return server

        allowed, allowed_tls = await listening(is_tls=False), await listening(is_tls=True)
        forbidden, forbidden_tls = await listening(is_tls=False), await listening(is_tls=True)
        here = (allowed.port, allowed_tls.port)
        rules = tuple(HostRule(name, here) for name in (ALLOWED, "*.sub.test"))
        for name in (ALLOWED, FORBIDDEN, "a.sub.test"):
            names.answers[name] = [["127.0.0.1"]]
        private = (HostRule(ALLOWED, here), HostRule("a.sub.test", here))
        env = {
            **egress_env({}, CONTROL_DIR),
            "SSL_CERT_FILE": "/workspace/ca.pem",
            "CURL_CA_BUNDLE": "/workspace/ca.pem",
        }
        spec = SandboxSpec(
            has_doorway=True,
            owner="ro_test",
            egress=Egress(
                rules=rules,
                resolve=names,
                methods=methods,
                private=private,
                bounds=bounds or ProxyBounds(connect_s=5.0),
                env=env,
                ledger=ledger,
            ),
        )
        sandbox = await runtime.start(spec, lease_s=300)
        stack.push_async_callback(sandbox.kill)
        await sandbox.write("/workspace/ca.pem", certificate.read_bytes())
        yield Site(allowed, allowed_tls, forbidden, forbidden_tls, names, certificate, sandbox, ledger)


@asynccontextmanager
async def served() -> AsyncGenerator[tuple[Server, Names, EgressCeiling], None]:
    """Yields a server on loopback as allowed.test, and a ceiling that allows tasks to list it."""
    server, names = Server(worker.free_port()), Names()
    names.answers["allowed.test"] = [["127.0.0.1"]]
    rule = HostRule("allowed.test", (server.port,))
    async with await asyncio.start_server(server.answer, "127.0.0.1", server.port):
        yield server, names, EgressCeiling(hosts=(rule,), private=(rule,))


@functools.cache
def make_certificate() -> tuple[Path, Path]:
    """Makes a self-signed certificate for all names here, and its key."""
    folder = Path(tempfile.mkdtemp(prefix=f"{worker.PREFIX}{os.getpid()}-"))
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ",".join(f"DNS:{name}" for name in (ALLOWED, FORBIDDEN, "*.sub.test"))
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test")
    files = ("-out", str(certificate), "-keyout", str(key))
    argv = ["openssl", "req", "-x509", *kind, "-addext", f"subjectAltName={names}", *files]
    subprocess.run(argv, check=True, capture_output=True)
    return certificate, key
