"""Real clients in real sandboxes reach the hosts on the list."""

from __future__ import annotations

from typing import Any

import pytest

from rollyard.core.egress import HostRule
from rollyard.core.failure import SandboxStartFailed
from rollyard.sandbox import SandboxSpec
from rollyard.sandbox.egress import Egress, ProxyBounds
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from tests.sandbox.egress.site import ALLOWED, BIG_BYTES, Names, open_site

BY_BUBBLEWRAP = pytest.mark.parametrize("runtime", ["bubblewrap"], indirect=True)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@BY_BUBBLEWRAP
async def test_curl_gets_plain_http_and_https(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        plain = await site.run(f"curl -sS http://{ALLOWED}:{site.allowed.port}/x?y=z")
        assert plain.stdout == b"welcome\n", plain.stderr
        secret = await site.run(f"curl -sS https://{ALLOWED}:{site.allowed_tls.port}/x")
        assert secret.stdout == b"welcome\n", secret.stderr
        below = await site.run(f"curl -sS http://A.SUB.test:{site.allowed.port}/")
        assert below.stdout == b"welcome\n", below.stderr
        (first, _) = site.allowed.requests
        assert first.startswith(b"GET /x?y=z HTTP/1.1\r\nHost: allowed.test:%d\r\n" % site.allowed.port)
        assert b"proxy" not in first.lower() and site.allowed_tls.names == [ALLOWED]
        summary: Any = site.ledger.summary()
        assert site.verdicts == {"allowed": 3} and summary["unnamed"] == 0
        assert {entry["verdict"] for entry in summary["hosts"]} == {"allowed"}
        assert all(entry["sent_bytes"] > 0 and entry["received_bytes"] > 0 for entry in summary["hosts"])


@BY_BUBBLEWRAP
async def test_python_follows_a_redirect_to_an_allowed_host(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        target = f"http://a.sub.test:{site.allowed.port}/"
        script = f"import urllib.request as u; show(u.urlopen('http://{ALLOWED}:{site.allowed.port}/redirect/{target}').read())"
        assert "welcome" in await site.python(script)


@BY_BUBBLEWRAP
async def test_bodies_are_complete_in_both_directions(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        at = f"http://{ALLOWED}:{site.allowed.port}"
        big = await site.run(f"curl -sS {at}/big | wc -c")
        assert int(big.stdout) == BIG_BYTES
        chunks = await site.run(f"curl -sS {at}/chunks | wc -c")
        assert int(chunks.stdout) == 5000
        posted = await site.run(f"curl -sS -d hello -H 'Expect: 100-continue' {at}/post")
        assert posted.stdout == b"got hello", posted.stderr
        chunked = await site.run(f"echo hello | curl -sS -T - -X POST {at}/post")
        assert chunked.stdout.startswith(b"got 6\r\nhello\n"), chunked.stderr
        head = await site.run(f"curl -sS -I {at}/")
        assert b"200" in head.stdout and head.status == 0, head.stderr


@BY_BUBBLEWRAP
async def test_the_doorway_is_reached_without_the_proxy(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        assert site.sandbox.doorway is not None

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"door"})

        await site.sandbox.doorway.serve(app)
        result = await site.run(f"curl -sS {site.sandbox.doorway.url}/")
        assert result.stdout == b"door" and site.verdicts == {}


@pytest.mark.parametrize("runtime", ["bubblewrap-folder", "apptainer", "apptainer-folder", "oci"], indirect=True)
async def test_every_isolated_runtime_supports_egress(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        output = await site.python(
            "show(get(f'http://{ALLOWED}:{AP}/')); show(get(f'http://{FORBIDDEN}:{FP}/'));"
            "show(tls(f'{ALLOWED}:{AT}', ALLOWED))"
        )
        assert output.count("welcome") == 2 and " 403 " in output
        assert site.verdicts == {"allowed": 2, "host": 1}
        site.check_unreached()


@BY_BUBBLEWRAP
async def test_a_sandbox_without_egress_has_no_listener(runtime: LaunchedRuntime):
    sandbox = await runtime.start(SandboxSpec(), lease_s=60)
    result = await sandbox.exec("env; curl -sS http://127.0.0.1:8130/", timeout_s=30)
    assert b"proxy" not in result.stdout.lower() and result.status == 7  # could not connect
    await sandbox.kill()


@pytest.mark.parametrize("runtime", ["local"], indirect=True)
async def test_the_local_runtime_refuses_egress(runtime: LaunchedRuntime):
    egress = Egress(rules=(HostRule(ALLOWED),), resolve=Names(), bounds=ProxyBounds())
    with pytest.raises(SandboxStartFailed, match="cannot restrict a command to a list of hosts"):
        await runtime.start(SandboxSpec(egress=egress), lease_s=60)
