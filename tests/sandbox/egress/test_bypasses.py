"""Attempts to bypass the list, each made from a real sandbox against real servers. They may not connect to a server or
look up a name that is not on the list.

Each case has a script that uses `preamble.py`'s functions, the text that it must print, and the expected verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rollyard.sandbox.egress import ProxyBounds
from rollyard.sandbox.runtimes.launched import LaunchedRuntime
from tests.sandbox.egress.site import ALLOWED, QUICK, open_site

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("runtime", ["bubblewrap"], indirect=True),
]


@dataclass(frozen=True)
class Case:
    script: str
    verdict: str
    prints: str = ""


def case(name: str, script: str, verdict: str, prints: str = ""):
    return pytest.param(Case(script, verdict, prints), id=name)


PLAIN = [
    case("another host", "show(get(f'http://{FORBIDDEN}:{FP}/'))", "host", " 403 "),
    case("raw address", "show(get(f'http://127.0.0.1:{FP}/'))", "host", "listed literally"),
    case("raw address of an allowed server", "show(get(f'http://127.0.0.1:{AP}/'))", "host", " 403 "),
    case("IPv6 literal", "show(get(f'http://[::1]:{FP}/'))", "host", " 403 "),
    case("IPv4-mapped literal", "show(get(f'http://[::ffff:127.0.0.1]:{FP}/'))", "host", " 403 "),
    case("IPv6 literal with a zone", "show(get(f'http://[fe80::1%25lo]:{FP}/'))", "request", " 400 "),
    case("decimal address", "show(get(f'http://2130706433:{FP}/'))", "request", " 400 "),
    case("octal address", "show(get(f'http://0177.0.0.1:{FP}/'))", "request", " 400 "),
    case("hexadecimal address", "show(get(f'http://0x7f.0.0.1:{FP}/'))", "request", " 400 "),
    case("short address", "show(get(f'http://127.1:{FP}/'))", "request", " 400 "),
    case("metadata address", "show(get('http://169.254.169.254/latest/meta-data/'))", "host", " 403 "),
    case("final dot", "show(get(f'http://{FORBIDDEN}.:{FP}/'))", "host", " 403 "),
    case("two final dots", "show(get(f'http://{ALLOWED}..:{FP}/'))", "request", " 400 "),
    case("upper case", "show(get(f'http://FORBIDDEN.TEST:{FP}/'))", "host", " 403 "),
    case("a name that ends alike", "show(get(f'http://evilsub.test:{AP}/'))", "host", " 403 "),
    case("the apex of a wildcard", "show(get(f'http://sub.test:{AP}/'))", "host", " 403 "),
    case("a name that begins alike", "show(get(f'http://{ALLOWED}.evil.test:{AP}/'))", "host", " 403 "),
    case("punycode look-alike", "show(get(f'http://xn--llowed-8nf.test:{AP}/'))", "host", " 403 "),
    case("raw Unicode look-alike", "show(get(f'http://\\xe0llowed.test:{AP}/'))", "request", " 400 "),
    case("percent-encoded host", "show(get(f'http://forbidden%2etest:{FP}/'))", "request", " 400 "),
    case("user name before the host", "show(get(f'http://{ALLOWED}@{FORBIDDEN}:{FP}/'))", "request", " 400 "),
    case("user name with a port", "show(get(f'http://{ALLOWED}:{AP}@{FORBIDDEN}:{FP}/'))", "request", " 400 "),
    case("backslash after the host", "show(get(f'http://{ALLOWED}:{AP}\\\\@{FORBIDDEN}:{FP}/'))", "request", " 400 "),
    case("fragment before the host", "show(get(f'http://{ALLOWED}:{AP}#@{FORBIDDEN}:{FP}/'))", "request", " 400 "),
    case("Host of another", "show(get(f'http://{ALLOWED}:{AP}/', host=f'{FORBIDDEN}:{FP}'))", "request", "Host header"),
    case("Host of an allowed one", "show(get(f'http://{FORBIDDEN}:{FP}/', host=f'{ALLOWED}:{AP}'))", "host", " 403 "),
    case("two Hosts", "show(get(f'http://{ALLOWED}:{AP}/', f'Host: {FORBIDDEN}:{FP}'))", "request", " 400 "),
    case("no Host in HTTP/1.0", "show(get(f'http://{ALLOWED}:{AP}/', version='1.0', host=''))", "request", " 400 "),
    case("relative target", "show(get('/', host=f'{FORBIDDEN}:{FP}'))", "request", " 400 "),
    case("asterisk target", "show(get('*', method='OPTIONS', host=f'{ALLOWED}:{AP}'))", "request", " 400 "),
    case("another port", "show(get(f'http://{ALLOWED}:{FP}/'))", "host", " 403 "),
    case("port with a leading zero", "show(get(f'http://{ALLOWED}:0{AP}/'))", "request", " 400 "),
    case("port beyond 65535", "show(get(f'http://{ALLOWED}:{65536 + FP}/'))", "request", " 400 "),
    case("negative port", "show(get(f'http://{ALLOWED}:-{FP}/'))", "request", " 400 "),
    case("two ports", "show(get(f'http://{ALLOWED}:{AP}:{FP}/'))", "request", " 400 "),
    case("FTP", "show(get(f'ftp://{ALLOWED}:{AP}/'))", "request", " 400 "),
    case("HTTPS without a tunnel", "show(get(f'https://{ALLOWED}:{AT}/'))", "request", " 400 "),
    case("file", "show(get('file:///etc/passwd', host='x'))", "request", " 400 "),
    case("a method that is not allowed", "show(get(f'http://{ALLOWED}:{AP}/', method='DELETE'))", "method", " 405 "),
    case("TRACE", "show(get(f'http://{ALLOWED}:{AP}/', method='TRACE'))", "method", " 405 "),
    case(
        "websocket",
        "show(get(f'http://{ALLOWED}:{AP}/echo', 'Connection: Upgrade', 'Upgrade: websocket'))",
        "upgrade",
        " 403 ",
    ),
    case(
        "h2c upgrade",
        "show(get(f'http://{ALLOWED}:{AP}/', 'Connection: Upgrade, HTTP2-Settings', 'Upgrade: h2c'))",
        "upgrade",
        " 403 ",
    ),
    case("HTTP/2 preface", "show(send(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n'))", "request"),
    case("HTTP/0.9", "show(send(f'GET http://{FORBIDDEN}:{FP}/\\r\\n\\r\\n'))", "request"),
    case("SOCKS5", "show(send(b'\\x05\\x01\\x00'))", "request"),
    case("TLS to the proxy itself", "show(send(hello(FORBIDDEN.encode())))", "request"),
    case(
        "CR LF in the target",
        "show(send(f'GET http://{ALLOWED}:{AP}/\\rHost:{FORBIDDEN} HTTP/1.1\\r\\nHost: {ALLOWED}:{AP}\\r\\n\\r\\n'))",
        "request",
        " 400 ",
    ),
    case(
        "bare CR in a header",
        "show(get(f'http://{ALLOWED}:{AP}/', f'X: a\\rHost: {FORBIDDEN}'))",
        "request",
        " 400 ",
    ),
    case(
        "blank before a header's colon",
        "show(get(f'http://{ALLOWED}:{AP}/', 'Content-Length : 5'))",
        "request",
        " 400 ",
    ),
    case(
        "length and chunked",
        "show(get(f'http://{ALLOWED}:{AP}/', 'Content-Length: 5', 'Transfer-Encoding: chunked', method='POST',"
        " body=b'0\\r\\n\\r\\nGET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'))",
        "request",
        " 400 ",
    ),
    case(
        "two lengths",
        "show(get(f'http://{ALLOWED}:{AP}/', 'Content-Length: 5', 'Content-Length: 6', method='POST', body=b'x' * 6))",
        "request",
        " 400 ",
    ),
    case(
        "an obscured transfer coding",
        "show(get(f'http://{ALLOWED}:{AP}/', 'Transfer-Encoding: xchunked', method='POST', body=b'0\\r\\n\\r\\n'))",
        "request",
    ),
    case("many headers", "show(get(f'http://{ALLOWED}:{AP}/', *['A: b'] * 3000))", "request", " 431 "),
    case("a long header", "show(get(f'http://{ALLOWED}:{AP}/', 'A: ' + 'b' * 200_000))", "request", " 431 "),
    case("a head that never ends", "show(send(b'GET http://', wait=30))", "request", " 408 "),
    case(
        "a DNS tunnel by long names",
        "[get('http://' + '.'.join(['x' * 60] * 3) + f'.{i}.forbidden.test/') for i in range(20)]",
        "host",
    ),
    case("names beyond any bound", "show(get('http://' + 'a.' * 200 + 'sub.test/'))", "request", " 400 "),
]

TUNNELS = [
    case("tunnel to another host", "show(tls(f'{FORBIDDEN}:{FT}', FORBIDDEN))", "host", " 403 "),
    case("tunnel to a raw address", "show(tls(f'127.0.0.1:{FT}', FORBIDDEN))", "host", " 403 "),
    case("tunnel to another port", "show(tls(f'{ALLOWED}:{FT}', ALLOWED))", "host", " 403 "),
    case("tunnel to SSH's port", "show(tls(f'{ALLOWED}:22', ALLOWED))", "host", " 403 "),
    case("another SNI", "show(tls(f'{ALLOWED}:{AT}', FORBIDDEN))", "sni"),
    case("no SNI", "show(tls(f'{ALLOWED}:{AT}', None))", "sni"),
    case("an SNI below the host", "show(tls(f'{ALLOWED}:{AT}', 'x.' + ALLOWED))", "sni"),
    case("an address as SNI", "show(tunnel(f'{ALLOWED}:{AT}', hello(b'127.0.0.1')))", "sni"),
    case("SNI with a NUL", "show(tunnel(f'{ALLOWED}:{AT}', hello(ALLOWED.encode() + b'\\0.evil.test')))", "sni"),
    case("two names in SNI", "show(tunnel(f'{ALLOWED}:{AT}', hello(ALLOWED.encode(), b'forbidden.test')))", "tls"),
    case(
        "two SNI extensions",
        "one = b'forbidden.test'\n"
        "second = struct.pack('!HHHBH', 0, len(one) + 5, len(one) + 3, 0, len(one)) + one\n"
        "show(tunnel(f'{ALLOWED}:{AT}', hello(ALLOWED.encode(), extensions=second)))",
        "tls",
    ),
    case(
        "ECH with another outer name",
        "ech = struct.pack('!HH', 0xFE0D, 4) + b'abcd'\n"
        "show(tunnel(f'{ALLOWED}:{AT}', hello(b'public.ech.test', extensions=ech)))",
        "sni",
    ),
    case("a hello in many records", "show(tunnel(f'{ALLOWED}:{AT}', hello(ALLOWED.encode(), records=100)))", "tls"),
    case("not TLS: HTTP", "show(tunnel(f'{ALLOWED}:{AT}', b'GET / HTTP/1.1\\r\\n\\r\\n'))", "tls"),
    case("not TLS: SSH", "show(tunnel(f'{ALLOWED}:{AT}', b'SSH-2.0-x\\r\\n'))", "tls"),
    case("not TLS: SSLv2", "show(tunnel(f'{ALLOWED}:{AT}', b'\\x80\\x2e\\x01\\x03\\x01' + bytes(41)))", "tls"),
    case(
        "an alert first", "show(tunnel(f'{ALLOWED}:{AT}', b'\\x15\\x03\\x01\\x00\\x02\\x01\\x00' + hello(b'a')))", "tls"
    ),
    case(
        "more behind the hello in its record",
        "h = hello(ALLOWED.encode()); h = h[:3] + struct.pack('!H', len(h) - 5 + 4) + h[5:] + b'\\x00' * 4\n"
        "show(tunnel(f'{ALLOWED}:{AT}', h))",
        "tls",
    ),
    case("tunnel without a hello", "show(tunnel(f'{ALLOWED}:{AT}', b''))", "tls"),
    case(
        "a hello byte by byte",
        "sock, _ = connect(f'{ALLOWED}:{AT}', 30)\n"
        "try:\n  for byte in hello(ALLOWED.encode()): sock.sendall(bytes([byte])); time.sleep(0.1)\n"
        "except OSError: pass\n"
        "show(read_all(sock))",
        "tls",
    ),
    case("CONNECT to the proxy", "show(tls('127.0.0.1:8130', ALLOWED))", "host", " 403 "),
    case("CONNECT to the proxy by name", "show(tls('localhost:8130', 'localhost'))", "host", " 403 "),
    case("CONNECT to the doorway", "show(tls('127.0.0.1:8129', ALLOWED))", "host", " 403 "),
    case("CONNECT by IPv6", "show(tls(f'[::1]:{FT}', ALLOWED))", "host", " 403 "),
    case("CONNECT without a port", "show(tls(ALLOWED, ALLOWED))", "request", " 400 "),
    case("CONNECT with a user name", "show(tls(f'{ALLOWED}@{FORBIDDEN}:{FT}', FORBIDDEN))", "request", " 400 "),
    case("CONNECT with a URL", "show(tls(f'https://{FORBIDDEN}:{FT}', FORBIDDEN))", "request", " 400 "),
    case(
        "CONNECT through a tunnel",
        "show(tunnel(f'{ALLOWED}:{AT}', f'CONNECT {FORBIDDEN}:{FT} HTTP/1.1\\r\\n\\r\\n'.encode()))",
        "tls",
    ),
]


@pytest.mark.parametrize("attack", [*PLAIN, *TUNNELS])
async def test_the_attack_reaches_no_server(attack: Case, runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        output = await site.python(attack.script)
        assert attack.prints in output, output
        assert set(site.verdicts) == {attack.verdict}, (site.verdicts, output)
        assert "welcome" not in output
        site.check_unreached()
        assert site.allowed.connections == site.allowed_tls.connections == 0, "no connection is made before the check"


# --- attacks that start with an allowed request --------------------------------------------------------


async def test_a_redirect_is_checked_as_a_request(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        target = f"http://forbidden.test:{site.forbidden.port}/"
        result = await site.run(
            f"curl -sSL -o /dev/null -w '%{{http_code}}' http://{ALLOWED}:{site.allowed.port}/redirect/{target}"
        )
        assert result.stdout == b"403" and site.verdicts == {"allowed": 1, "host": 1}
        site.check_unreached()


async def test_a_connection_carries_one_request(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        script = """
one = f"GET http://{ALLOWED}:{AP}/ HTTP/1.1\\r\\nHost: {ALLOWED}:{AP}\\r\\nConnection: keep-alive\\r\\n\\r\\n"
two = f"GET http://{FORBIDDEN}:{FP}/ HTTP/1.1\\r\\nHost: {FORBIDDEN}:{FP}\\r\\n\\r\\n"
show(send(one + two))
"""
        output = await site.python(script)
        assert output.count("HTTP/1.1 ") == 1 and "Connection: close" in output
        assert len(site.allowed.requests) == 1
        site.check_unreached()


async def test_a_server_receives_one_request_whatever_the_framing(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        script = """
inner = b"GET /smuggled HTTP/1.1\\r\\nHost: inner.test\\r\\n\\r\\n"
show(get(f"http://{ALLOWED}:{AP}/", "Content-Length: 3", method="POST", body=b"abc" + inner))
chunk = b"3;x=y\\r\\nabc\\r\\n0\\r\\nHost: inner.test\\r\\n\\r\\n"
show(get(f"http://{ALLOWED}:{AP}/", "Transfer-Encoding: chunked", method="POST", body=chunk + inner))
show(get(f"http://{ALLOWED}:{AP}/", "Transfer-Encoding: chunked", method="POST", body=b"-1\\r\\nabc\\r\\n"))
"""
        output = await site.python(script)
        assert "got abc" in output and "got 3\r\nabc\r\n0" in output.replace("\n", "\r\n").replace("\r\r", "\r")
        assert not any(b"inner.test" in request for request in site.allowed.requests)
        assert all(request.count(b"HTTP/1.1") == 1 for request in site.allowed.requests)


async def test_headers_that_name_another_host_are_dropped(runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        script = """
show(get(f"http://{ALLOWED}:{AP}/", "X-Forwarded-Host: inner.test", "Forwarded: host=inner.test", "X-Host: inner.test",
    "X-Original-URL: http://inner.test/", "X-Rewrite-URL: /inner.test", "Via: 1.1 inner.test", "Connection: X-Inner",
    "X-Inner: inner.test", "Proxy-Authorization: Basic inner.test", "Proxy-Connection: inner.test", "X-Kept: yes"))
"""
        assert "welcome" in await site.python(script)
        (request,) = site.allowed.requests
        assert b"inner.test" not in request and b"x-kept: yes" in request.lower()


# --- names with forbidden addresses -------------------------------------------------------------------

PRIVATE = ["10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]


@pytest.mark.parametrize(
    "address", [*PRIVATE, "0.0.0.0", "224.0.0.1", "168.63.129.16", "fe80::1", "fd00::1", "2002:a00:1::"]
)
async def test_an_allowed_name_with_a_private_address_is_refused(address: str, runtime: LaunchedRuntime):
    """Also if it is one of several public ones: all of them must be allowed."""
    async with open_site(runtime) as site:
        site.names.answers["lying.sub.test"] = [[address]]
        site.names.answers["half.sub.test"] = [["1.1.1.1", address]]
        output = await site.python(
            "show(get(f'http://lying.sub.test:{AP}/')); show(get(f'http://half.sub.test:{AP}/'));"
            "show(tls(f'half.sub.test:{AT}', 'half.sub.test'))"
        )
        assert output.count(" 403 ") == 3 and site.verdicts == {"address": 3}
        assert site.allowed.connections == site.allowed_tls.connections == 0


@pytest.mark.parametrize("address", ["169.254.169.254", "168.63.129.16", "0.0.0.0", "224.0.0.1", "::ffff:127.0.0.1"])
async def test_some_addresses_are_refused_even_for_private_hosts(address: str, runtime: LaunchedRuntime):
    async with open_site(runtime) as site:
        site.names.answers[ALLOWED] = [[address]]
        assert " 403 " in await site.python("show(get(f'http://{ALLOWED}:{AP}/'))")
        assert site.verdicts == {"address": 1}


async def test_a_name_is_looked_up_once_for_a_connection(runtime: LaunchedRuntime):
    """The answer changes at each lookup. The proxy connects to the address that it checked."""
    async with open_site(runtime) as site:
        site.names.answers[ALLOWED] = [["127.0.0.1"], ["127.0.0.9"]]
        assert "welcome" in await site.python("show(tls(f'{ALLOWED}:{AT}', ALLOWED))")
        assert site.names.asked == [ALLOWED] and site.allowed_tls.connections == 1


async def test_the_number_of_names_below_a_wildcard_is_bounded(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=QUICK) as site:
        output = await site.python("for i in range(20): show(get(f'http://data{i}.sub.test:{AP}/'))")
        assert len(site.names.asked) == QUICK.names and " 429 " in output
        assert site.verdicts == {"dns": QUICK.names, "names": 20 - QUICK.names}


async def test_concurrent_lookups_are_bounded(runtime: LaunchedRuntime):
    async with open_site(runtime, bounds=ProxyBounds(connect_s=1.0)) as site:
        site.names.silent |= {f"slow{number}.sub.test" for number in range(8)}
        script = """
import threading
threads = [threading.Thread(target=get, args=(f"http://slow{i}.sub.test:{AP}/",)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
        await site.python(script)
        assert site.names.most == 2 and site.verdicts == {"dns": 8}
