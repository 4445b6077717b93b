"""An engine as somebody added it: plain data, so that the store can remember it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from rollyard.core.address import is_loopback_host


class Role(StrEnum):
    POLICY = "policy"
    JUDGE = "judge"


class Kind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"  # text only: what it gives is never trainable
    PRORL = "prorl"  # the reference system's own: tokens and logprobs, no streams, no aborts, no versions


class Admission(StrEnum):
    """How many sessions an engine gets."""

    ADAPTIVE = "adaptive"  # as many as its KV cache holds, found out as it goes; no bound if it does not tell its load
    FIXED = "fixed"  # its capacity


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as somebody added it."""

    id: str
    url: str
    kind: Kind
    policy: str = "default"
    model: str = ""  # empty: the first one it lists
    role: Role = Role.POLICY
    tokenizer: str = ""  # a folder or a hub name; empty: where the engine says its model is
    renderer: str = ""  # empty: by the model's name
    capacity: int = 256  # sessions it should hold at once
    admission: Admission = Admission.ADAPTIVE
    api_key: str = field(default="", repr=False)
    trust_tokenizer: bool = False  # its tokens are trainable even if it cannot show which tokenizer it has

    @property
    def is_loopback(self) -> bool:
        """Only programs on the machine of whoever reads the URL can reach it."""
        return is_loopback_host(urlsplit(self.url).hostname or "")
