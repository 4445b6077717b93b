"""Types of the egress settings, and the ceiling on egress that they define."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator

from rollyard.core.egress import ANY, EgressCeiling, HostRule
from rollyard.sandbox.egress import mirror_rule


def _rule(text: str) -> str:
    HostRule.parse(text)
    return text


def _private(text: str) -> str:
    rule = HostRule.parse(text)
    if len(rule.ports) != 1 or rule.name.startswith(ANY):
        raise ValueError("one host and its port were expected, HOST:PORT")
    return text


def _mirror(url: str) -> str:
    mirror_rule(url)
    return url


Method = Literal["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]
Host = Annotated[str, AfterValidator(_rule)]
PrivateHost = Annotated[str, AfterValidator(_private)]
Mirrors = dict[Literal["pip", "npm", "apt"], Annotated[str, AfterValidator(_mirror)]]


def ceiling_of(
    *,
    hosts: Iterable[str],
    methods: tuple[str, ...],
    private: Iterable[str],
    mirrors: Mapping[Literal["pip", "npm", "apt"], str],
    most_bytes: int,
    connections: int,
) -> EgressCeiling:
    return EgressCeiling(
        hosts=tuple(map(HostRule.parse, hosts)),
        methods=methods,
        private=tuple(map(HostRule.parse, private)),
        most_bytes=most_bytes,
        connections=connections,
        mirrors={str(name): url for name, url in mirrors.items()},
        mirror_hosts=tuple(map(mirror_rule, mirrors.values())),
    )
