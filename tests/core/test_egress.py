"""Hosts and rules: the canonical form of a name, and which rule covers which."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core.egress import EgressCeiling, EgressOptions, HostRule, host_of
from rollyard.core.failure import EgressNotAllowed

NUMBER = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")  # as its last label, which resolvers read as an address
LABELS = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=5).filter(lambda text: not text.isdigit())
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join).filter(lambda name: not NUMBER.fullmatch(name))
RULES = st.one_of(NAMES, NAMES.map("*.{}".format), st.just("*"))


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("_dmarc.example", "_dmarc.example"),
        ("192.0.2.1", "192.0.2.1"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("3com.example", "3com.example"),
    ],
)
def test_a_host_has_one_canonical_form(text: str, host: str):
    assert host_of(text) == host


BAD = ["", ".", "a..b", "-a.b", "a-.b", "a b", "a/b", "a@b", "a%2eb", "bücher.example", "a\0b", "a\n", "2001:db8::1"]
NUMBERS = ["127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "1.2.3.4.5", "256.1.1.1", "01.2.3.4", "a.0x"]
LONG = [f"{'a' * 64}.b", ".".join(["a" * 50] * 6), "[fe80::1%lo]", "[127.0.0.1]", "[a]", "[::1", "::1]"]


@pytest.mark.parametrize("text", [*BAD, *NUMBERS, *LONG])
def test_invalid_hosts_are_refused(text: str):
    with pytest.raises(ValueError):
        host_of(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("a.b", HostRule("a.b")),
        ("A.b.:8080", HostRule("a.b", (8080,))),
        ("*.a.b", HostRule("*.a.b")),
        ("*", HostRule("*")),
        ("*:8443", HostRule("*", (8443,))),
        ("192.0.2.1:80", HostRule("192.0.2.1", (80,))),
        ("2001:db8::1", HostRule("2001:db8::1")),
        ("[2001:db8::1]:443", HostRule("2001:db8::1", (443,))),
    ],
)
def test_rules_are_parsed(text: str, rule: HostRule):
    assert HostRule.parse(text) == rule
    assert HostRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text", ["a.b:", "a.b:0", "a.b:65536", "a.b:x", "a.b:080", "*.", "*.1.2.3.4", "*a.b", "a.*", "http://a.b"]
)
def test_invalid_rules_are_refused(text: str):
    with pytest.raises(ValueError):
        HostRule.parse(text)


@pytest.mark.parametrize(
    ("rule", "host", "is_allowed"),
    [
        ("a.b", "a.b", True),
        ("a.b", "x.a.b", False),
        ("*.a.b", "x.a.b", True),
        ("*.a.b", "y.x.a.b", True),
        ("*.a.b", "a.b", False),
        ("*.a.b", "xa.b", False),
        ("*", "a.b", True),
        ("*", "192.0.2.1", False),
        ("*.2.1", "192.0.2.1", None),
        ("192.0.2.1", "192.0.2.1", True),
        ("2001:db8::1", "2001:db8::1", True),
    ],
)
def test_a_rule_allows_exactly_its_hosts_and_ports(rule: str, host: str, is_allowed: bool | None):
    if is_allowed is None:
        with pytest.raises(ValueError, match="number"):
            HostRule.parse(rule)
    else:
        assert HostRule.parse(rule).allows(host, 443) is is_allowed
        assert not HostRule.parse(rule).allows(host, 22)


@given(RULES, RULES, NAMES)
def test_a_covering_rule_allows_everything_that_the_covered_rule_allows(above: str, below: str, name: str):
    one, other = HostRule.parse(above), HostRule.parse(below)
    for host in (name, f"{name}.{below.removeprefix('*.')}" if below != "*" else name, below.removeprefix("*.")):
        if host != "*" and one.covers(other) and other.allows(host, 443):
            assert one.allows(host, 443)


def test_a_ceiling_is_checked_port_by_port():
    ceiling = EgressCeiling((HostRule.parse("a.b:80"), HostRule.parse("*.b:443")))
    ceiling.check(EgressOptions(("a.b",)))
    with pytest.raises(EgressNotAllowed):
        ceiling.check(EgressOptions(("c.b",)))
    ceiling.check(EgressOptions(("c.b:443",)))
    ceiling.check(None)
    EgressCeiling().check(EgressOptions())
