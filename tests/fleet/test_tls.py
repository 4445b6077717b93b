"""The fleet's transport: TLS beyond loopback, a certificate pinned by the URL, and no secret in the clear."""

import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from rollyard.client import AsyncClient
from rollyard.core.address import is_clear, split_pin, with_pin
from rollyard.core.failure import InvalidRequest
from rollyard.engines.base import EngineSpec, Kind
from rollyard.fleet.head_connection import HeadConnection, HeadUnreachable, NodeRefused
from rollyard.fleet.messages import NodeStatus, Poll
from rollyard.service.engine_address import check_reachable
from rollyard.service.security.tls import digest_of, open_tls
from rollyard.service.server import serve
from rollyard.service.settings import SettingsError
from tests.fleet.fleet_site import ProcessNode, node_token
from tests.service.site import Site, engine_table, scripted, settings, task

POLL = Poll("session", NodeStatus())
MCP = {"search": {"url": "https://mcp.example", "headers": {"Authorization": "Bearer secret"}}}


def make_certificate(folder: Path, names: str = "DNS:localhost,IP:127.0.0.1") -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName={names}"]
    out = ["-keyout", str(files["tls_key"]), "-out", str(files["tls_cert"])]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *out]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


async def test_a_fleet_with_its_own_certificate_runs_rollouts_on_a_node_with_the_digest(
    tmp_path: Path,
) -> None:
    async with scripted() as engine:
        chosen = settings(tmp_path, fleet="nodes", tls="own", engines=[engine_table(engine)])
        async with serve(chosen) as served:
            url, pin = split_pin(served.url)
            cert = tmp_path / "data" / "tls" / "cert.pem"
            assert url.startswith("https://") and pin == digest_of(cert)
            assert (cert.parent / "key.pem").stat().st_mode & 0o077 == 0
            node = ProcessNode(served.url, chosen.node_token_path, tmp_path, "n1")
            try:
                async with AsyncClient(served.url, chosen.token_path.read_text().strip()) as client:
                    await client.submit([task()], ids=["r1"])
                    record = await client.wait("r1", timeout_s=90)
                    assert record.reward == 1.0 and record.summary is not None and record.summary["node"] == "n1"
            finally:
                node.close()
        async with serve(chosen) as again:
            assert split_pin(again.url)[1] == pin, "the certificate is created once"


async def test_a_node_does_not_call_a_server_with_another_certificate_or_none(tmp_path: Path) -> None:
    chosen = settings(tmp_path, fleet="nodes", tls="own")
    async with serve(chosen) as served, aiohttp.ClientSession() as http:
        plain, pin = split_pin(served.url)
        assert pin is not None
        token = node_token(Site(served.url, "", http, served))
        for url in (plain, with_pin(plain, bytes(32)), plain.replace("https:", "http:")):
            async with HeadConnection(lambda url=url: (url, token)) as link:
                with pytest.raises(HeadUnreachable):
                    await link.settings()
        async with HeadConnection(lambda: (served.url, token)) as link:
            assert "mcp_servers" in await link.settings()


async def test_a_given_certificate_is_verified_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificate(tmp_path / "pki")
    chosen = settings(tmp_path, fleet="nodes", **files)
    async with serve(chosen) as served:
        assert "#" not in served.url and served.url.startswith("https://")
        token = chosen.node_token_path.read_text().strip()
        async with HeadConnection(lambda: (served.url, token)) as link:
            with pytest.raises(HeadUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                await link.settings()
        pinned = with_pin(served.url, digest_of(files["tls_cert"]))
        async with HeadConnection(lambda: (pinned, token)) as link:
            assert "runtimes" in await link.settings()


async def test_commands_on_the_services_machine_find_it_though_its_certificate_names_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificate(tmp_path / "pki", "DNS:rollyard")
    chosen = settings(tmp_path, **files)
    async with serve(chosen) as served:
        assert "#" not in served.url, "other machines verify the certificate as usual"
        monkeypatch.setenv("ROLLYARD_DATA_DIR", str(chosen.data_dir))
        for name in ("ROLLYARD_URL", "ROLLYARD_TOKEN", "ROLLYARD_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        async with AsyncClient() as client:
            assert (await client.status())["states"] is not None


async def test_a_node_sends_no_token_in_the_clear_unless_allowed() -> None:
    async with HeadConnection(lambda: ("http://10.255.255.1:9", "token")) as link:
        with pytest.raises(NodeRefused, match="in the clear"):
            await link.poll(POLL, 1.0)
        with pytest.raises(NodeRefused, match="in the clear"):
            await link.settings()
    async with HeadConnection(lambda: ("https://head#sha256:short", "token")) as link:
        with pytest.raises(NodeRefused, match="64 hexadecimal digits"):
            await link.poll(POLL, 1.0)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"host": "10.0.0.1"}, "needs TLS"),
        ({"host": "10.0.0.1", "plain_http_nodes": True, "mcp_servers": MCP}, "in the clear"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"host": "10.0.0.1", "plain_http_nodes": True}, ""),
        ({"host": "10.0.0.1", "tls": "own", "mcp_servers": MCP}, ""),
        ({"host": "127.0.0.1", "mcp_servers": MCP}, ""),
    ],
)
def test_a_fleet_beyond_loopback_needs_tls_unless_plain_http_is_allowed(
    tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    if not why:
        settings(tmp_path, fleet="nodes", **values)
        return
    with pytest.raises(ValidationError, match=why):
        settings(tmp_path, fleet="nodes", **values)


def test_an_engines_key_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    spec = EngineSpec("e1", "http://gpu1:8000", Kind.VLLM, api_key="secret")
    with pytest.raises(InvalidRequest, match="its key would be sent to the nodes in the clear"):
        check_reachable(spec, settings(tmp_path, fleet="nodes", host="10.0.0.1", plain_http_nodes=True))
    check_reachable(spec, settings(tmp_path, fleet="nodes", host="10.0.0.1", tls="own"))


def test_text_around_a_certificate_in_any_encoding_is_ignored(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    pem, digest = files["tls_cert"].read_bytes(), digest_of(files["tls_cert"])
    files["tls_cert"].write_bytes("Bag Attributes\n    friendlyName: Müller\n".encode("latin-1") + pem)
    opened = open_tls(settings(tmp_path, **files))
    assert opened is not None and opened.digest == digest
    files["tls_cert"].write_bytes(pem.replace(b" CERTIFICATE", b" X509 CERTIFICATE"))  # OpenSSL reads it, too
    with pytest.raises(SettingsError, match=r"cert\.pem has no certificate that begins with"):
        open_tls(settings(tmp_path, **files))


def test_files_that_are_not_certificates_are_refused_by_name(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    files["tls_key"].write_text("nonsense")
    with pytest.raises(SettingsError, match=r"cert\.pem.*cannot be used"):
        open_tls(settings(tmp_path, **files))


@pytest.mark.parametrize(
    ("url", "is_in_clear"),
    [("http://10.0.0.1", True), ("https://10.0.0.1", False), ("http://localhost:1", False), ("http://[::1]:1", False)],
)
def test_plain_http_is_allowed_on_one_machine(url: str, is_in_clear: bool) -> None:
    assert is_clear(url) is is_in_clear
