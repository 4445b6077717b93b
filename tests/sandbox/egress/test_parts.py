"""The checks of addresses, ClientHellos and mirrors, with hypothesis for hostile bytes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.sandbox.egress.addresses import why_not
from rollyard.sandbox.egress.hello import MOST_BYTES, NotTls, complete_hello, server_name
from rollyard.sandbox.egress.mirrors import apt_source, egress_env, mirror_rule, write_apt_files

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "2a00:1450:4001:800::200e"]
METADATA = ["169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254"]
NOWHERE = [
    "169.254.0.1",
    "fe80::1",
    "fe80::1%lo",
    "0.0.0.0",
    "0.1.2.3",
    "::",
    "224.0.0.1",
    "255.255.255.255",
    "ff02::1",
]
WRAPPED = ["::ffff:1.1.1.1", "::1.1.1.1", "64:ff9b::101:101", "64:ff9b:1::1", "2002:101:101::", "2001:0:1::1"]
NEVER = [*METADATA, *NOWHERE, *WRAPPED, "not an address"]
ONLY_IF_NAMED = ["10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "100.64.0.1", "::1", "fd00::1"]
SPECIAL = ["198.18.0.1", "192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "fec0::1", "240.0.0.1"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str):
    assert why_not(address, may_be_private=False) == ""


@pytest.mark.parametrize("address", [*NEVER, *ONLY_IF_NAMED, *SPECIAL])
def test_other_addresses_are_refused(address: str):
    assert why_not(address, may_be_private=False)


@pytest.mark.parametrize("address", ONLY_IF_NAMED)
def test_private_addresses_are_allowed_for_hosts_that_the_operator_lists(address: str):
    assert why_not(address, may_be_private=True) == ""


@pytest.mark.parametrize("address", NEVER)
def test_some_addresses_are_always_refused(address: str):
    assert why_not(address, may_be_private=True)


def real_hello(name: str | None) -> bytes:
    """Returns a ClientHello as OpenSSL sends it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def test_the_name_in_a_real_hello_is_found():
    data = real_hello("allowed.test")
    for size in range(len(data)):
        assert complete_hello(data[:size]) is None
    hello = complete_hello(data)
    assert hello is not None and server_name(hello) == "allowed.test"
    assert server_name(complete_hello(real_hello(None)) or b"") is None


def test_data_after_the_hello_is_not_parsed():
    assert complete_hello(real_hello("a.test") + b"\x17\x03\x03 early data")


@given(st.binary(max_size=600), st.integers(0, 520), st.integers(0, 255))
def test_arbitrary_bytes_do_not_crash_the_parser(noise: bytes, at: int, byte: int):
    data = bytearray(REAL)
    data[at % len(data)] = byte
    for text in (noise, bytes(data), REAL[: at % len(REAL)] + noise, b"\x16\x03\x01" + noise):
        try:
            hello = complete_hello(text)
            if hello is not None:
                server_name(hello)
        except NotTls:
            pass


REAL = real_hello("allowed.test")


def test_a_hello_is_bounded():
    record = b"\x16\x03\x01" + (16000).to_bytes(2, "big")
    with pytest.raises(NotTls, match="larger than"):
        complete_hello(record + b"\x01" + (MOST_BYTES * 2).to_bytes(3, "big") + bytes(15996))
    with pytest.raises(NotTls, match="too many records"):
        complete_hello(b"".join(b"\x16\x03\x01\x00\x01" + bytes([byte]) for byte in (1, 0, 1, *[0] * 20)))


@pytest.mark.parametrize("url", ["ftp://a.b/", "http://user:secret@a.b/", "a.b", "http://", "http://a.b:99999/"])
def test_invalid_mirror_urls_are_refused(url: str):
    with pytest.raises(ValueError):
        mirror_rule(url)


def test_apt_gets_a_source_only_for_known_releases(tmp_path: Path):
    release = 'PRETTY_NAME="x"\nID=debian\nVERSION_CODENAME=bookworm\n'
    assert apt_source("http://m/debian", release) == "deb http://m/debian bookworm main\n"
    assert (
        apt_source("http://m/ubuntu", 'ID="ubuntu"\nVERSION_CODENAME="noble"')
        == "deb http://m/ubuntu noble main universe\n"
    )
    for other in (
        "",
        "ID=alpine",
        "ID=debian",
        "ID=debian\nVERSION_CODENAME=x; rm -rf /",
        "ID=debian\nVERSION_CODENAME=a\tb",
    ):
        assert apt_source("http://m/debian", other) == ""
    write_apt_files(tmp_path, "/c", {}, release)
    assert "sourcelist" not in (tmp_path / "apt.conf").read_text()
    assert egress_env({}, "/c")["APT_CONFIG"] == "/c/apt.conf"
