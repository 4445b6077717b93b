"""Connections to public addresses, in a network namespace whose loopback has one of them.

    the sandbox ──▶ its proxy ──▶ 93.184.216.34 (on this namespace's `lo`), besides 127.0.0.1 and 10.1.2.3

Here, a name whose answer changes is a real DNS rebinding: the next answer is the address of a listening server.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollyard.core.egress import HostRule
from rollyard.sandbox import CONTROL_DIR, BubblewrapRuntime, SandboxSpec
from rollyard.sandbox.egress import Egress, EgressLedger, ProxyBounds, egress_env
from rollyard.sandbox.egress.addresses import is_this_machine
from tests.sandbox.egress.site import Names, Server

PUBLIC, PUBLIC6, PRIVATE = "93.184.216.34", "2606:2800:220:1::1", "10.1.2.3"


class Place:
    def __init__(self, public: Server, private: Server, names: Names) -> None:
        self.public, self.private, self.names, self.ledger = public, private, names, EgressLedger()


@asynccontextmanager
async def open_place() -> AsyncGenerator[Place, None]:
    """Opens a server at the public addresses and one at the private ones, on the same port."""
    for address in (f"{PUBLIC}/32", f"{PRIVATE}/32", f"{PUBLIC6}/128"):
        ready = ["nodad"] if ":" in address else []  # so that it can be bound at once
        subprocess.run(["ip", "addr", "replace", address, "dev", "lo", *ready], check=True, capture_output=True)
    public, private = Server(8080), Server(8080)
    async with AsyncExitStack() as stack:
        for server, address in ((public, PUBLIC), (public, PUBLIC6), (private, PRIVATE), (private, "127.0.0.1")):
            await stack.enter_async_context(await asyncio.start_server(server.answer, address, 8080))
        yield Place(public, private, Names())


async def asked(
    place: Place, folder: Path, *urls: str, rules: tuple[str, ...] = ("*:8080",), is_own: bool = False
) -> str:
    """Returns curl's output from inside. `is_own`: the proxy refuses the public addresses as this machine's."""
    egress = Egress(
        rules=tuple(map(HostRule.parse, rules)),
        resolve=place.names,
        bounds=ProxyBounds(connect_s=5.0),
        env=egress_env({}, CONTROL_DIR),
        ledger=place.ledger,
        is_own=is_this_machine if is_own else lambda _: False,
    )
    async with BubblewrapRuntime(root=folder / "root") as runtime:
        sandbox = await runtime.start(SandboxSpec(egress=egress), lease_s=60)
        result = await sandbox.exec("; ".join(f"curl -sS '{url}'" for url in urls), timeout_s=60)
        await sandbox.kill()
    return result.stdout.decode()


async def test_a_public_host_is_reached(tmp_path: Path):
    async with open_place() as place:
        place.names.answers = {"a.test": [[PUBLIC]], "six.test": [[PUBLIC6]]}
        output = await asked(place, tmp_path, "http://a.test:8080/", "http://six.test:8080/")
        assert output == "welcome\nwelcome\n" and place.ledger.verdicts == {"allowed": 2}


async def test_every_changed_dns_answer_is_checked(tmp_path: Path):
    async with open_place() as place:
        place.names.answers = {"re.test": [[PUBLIC], [PRIVATE], ["127.0.0.1"], [PUBLIC, PRIVATE], [PUBLIC]]}
        output = await asked(place, tmp_path, *["http://re.test:8080/"] * 5)
        assert output.count("welcome") == 2 and output.count("private address") == 3
        assert place.names.asked == ["re.test"] * 5, "one lookup for each request"
        assert place.private.connections == 0 and place.public.connections == 2


async def test_a_literal_address_is_reached_only_if_it_is_listed(tmp_path: Path):
    async with open_place() as place:
        urls = [f"http://{PUBLIC}:8080/", f"http://[{PUBLIC6}]:8080/", f"http://{PRIVATE}:8080/"]
        assert "welcome" not in await asked(place, tmp_path, *urls)
        rules = (f"{PUBLIC}:8080", f"[{PUBLIC6}]:8080", f"{PRIVATE}:8080")
        output = await asked(place, tmp_path / "listed", *urls, rules=rules)
        assert output.count("welcome") == 2 and "private address" in output
        assert place.private.connections == 0 and place.names.asked == []


async def test_a_public_address_of_this_machine_is_not_reached(tmp_path: Path):
    async with open_place() as place:
        place.names.answers = {"a.test": [[PUBLIC]], "six.test": [[PUBLIC6]]}
        output = await asked(place, tmp_path, "http://a.test:8080/", "http://six.test:8080/", is_own=True)
        assert output.count("this machine's own") == 2 and place.public.connections == 0
