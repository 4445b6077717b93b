"""MCP servers as tools: in real sandboxes, and over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from rollyard.core import Blame, Json
from rollyard.core.failure import (
    SandboxEndedByPolicy,
    SandboxLost,
    SetupFailed,
    TaskInvalid,
    ToolUnreachable,
    UnknownTool,
)
from rollyard.sandbox import BubblewrapRuntime, Sandbox, SandboxSpec
from rollyard.sandbox.doorway import Doorway
from rollyard.testing.sandbox_conformance import eventually
from rollyard.tools.base import ToolContext, ToolResult
from rollyard.tools.mcp import link, pipes
from rollyard.tools.mcp.pipes import LineSplitter
from rollyard.tools.mcp.proxy import BODY_BYTES, McpProxy
from rollyard.tools.mcp.server_tools import McpTool, _names
from rollyard.tools.mcp.sources import McpSource, OutsideServer, mcp_sources
from tests.tools.mcp_parts import BY_HAND, LIBRARY, REAL, loopback, outside, same_python, served

pytestmark = pytest.mark.slow

PYTHON = ("python3", "-u", "server.py")


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncGenerator[Sandbox, None]:
    async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
        yield await runtime.start(SandboxSpec(binds=(LIBRARY,)), lease_s=60.0)


class Opened:
    """The tools of a server, by its own names."""

    def __init__(self, tools: Mapping[str, McpTool]) -> None:
        self.tools = tools

    async def call(self, name: str, timeout_s: float = 20.0, **arguments: Json) -> ToolResult:
        return await self.tools[name].call(arguments, timeout_s=timeout_s)


async def opened(source: McpSource, sandbox: Sandbox | None = None, output_bytes: int = 16_384) -> Opened:
    tools = await source.open(ToolContext(sandbox, output_bytes))
    return Opened({tool._name: tool for tool in tools if isinstance(tool, McpTool)})


async def none_runs(sandbox: Sandbox, pattern: str) -> None:
    """Waits in the sandbox: a killed process needs a moment to end."""
    wait = f"for _ in $(seq 100); do pgrep -f '{pattern}' || exit 0; sleep 0.1; done; exit 1"
    ended = await sandbox.exec(wait, timeout_s=30)
    assert ended.status == 0, ended.stdout


@pytest.fixture
async def by_hand(sandbox: Sandbox) -> AsyncGenerator[Opened, None]:
    await sandbox.write("server.py", BY_HAND.encode())
    server = await opened(McpSource("hand", PYTHON), sandbox)
    yield server
    for tool in server.tools.values():
        await tool.close()


# --- inside ---------------------------------------------------------------------------------------------


async def test_a_real_server_in_the_sandbox_provides_its_tools_and_keeps_its_state(sandbox: Sandbox) -> None:
    if not same_python():
        pytest.skip("the host's /usr/bin/python3 has another version than this one: it cannot import these packages")
    await sandbox.write("server.py", REAL.encode())
    server = await opened(McpSource("counter", PYTHON, {"SECRET": "s3"}), sandbox)
    spec = server.tools["add"].spec
    assert (spec.name, spec.description) == ("counter__add", "Adds to the count.")
    assert spec.parameters["required"] == ["number"]
    assert (await server.call("add", number=2)).content == "count is 2"
    assert (await server.call("add", number=3)).content == "count is 5"
    assert '"secret": "s3"' in (await server.call("where")).content
    wrong = await server.call("add", number="many")
    assert wrong.is_error
    await server.tools["add"].close()


def test_it_works_on_uvloop_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with BubblewrapRuntime(root=tmp_path / "root") as runtime:
            sandbox = await runtime.start(SandboxSpec(), lease_s=60.0)
            await sandbox.write("server.py", BY_HAND.encode())
            server = await opened(McpSource("hand", PYTHON), sandbox)
            assert (await server.call("echo", a=1)).content == 'echo 1 {"a": 1}'
            assert "status 3" in (await server.call("die")).content
            assert "echo 1" in (await server.call("echo")).content
            await server.tools["echo"].close()

    uvloop.run(main())


async def test_garbage_and_notifications_break_nothing(by_hand: Opened) -> None:
    for name in ("garbage", "notify", "garbage", "echo"):
        result = await by_hand.call(name)
        assert not result.is_error, result
        assert result.content.startswith(name)


async def test_a_message_that_is_too_long_fails_one_call(by_hand: Opened) -> None:
    result = await by_hand.call("huge")
    assert result.is_error
    assert "more than 4194304 bytes" in result.content
    assert (await by_hand.call("echo")).content == "echo 2 {}"  # the same server


async def test_a_server_that_floods_its_output_is_ended(by_hand: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "FLOOD_BYTES", 1 << 20)
    result = await by_hand.call("flood")
    assert result.is_error
    assert "more than 1048576 bytes" in result.content
    assert "echo 1" in (await by_hand.call("echo")).content


async def test_a_server_that_dies_is_reported_and_started_again(by_hand: Opened) -> None:
    await by_hand.call("echo")
    died = await by_hand.call("die")
    assert died.is_error
    assert "status 3" in died.content
    assert "oh no" in died.content
    assert "state is lost" in died.content
    again = await by_hand.call("echo")
    assert again.content == "[the server hand had ended and was started anew; its state is lost]\necho 1 {}"
    assert (await by_hand.call("echo")).content == "echo 2 {}"


async def test_a_server_that_was_killed_between_two_calls_is_started_again(by_hand: Opened, sandbox: Sandbox) -> None:
    await by_hand.call("echo")
    other = by_hand.tools["echo"]._link._other
    assert other is not None
    await sandbox.exec("pkill -9 -f server.py", timeout_s=10)
    await eventually(lambda: other.is_dead, "its end is seen")
    again = await by_hand.call("echo")
    assert "started anew" in again.content
    assert not again.is_error


async def test_a_call_ends_at_its_timeout_and_the_server_keeps_running(by_hand: Opened) -> None:
    late = await by_hand.call("hang", timeout_s=0.5)
    assert late.is_error
    assert "no answer within 0.5 s" in late.content
    assert (await by_hand.call("echo")).content == "echo 2 {}"


async def test_a_server_that_does_not_read_is_ended(by_hand: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp.shared.jsonrpc_dispatcher._ABANDON_WRITE_TIMEOUT", 0.1)
    await by_hand.call("deaf")
    unread = await by_hand.call("echo", timeout_s=0.5, a="x" * 200_000)
    assert unread.is_error
    assert "did not even read" in unread.content
    assert "echo 1" in (await by_hand.call("echo")).content


async def test_errors_other_content_and_invalid_results_are_reported(by_hand: Opened) -> None:
    failed = await by_hand.call("fail")
    assert failed.is_error
    assert failed.content.startswith("fail 1")
    refused = await by_hand.call("refuse")
    assert refused.is_error
    assert "bad arguments" in refused.content
    kinds = await by_hand.call("kinds")
    assert kinds.content == '[image/png, 6 bytes]\ninner\n[link to file:///b]\n{"a": [1]}'
    nonsense = await by_hand.call("nonsense")
    assert nonsense.is_error
    assert "no tool result" in nonsense.content
    assert (await by_hand.call("deep")).content.startswith('{"d": [[[')


async def test_an_output_schema_cannot_block_the_event_loop(by_hand: Opened) -> None:
    assert not (await by_hand.call("schema")).is_error  # matching its pattern would practically never end


async def test_output_is_cut(sandbox: Sandbox) -> None:
    await sandbox.write("server.py", BY_HAND.encode())
    server = await opened(McpSource("hand", PYTHON), sandbox, output_bytes=1000)
    result = await server.call("echo", a="x" * 50_000)
    assert len(result.content) < 1100
    assert "left out" in result.content
    await server.tools["echo"].close()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("sh", "-c", "echo broken >&2; exit 7"), "status 7; on standard error: broken"),
        (("no-such-program",), "no-such-program"),
        (("sh", "-c", "yes '{}' | head -c 4000000; sleep 60"), "50000 lines"),
    ],
)
async def test_a_program_that_is_not_a_server_is_the_tasks_fault(
    sandbox: Sandbox, command: tuple[str, ...], why: str
) -> None:
    with pytest.raises(SetupFailed, match=why) as failed:
        await McpSource("hand", command).open(ToolContext(sandbox))
    assert failed.value.blame is Blame.TASK


async def test_a_server_that_never_responds_is_killed(sandbox: Sandbox) -> None:
    source = McpSource("hand", ("sh", "-c", "echo slow >&2; exec sleep 3601"), start_s=0.5)
    with pytest.raises(SetupFailed, match=r"did not answer within 0\.5 s"):
        await source.open(ToolContext(sandbox))
    await none_runs(sandbox, "sleep [3]601")


async def test_a_call_after_the_end_of_the_sandbox_raises_its_failure(by_hand: Opened, sandbox: Sandbox) -> None:
    await sandbox.kill()
    with pytest.raises((SandboxLost, SandboxEndedByPolicy)):
        await by_hand.call("echo")


async def test_a_call_during_the_end_of_the_sandbox_raises_its_failure(by_hand: Opened, sandbox: Sandbox) -> None:
    call = asyncio.create_task(by_hand.call("hang"))
    link = by_hand.tools["hang"]._link
    await eventually(lambda: bool(getattr(link._other, "_awaited", None)), "it is asked")
    await sandbox.kill()
    with pytest.raises((SandboxLost, SandboxEndedByPolicy)):
        await call


async def test_closing_one_tool_ends_the_server_and_leaves_no_descriptor(sandbox: Sandbox) -> None:
    await sandbox.write("server.py", BY_HAND.encode())
    await (await opened(McpSource("hand", PYTHON), sandbox)).tools["echo"].close()

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before = descriptors()
    for _ in range(3):
        server = await opened(McpSource("hand", PYTHON), sandbox)
        await server.tools["hang"].close()
        await server.tools["echo"].close()
        assert (await server.call("echo")).is_error  # its rollout is over
    await eventually(lambda: descriptors() <= before, "all are closed")
    await none_runs(sandbox, "[s]erver.py")


# --- names and options ----------------------------------------------------------------------------------


def test_tool_names_are_valid_short_and_unique() -> None:
    names = _names("s", ["a.b", "a/b", "x" * 80, "x" * 80 + "y", "same", "same", "ok-1"])
    assert len(set(names)) == len(names)
    assert all(len(name) <= 64 and name.startswith("s__") for name in names)
    assert (names[0], names[-1]) == ("s__a_b", "s__ok-1")


@pytest.mark.parametrize(
    ("option", "why"),
    [
        (["x"], "an object of servers"),
        ({"a b": {"command": ["x"]}}, "as a name"),
        ({"a__b": {"command": ["x"]}}, "as a name"),
        ({"a": {}}, "either a command or a server"),
        ({"a": {"command": ["x"], "server": "s"}}, "either a command or a server"),
        ({"a": {"command": "x"}}, "a list of strings"),
        ({"a": {"command": []}}, "a list of strings"),
        ({"a": {"command": ["x\0"]}}, "a list of strings"),
        ({"a": {"command": ["x"], "env": {"A": 1}}}, "an object of strings"),
        ({"a": {"command": ["x"], "url": "http://h"}}, "url: unknown"),
        ({"a": {"server": "known", "inside": 1}}, "true or false"),
    ],
)
def test_an_invalid_option_is_refused_at_submit(option: Json, why: str) -> None:
    with pytest.raises(TaskInvalid, match=why):
        mcp_sources(option, {"known": OutsideServer("http://h")})


def test_only_the_operators_servers_can_be_used() -> None:
    servers = {"known": OutsideServer("http://h", {"authorization": "s3cret"})}
    (source,) = mcp_sources({"k": {"server": "known", "inside": True}}, servers)
    assert (source.server, source.needs_sandbox) == (servers["known"], True)
    assert "s3cret" not in repr(source)
    with pytest.raises(UnknownTool, match="the operator has named: known"):
        mcp_sources({"k": {"server": "http://evil"}}, servers)


def test_long_lines_are_skipped_whatever_the_chunks() -> None:
    data = b"ab\n" + b"x" * 11 + b"\n" + b"y" * 10 + b"\n" + b"z" * 50 + b"\nend\nrest"
    expected = [b"ab", None, b"y" * 10, None, b"end"]
    for size in (1, 3, 7, 1000):
        lines = LineSplitter(10)
        received = [line for start in range(0, len(data), size) for line in lines.feed(data[start : start + size])]
        assert received == expected
        assert len(lines._partial) <= 10


# --- outside --------------------------------------------------------------------------------------------


async def test_a_server_outside_is_called_with_the_operators_headers() -> None:
    async with served(outside().streamable_http_app()) as url:
        server = await opened(McpSource("out", server=OutsideServer(url, {"authorization": "Bearer s3"})))
        assert sorted(tool.spec.name for tool in server.tools.values()) == ["out__add", "out__header", "out__slow"]
        assert (await server.call("add", number=2)).content == "count is 2"
        assert "Bearer s3" in (await server.call("header")).content
        late = await server.call("slow", timeout_s=0.3)
        assert late.is_error
        assert (await server.call("add", number=2)).content == "count is 4"
        await server.tools["add"].close()


async def test_a_restart_of_a_server_outside_is_reported_and_it_is_reconnected() -> None:
    sock = loopback()
    port = sock.getsockname()[1]
    async with served(outside().streamable_http_app(), sock) as url:
        server = await opened(McpSource("out", server=OutsideServer(url)))
        assert (await server.call("add", number=2)).content == "count is 2"
    async with served(outside().streamable_http_app(), loopback(port)):
        forgotten = await server.call("add", number=1)
        assert forgotten.is_error, forgotten  # the server does not have the session
        again = await server.call("add", number=1)
        assert "count is 1" in again.content
        assert "state is lost" in again.content
    down = await server.call("add", number=1)
    assert down.is_error, down  # no server is running
    async with served(outside().streamable_http_app(), loopback(port)):
        again = await server.call("add", number=1)
        assert "count is 1" in again.content
        assert "state is lost" in again.content
        await server.tools["add"].close()


async def test_an_unreachable_server_outside_is_blamed_on_infra() -> None:
    with loopback() as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
        with pytest.raises(ToolUnreachable) as failed:
            await McpSource("out", server=OutsideServer(url), start_s=5.0).open(ToolContext(None))
    assert failed.value.blame is Blame.INFRA
    assert failed.value.retryable


# --- through the doorway --------------------------------------------------------------------------------


@pytest.fixture
async def door() -> AsyncGenerator[tuple[Doorway, str], None]:
    """Opens a doorway with a proxy to a real server."""
    sock = loopback()
    sock.listen(16)
    doorway = Doorway(sock, port=sock.getsockname()[1])
    async with served(outside().streamable_http_app()) as url:
        proxy = McpProxy({"out": OutsideServer(url, {"authorization": "Bearer s3"})})
        await doorway.serve(proxy)
        yield doorway, url
        doorway.close()
        await proxy.close()


async def test_a_client_inside_uses_a_server_through_the_doorway(door: tuple[Doorway, str]) -> None:
    url = f"{door[0].url}/mcp/out"
    inside = OutsideServer(url, {"authorization": "mine", "cookie": "a=b", "x-inside": "1"})
    server = await opened(McpSource("through", server=inside))
    assert (await server.call("add", number=2)).content == "count is 2"
    headers = (await server.call("header")).content
    assert headers == '{"authorization": "Bearer s3", "cookie": null, "x-inside": null}'
    await server.tools["add"].close()


async def test_the_proxy_serves_only_the_tasks_servers_and_bounds_requests(door: tuple[Doorway, str]) -> None:
    base = door[0].url
    async with aiohttp.ClientSession() as client:

        async def status(method: str, path: str, data: bytes = b"") -> int:
            async with client.request(method, base + path, data=data) as answer:
                return answer.status

        assert await status("POST", "/mcp/other") == 404
        assert await status("POST", "/mcp/out/../other") == 404
        assert await status("GET", "/") == 404
        assert await status("PUT", "/mcp/out") == 405
        for size, status_then in ((BODY_BYTES, 400), (BODY_BYTES + 1, 413)):  # 400 comes from the server: not JSON
            headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
            async with client.post(f"{base}/mcp/out", data=_chunks(b"x" * size), headers=headers) as answer:
                assert answer.status == status_then


async def _chunks(data: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), 1 << 16):
        yield data[start : start + (1 << 16)]


async def test_the_proxy_returns_502_for_an_unreachable_server_and_follows_no_redirect() -> None:
    asked: list[str] = []
    accepted: list[bytes] = []

    async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.append(scope["path"])
            accepted.extend(value for name, value in scope["headers"] if name == b"accept")
            headers = [(b"location", b"/secret"), (b"set-cookie", b"a=b")]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    sock = loopback()
    sock.listen(16)
    doorway = Doorway(sock, port=sock.getsockname()[1])
    with loopback() as unserved:
        async with served(elsewhere) as url, aiohttp.ClientSession() as client:
            away = OutsideServer(f"http://127.0.0.1:{unserved.getsockname()[1]}/mcp")
            proxy = McpProxy({"moved": OutsideServer(url, {"Accept": "operator/s"}), "away": away})
            await doorway.serve(proxy)
            async with client.post(f"{doorway.url}/mcp/moved") as answer:
                assert (answer.status, "location" in answer.headers, "set-cookie" in answer.headers) == (
                    502,
                    False,
                    False,
                )
            async with client.post(f"{doorway.url}/mcp/away") as answer:
                assert answer.status == 502
            async with client.post(f"{doorway.url}/mcp/moved", data=_chunks(b"x" * (BODY_BYTES + 1))) as answer:
                assert answer.status == 413
            assert (asked, accepted) == (["/mcp"], [b"operator/s"])
            doorway.close()
            await proxy.close()


async def test_the_proxy_streams_and_ends_the_request_of_a_client_that_disconnects() -> None:
    steps: asyncio.Queue[bytes] = asyncio.Queue()
    disconnected = asyncio.Event()

    async def events(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": await steps.get(), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    sock = loopback()
    sock.listen(16)
    doorway = Doorway(sock, port=sock.getsockname()[1])
    async with served(events) as url, aiohttp.ClientSession() as client:
        proxy = McpProxy({"s": OutsideServer(url)})
        await doorway.serve(proxy)
        async with client.get(f"{doorway.url}/mcp/s") as answer:
            steps.put_nowait(b"data: 1\n\n")
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            assert answer.content_type == "text/event-stream"
            answer.close()
        await disconnected.wait()
        doorway.close()
        await proxy.close()


def test_the_bounds_are_in_order() -> None:
    assert pipes.MESSAGE_BYTES < pipes.FLOOD_BYTES
    assert link.END_S < 15  # the native agent's tool_grace_s
