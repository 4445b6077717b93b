"""The demo's model and the result of its rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard.client import Record


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The model of the demo: its folder, and an optional adapter."""

    name: str
    folder: Path
    adapter: Path | None
    temperature: float
    python: str | None = None  # if it is not this one


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The records of the demo, and their totals."""

    player: DemoModel
    records: list[Record]
    took_s: float
    page: Path | None = None  # of the rollouts

    @property
    def solved(self) -> int:
        return sum(record.reward == 1.0 for record in self.records)

    @property
    def sampled_tokens(self) -> int:
        return sum((record.summary or {}).get("sampled_tokens") or 0 for record in self.records)

    @property
    def turns(self) -> int:
        return sum((record.summary or {}).get("turns") or 0 for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / max(self.took_s, 1e-9)

    def as_body(self) -> dict[str, Any]:
        return {
            "model": self.player.name,
            "temperature": self.player.temperature,
            "tasks": len(self.records),
            "solved": self.solved,
            "pass_rate": self.solved / len(self.records),
            "turns": self.turns,
            "sampled_tokens": self.sampled_tokens,
            "took_s": round(self.took_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "page": None if self.page is None else self.page.as_uri(),
            "rollouts": [record.raw for record in self.records],
        }
