"""The body of an engine that is added, and what its address must be."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rollyard.core import check_id
from rollyard.core.engine import Admission
from rollyard.engines.base import EngineSpec, Kind, Role
from rollyard.service.schemas.body import Body, Name, Text


class EngineBody(Body):
    id: str | None = None
    url: Annotated[str, Field(max_length=2048, json_schema_extra={"pattern": r"^https?://[^/\s]+"})]
    kind: Literal["vllm", "sglang", "openai", "prorl"] = "vllm"
    policy: Name = "default"
    model: Text = ""
    role: Literal["policy", "judge"] = "policy"
    tokenizer: Text = ""
    renderer: Text = ""
    capacity: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    admission: Literal["adaptive", "fixed"] = "adaptive"
    api_key: Text = ""
    trust_tokenizer: bool = False

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        check_url(url)
        return url

    @field_validator("api_key")
    @classmethod
    def _fits_into_a_header(cls, key: str) -> str:
        if not key.isascii() or not (key.isprintable() or not key):
            raise ValueError("it is sent in a header: only printable ASCII characters are allowed")
        return key

    def to_spec(self) -> EngineSpec:
        return EngineSpec(
            id=engine_id(self.url) if self.id is None else check_id(self.id, "engine id"),
            url=self.url.rstrip("/"),
            kind=Kind(self.kind),
            policy=self.policy,
            model=self.model,
            role=Role(self.role),
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            capacity=self.capacity,
            admission=Admission(self.admission),
            api_key=self.api_key,
            trust_tokenizer=self.trust_tokenizer,
        )


def check_url(url: str) -> None:
    """Raises ValueError for an address that can never be connected to."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("a URL starts with http:// or https://")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ValueError("it contains blanks or control characters")
    parts = urlsplit(url)  # ValueError for unmatched brackets
    if "[" in parts.netloc and not re.fullmatch(r"(?:[^@]*@)?\[[0-9A-Fa-f:.]+\](?::\d+)?", parts.netloc):
        raise ValueError("the text in brackets is not an address")
    if not parts.hostname:
        raise ValueError("it has no host")
    if parts.port == 0:  # ValueError unless it is a number up to 65535
        raise ValueError("port 0 cannot be connected to")
    try:
        host = parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError("its host has a part that is empty or longer than 63 characters") from None
    if len(host) > 253:
        raise ValueError("its host is longer than 253 characters")


def engine_id(url: str) -> str:
    """An id from the address, for engines without one: adding the same engine twice by accident is refused."""
    name = re.sub(r"[^A-Za-z0-9._:-]+", "-", re.sub(r"^https?://(?:[^@/]*@)?", "", url)).strip("-.:_")
    return check_id(name[:128], "engine id")
