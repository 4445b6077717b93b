"""`rollyard node` and `rollyard nodes` with a real node process: listed, drained, resumed, ended by a signal."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.fleet.fleet_site import ProcessNode, open_head, until

pytestmark = pytest.mark.slow


async def test_a_node_is_listed_drained_resumed_and_leaves(cli: Cli, tmp_path: Path) -> None:
    async with open_head(tmp_path) as site:
        where = ("--url", site.url, "--token", site.token)
        assert (await cli("nodes", "list", *where)).err.startswith("no node has joined yet")
        node = ProcessNode(site.url, site.served.app_state.settings.node_token_path, tmp_path, "n1", run_slots=3)
        try:
            await until(site, "n1")
            (node_status,) = (await cli("nodes", "list", "--json", *where)).json
            assert (
                node_status["state"] == "up" and node_status["pools"]["run"]["size"] == 3 and node_status["live"] == 0
            )
            assert "n1" in (await cli("nodes", "list", *where)).out
            (drained,) = (await cli("nodes", "drain", "n1", "--json", "--timeout-s", "20", *where)).json
            assert drained["state"] == "drained" and drained["wants"] == 0
            assert "drained" in (await cli("nodes", "drain", "--all", *where)).out
            assert (await cli("nodes", "drain", *where)).status == 2
            assert "no node 'n9'" in (await cli("nodes", "resume", "n9", *where)).err
            assert (await cli("nodes", "resume", "n1", *where)).status == 0
            assert "n1" in (await cli("top", "--once", *where)).out
            node.signal(signal.SIGTERM)
            await until(site)
            assert await asyncio.to_thread(node.process.wait, 30) == 0
            assert b"node n1 has joined" in (tmp_path / "n1.log").read_bytes()
        finally:
            node.close()


async def test_a_node_reports_why_it_cannot_join(cli: Cli, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-is-not-known\n")
    async with open_head(tmp_path) as site:
        node = ProcessNode(site.url, token, tmp_path, "n1")
        try:
            assert await asyncio.to_thread(node.process.wait, 30) == 1
            log = (tmp_path / "n1.log").read_text()
            assert "refused this node" in log and "401" in log and "Traceback" not in log
        finally:
            node.close()
    assert (await cli("node", "--token-file", str(token))).status == 2
    assert "cannot be read" in (await cli("node", "--head", site.url, "--token-file", str(tmp_path / "no"))).err
