"""Network namespaces that act as other machines: each has one link to this one, and its own loopback.

10.77.9.9          this machine, where services are
10.77.N.1 ─ 10.77.N.2    the link to machine N
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

HERE = "10.77.9.9"


def ip(*words: str) -> None:
    completed = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    assert completed.returncode == 0, f"ip {' '.join(words)}: {completed.stderr}"


class Machine:
    """Programs started with `within` before their command use its network."""

    def __init__(self, number: int) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "600"], stdin=subprocess.DEVNULL)
        self._net = Path(f"/proc/{self._holder.pid}/ns/net")
        own = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 20
        while self._net.readlink() == own and time.monotonic() < deadline:
            time.sleep(0.01)
        there, here = f"far{number}", f"near{number}"
        self._here = here
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", str(self._holder.pid))
        ip("address", "add", f"10.77.{number}.1/24", "dev", here)
        ip("link", "set", here, "up")
        self.ip("link", "set", "lo", "up")
        self.ip("address", "add", f"10.77.{number}.2/24", "dev", there)
        self.ip("link", "set", there, "up")
        self.ip("route", "add", "default", "via", f"10.77.{number}.1")

    @property
    def within(self) -> list[str]:
        return ["nsenter", f"--net={self._net}"]

    def ip(self, *words: str) -> None:
        completed = subprocess.run([*self.within, "ip", *words], capture_output=True, text=True, timeout=20)
        assert completed.returncode == 0, f"ip {' '.join(words)}: {completed.stderr}"

    def drop(self, address: str, port: int) -> None:
        """Drops what is sent there from now on, also on open connections."""
        self._filter("-I", address, port)

    def let(self, address: str, port: int) -> None:
        self._filter("-D", address, port)

    def _filter(self, how: str, address: str, port: int) -> None:
        rule = ["OUTPUT", "-d", address, "-p", "tcp", "--dport", str(port), "-j", "DROP"]
        completed = subprocess.run([*self.within, "iptables", how, *rule], capture_output=True, text=True, timeout=20)
        assert completed.returncode == 0, completed.stderr

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self._here], capture_output=True, timeout=20)
        self._holder.kill()
        self._holder.wait()


@contextmanager
def machines(count: int) -> Generator[list[Machine], None, None]:
    ip("address", "add", f"{HERE}/32", "dev", "lo")
    created: list[Machine] = []
    try:
        created += [Machine(number) for number in range(1, count + 1)]
        yield created
    finally:
        for machine in created:
            machine.close()
        ip("address", "del", f"{HERE}/32", "dev", "lo")


@asynccontextmanager
async def at_address(port: int, address: str = HERE) -> AsyncGenerator[str, None]:
    """Makes what listens on that port of loopback reachable for other machines, and returns its URL there."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(carry, address, 0)
    try:
        yield f"http://{address}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
