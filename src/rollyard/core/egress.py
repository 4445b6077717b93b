"""Which hosts a task may reach: the rules of tasks and operators, and the check of the former against the latter.

A rule is `NAME`, `*.NAME` (every name below NAME, not NAME itself), `*` (every name) or an address, each with `:PORT`
if it is not for 80 and 443. An IPv6 address with a port is written `[ADDRESS]:PORT`.

Invariants. Names are compared in one form: lower case, ASCII, without a final dot. `*` matches no address: an address
must be listed literally. Text that looks like a number but is not an address in its usual form (`0x7f.1`,
`017700000001`) is neither a name nor an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from rollyard.core.failure import EgressNotAllowed, TaskInvalid

WEB_PORTS = (80, 443)

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
"""Methods of plain HTTP that can be allowed. Requests inside TLS are not visible."""

READING = ("GET", "HEAD")

ANY = "*"
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
MOST_NAME = 253


def host_of(text: str) -> str:
    """Returns a host in the form that is compared: a name, or an address without brackets. Raises ValueError."""
    if text.startswith("[") and text.endswith("]") and ":" in text:
        text = text[1:-1]
    elif ":" in text:
        raise ValueError("an IPv6 address must be in brackets")
    name = text.lower().removesuffix(".")
    if len(name) > MOST_NAME:
        raise ValueError(f"a name has at most {MOST_NAME} characters")
    if is_address(name):
        return str(ip_address(name))
    labels = name.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("a name has labels of a to z, 0 to 9, - and _; write others as xn--…")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError("this is a number, and not an address in its usual form")
    return name


def is_address(host: str) -> bool:
    if "%" in host:  # a zone: it names an interface of this machine
        return False
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def port_of(text: str) -> int:
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError(f"{text[:20]!r} is not a port")
    return int(text)


@dataclass(frozen=True, slots=True)
class HostRule:
    """A parsed rule. `name` is a host in its compared form, `*`, or `*.` and a name."""

    name: str
    ports: tuple[int, ...] = WEB_PORTS

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Raises ValueError, with the reason, if the text is not a rule."""
        host, port = text, ""
        if text.count(":") == 1 or "]:" in text:
            host, _, port = text.rpartition(":")
        elif text.count(":") > 1 and not text.startswith("["):
            host = f"[{text}]"
        ports = (port_of(port),) if port or text.endswith(":") else WEB_PORTS
        if host == ANY:
            return cls(ANY, ports)
        if host.startswith("*."):
            name = host_of(host[2:])
            if is_address(name):
                raise ValueError("there are no names below an address")
            return cls(f"*.{name}", ports)
        return cls(host_of(host), ports)

    def allows(self, host: str, port: int) -> bool:
        """`host` must have the form that `host_of` returns."""
        return port in self.ports and self._has(host)

    def covers(self, other: HostRule) -> bool:
        """Whether this rule allows everything that `other` allows."""
        if not set(other.ports) <= set(self.ports):
            return False
        return other.name == self.name or self._has(other.name.removeprefix("*."), is_below=other.name.startswith("*."))

    def _has(self, host: str, *, is_below: bool = False) -> bool:
        """With `is_below`: whether it matches every name below `host`."""
        if host == ANY:
            return self.name == ANY
        if is_address(host):
            return self.name == host
        if self.name == ANY:
            return True
        if self.name.startswith("*."):
            return host.endswith(self.name[1:]) or (is_below and host == self.name[2:])
        return host == self.name and not is_below

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.ports == WEB_PORTS else f"{name}:{self.ports[0]}"


@dataclass(frozen=True, slots=True)
class EgressOptions:
    """What a task requests. In a stage without hosts, its sandbox is offline."""

    hosts: tuple[str, ...] = ()  # rules; for INIT and RUN
    eval_hosts: tuple[str, ...] = ()  # rules; for EVAL
    methods: tuple[str, ...] = READING  # of plain HTTP


@dataclass(frozen=True, slots=True)
class EgressCeiling:
    """The operator's limits on what tasks may request. Without hosts, nothing is allowed."""

    hosts: tuple[HostRule, ...] = ()
    methods: tuple[str, ...] = READING
    private: tuple[HostRule, ...] = ()  # names that may have private addresses
    most_bytes: int = 1 << 30  # sent and received, per attempt
    connections: int = 32  # open at the same time, per sandbox
    mirrors: Mapping[str, str] = field(default_factory=dict[str, str])  # URLs, by package manager
    mirror_hosts: tuple[HostRule, ...] = ()  # of the mirrors: allowed for every task that has egress

    def check(self, requested: EgressOptions | None) -> None:
        """Raises EgressNotAllowed or TaskInvalid, with what to do about it."""
        if requested is None or not (requested.hosts or requested.eval_hosts):
            return
        if not (self.hosts or self.mirror_hosts):
            raise EgressNotAllowed(
                "sandbox.egress: this service keeps sandboxes offline; its operator can allow hosts with the setting"
                " egress_hosts"
            )
        allowed = (*self.hosts, *self.mirror_hosts)
        for name, texts in (("hosts", requested.hosts), ("eval_hosts", requested.eval_hosts)):
            for rule in rules_of(texts, f"sandbox.egress.{name}"):
                if not _covers(allowed, rule):
                    shown = ", ".join(map(str, allowed))
                    raise EgressNotAllowed(
                        f"sandbox.egress.{name}: {rule} is not among the hosts that tasks may ask for here ({shown});"
                        " leave it out, or have the operator add it to the setting egress_hosts"
                    )
        for method in requested.methods:
            if method not in self.methods:
                shown = ", ".join(self.methods)
                raise EgressNotAllowed(
                    f"sandbox.egress.methods: {method[:20]!r} is not among those that tasks may ask for here ({shown});"
                    " the operator's setting is egress_methods"
                )


def _covers(allowed: Iterable[HostRule], rule: HostRule) -> bool:
    """Port by port: `packages.example` is covered by `packages.example:80` and `packages.example:443` together."""
    allowed_rules = tuple(allowed)
    return all(any(each.covers(HostRule(rule.name, (port,))) for each in allowed_rules) for port in rule.ports)


def rules_of(texts: Iterable[str], where: str) -> tuple[HostRule, ...]:
    """Parses rules. Raises TaskInvalid, with the rule that cannot be parsed."""
    rules: list[HostRule] = []
    for text in texts:
        try:
            rules.append(HostRule.parse(text))
        except ValueError as error:
            raise TaskInvalid(f"{where}: {text[:100]!r}: {error}", field=where) from None
    return tuple(rules)
