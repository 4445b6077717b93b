"""An engine as somebody added it: plain data, so that the store can remember it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    POLICY = "policy"
    JUDGE = "judge"


class Kind(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"  # text only: what it gives is never trainable


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
    api_key: str = field(default="", repr=False)
