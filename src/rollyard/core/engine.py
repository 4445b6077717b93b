"""The configuration of an engine: plain data for the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from rollyard.core.address import is_loopback_host

TOKENIZER_PATH = "/rollyard/tokenizer"
"""Where Rollyard's own engines serve the files of their tokenizer: a list, and below it each file by its name."""


class Role(StrEnum):
    POLICY = "policy"
    JUDGE = "judge"


class Kind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"  # text only: its output is never trainable
    PRORL = "prorl"  # the reference system's own: tokens and logprobs, no streams, no aborts, no versions


class Admission(StrEnum):
    """How many sessions an engine may have."""

    ADAPTIVE = "adaptive"  # as many as its KV cache holds, measured continuously; no limit if it reports no load
    FIXED = "fixed"  # its capacity


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The configuration of one engine."""

    id: str
    url: str
    kind: Kind
    policy: str = "default"
    model: str = ""  # empty: the first one it lists
    role: Role = Role.POLICY
    tokenizer: str = ""  # a folder or a hub name; empty: the location of the model that the engine reports
    renderer: str = ""  # empty: chosen by the model's name
    capacity: int = 256  # sessions at the same time
    admission: Admission = Admission.ADAPTIVE
    api_key: str = field(default="", repr=False)
    trust_tokenizer: bool = False  # its tokens are trainable even if its tokenizer cannot be verified

    @property
    def is_loopback(self) -> bool:
        """Whether the URL is reachable only from the machine on which it is used."""
        return is_loopback_host(urlsplit(self.url).hostname or "")
